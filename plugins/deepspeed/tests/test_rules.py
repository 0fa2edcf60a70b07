"""Rules for DeepSpeed's engine, from its record."""

from __future__ import annotations

import pytest

from lmcore.base.errors import MissingPackageError
from lmcore.config.load import load_config
from lmcore.config.validate import problems_of

pytestmark = pytest.mark.usefixtures("package_is_there")


def found(line: str, world_size: int = 2) -> list[str]:
    loaded = load_config(line.split())
    return [one.what for one in problems_of(loaded, world_size=world_size)]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_are_accepted(stage: int) -> None:
    """One to three, with recomputation and either precision."""
    assert found(f"--engine deepspeed --zero-stage {stage} --recompute full --bf16") == []


@pytest.mark.parametrize("optimizer", ["muon", "schedulefree"])
def test_optimizers_that_it_lacks(optimizer: str) -> None:
    """An update must bear a flat row of weights."""
    text = found(f"--engine deepspeed --optimizer {optimizer}")
    assert f"`--optimizer {optimizer}` cannot be combined with `--engine deepspeed`" in text


def test_megatrons_flag_leaves_other_optimizers_to_the_native_engine() -> None:
    """`--deepspeed` with an optimizer that DeepSpeed cannot have here is the native engine."""
    loaded = load_config(["--deepspeed", "--optimizer", "schedulefree"])
    assert loaded.value("engine") == "native"
    lines = "\n".join(loaded.notices)
    assert "DeepSpeed's engine does not run `--optimizer schedulefree` here" in lines


def test_compiled_layers_run_no_hooks() -> None:
    """Stage 3 gathers weights by hooks; stage 2 does not."""
    assert found("--engine deepspeed --zero-stage 2 --compile") == []
    assert found("--engine deepspeed --zero-stage 3 --compile") == [
        "`--compile` cannot be combined with ZeRO stage 3 of DeepSpeed"
    ]


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the package to install before anything is built."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    (problem,) = problems_of(load_config(["--engine", "deepspeed"]), world_size=1)
    assert isinstance(problem, MissingPackageError)
    assert problem.hint == "run `pip install deepspeed`, or use `--engine native`"
