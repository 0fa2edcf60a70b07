"""Rules for `--engine deepspeed` and the options that need it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcore.config.load import load_config
from lmcore.config.resolve import resolve
from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.config.validate import problems_of, validate
from lmcore.errors import MissingPackageError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed need not be there for settings to be checked."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())


def found(line: str, world_size: int = 2) -> list[str]:
    loaded = load_config(line.split())
    return [one.what for one in problems_of(loaded, world_size=world_size)]


@pytest.mark.parametrize("flag", ["--cpu-offload", "--deepspeed-config ds.json"])
def test_what_deepspeed_alone_reads_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    """The native engine would pass over it in silence."""
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text("{}")
    assert f"`{flag}` needs `--engine deepspeed`" in found(flag)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_are_accepted(stage: int) -> None:
    """One to three, with recomputation and either precision."""
    assert found(f"--engine deepspeed --zero-stage {stage} --recompute full --bf16") == []


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "flags,what",
    [
        ("--tensor-model-parallel-size 2", "`--tensor-model-parallel-size 2`"),
        ("--pipeline-model-parallel-size 2", "`--pipeline-model-parallel-size 2`"),
        ("--context-parallel-size 2", "`--context-parallel-size 2`"),
        ("--zero-stage 0", "`--zero-stage 0`"),
        ("--optimizer muon", "`--optimizer muon`"),
        ("--optimizer schedulefree", "`--optimizer schedulefree`"),
    ],
)
def test_what_does_not_go_with_it_is_named(flags: str, what: str) -> None:
    """Nothing else divides the model, and an update must bear a flat row of weights."""
    text = found(f"--engine deepspeed {flags}")
    assert f"{what} cannot be combined with `--engine deepspeed`" in text


@pytest.mark.usefixtures("installed")
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
    assert problem.hint == "run `pip install deepspeed`"


@pytest.mark.usefixtures("installed")
def test_batch_sizes_of_the_file_must_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro-batches of a step times their samples times processes are the global batch."""
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(
        '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4,'
        ' "gradient_accumulation_steps": 2}'
    )
    line = "--engine deepspeed --deepspeed-config ds.json"
    assert found(line, world_size=4) == []
    (what,) = found(line, world_size=2)
    assert "which is 16" in what
    assert "`global_batch_size: 32` (ds.json: train_batch_size)" in what


@pytest.mark.usefixtures("installed")
def test_the_batch_follows_from_accumulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without a global batch says it by micro-batches and their number."""
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(
        '{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}'
    )
    loaded = load_config(["--engine", "deepspeed", "--deepspeed-config", "ds.json"])
    plan = resolve(validate(loaded, world_size=2), tokenizer=TokenizerIdentity(vocab_size=257))
    assert plan.global_batch_size == 24
    assert plan.num_micro_batches == 3
