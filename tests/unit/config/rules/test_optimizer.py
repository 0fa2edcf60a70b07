"""Rules for an optimizer's options and for the layouts that it can train."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError
from lmcore.config.derived.layout import ParallelLayout
from lmcore.config.load import load_config
from lmcore.config.need import Situation
from lmcore.config.optimizers import OPTIMIZERS
from lmcore.config.rules.optimizer import optimizer_layout_problems
from lmcore.config.section import run_options
from lmcore.config.validate import RULES


def problems(line: str) -> list[str]:
    loaded = load_config(line.split())
    return [str(problem) for rule in RULES for problem in rule(loaded)]


def own_options(name: str) -> list[str]:
    """Return the options that declare that they need an optimizer."""
    return [
        option.name
        for option in run_options().values()
        if any(need.words.startswith("`--optimizer ") for need in option.needs)
        and all(
            need.met(Situation(load_config(["--optimizer", name]).config)) for need in option.needs
        )
    ]


def test_option_of_another_optimizer() -> None:
    """It is named, with the optimizers that have it."""
    (found,) = problems("--optimizer sgd --adam-beta2 0.95")
    assert found.startswith("`--adam-beta2 0.95` needs `--optimizer adam`, `lamb`, ")
    assert "sgd" not in found.partition("needs")[2]


def test_switch_of_another_optimizer() -> None:
    """A switch that is turned off is given too."""
    (found,) = problems("--no-muon-nesterov")
    assert found.startswith("`--no-muon-nesterov` needs `--optimizer muon`")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_own_options_go_with_it(name: str) -> None:
    """Each optimizer takes its own options."""
    assert own_options(name)
    values = {"muon_nesterov": "", "muon_num_ns_steps": "6", "sophiag_hessian_interval": "5"}
    given = [
        f"--{'no-' if option == 'muon_nesterov' else ''}{option.replace('_', '-')} "
        + values.get(option, "7" if option.startswith("shampoo_") else "0.5")
        for option in own_options(name)
    ]
    assert problems(f"--optimizer {name} " + " ".join(given)) == []


def test_import_path() -> None:
    """Its own options go with it, the others' do not, and a malformed path is refused."""
    assert problems("--optimizer torch.optim:NAdam --optimizer-args eps=1 --weight-decay 0") == []
    (found,) = problems("--optimizer torch.optim:NAdam --adam-beta1 0.8")
    assert "needs `--optimizer adam`" in found
    (found,) = problems("--optimizer sgd --optimizer-args eps=1")
    assert "needs `--optimizer module:Class`" in found
    for path in ("torch.optim:", ":NAdam", "a:b:c", "torch/optim.py:NAdam"):
        (found,) = problems(f"--optimizer {path}")
        assert "is not the import path of a class" in found


def test_unknown_name() -> None:
    """A name without a colon has to be a listed one."""
    with pytest.raises(ConfigError, match="unknown choice"):
        load_config(["--optimizer", "adamm"])


def test_defaults_go_with_all(tmp_path: Path) -> None:
    """A run's `config.yaml` repeats every default."""
    settings = tmp_path / "run.yaml"
    settings.write_text("optimizer:\n  adam_beta1: 0.9\n  sgd_momentum: 0.9\n")
    assert problems(f"{settings} --optimizer sgd") == []


def layout_problems(line: str, **layout: int) -> list[str]:
    loaded = load_config(line.split())
    return [str(problem) for problem in optimizer_layout_problems(loaded, ParallelLayout(**layout))]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("layout", [{"tensor": 2}, {"zero_stage": 1, "data": 2}])
def test_whole_matrices_are_not_divided(name: str, layout: dict[str, int]) -> None:
    """An optimizer that needs whole parameters is refused if they are divided; no other is."""
    found = layout_problems(f"--optimizer {name}", **layout)
    refused = OPTIMIZERS[name].needs_whole or (name == "sophia" and "tensor" in layout)
    assert len(found) == int(bool(refused))


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"zero_stage": 1, "data": 2}])
def test_imported_class_in_parts(layout: dict[str, int]) -> None:
    """It is divided only if the user says that it is elementwise."""
    (found,) = layout_problems("--optimizer torch.optim:NAdam", **layout)
    assert "`--optimizer-elementwise`" in found
    line = "--optimizer torch.optim:NAdam --optimizer-elementwise"
    assert layout_problems(line, **layout) == []
    assert layout_problems("--optimizer torch.optim:NAdam", data=2, pipeline=2) == []


def test_reason_and_way_out() -> None:
    """The layout is named, with the reason and the optimizers that go with it."""
    (found,) = layout_problems("--optimizer muon --zero-stage 2", zero_stage=2, data=2)
    assert "`--optimizer muon` cannot be combined with `--zero-stage 2`" in found
    assert "it orthogonalizes whole matrices" in found
    assert "use `--optimizer adam`, `sgd`, `lamb`, `adopt`, `schedulefree`" in found
    assert "remove `--zero-stage`" in found


def test_distributed_optimizer_is_named_as_given() -> None:
    """The problem names Megatron's flag if the user gave that flag."""
    (found,) = layout_problems(
        "--optimizer adam8bit --use-distributed-optimizer", zero_stage=1, data=2
    )
    assert "`--use-distributed-optimizer`" in found
    assert "--zero-stage" not in found


def test_all_that_shards_is_named() -> None:
    """The hint names both flags if both are given."""
    (found,) = layout_problems(
        "--optimizer muon --zero-stage 2 --use-distributed-optimizer", zero_stage=2, data=2
    )
    assert "or remove `--zero-stage` and `--use-distributed-optimizer`" in found


def test_sophia_needs_logits_of_the_whole_model() -> None:
    """It goes with data parallelism and ZeRO, not with a divided model or sequence."""
    assert layout_problems("--optimizer sophia", data=2, zero_stage=3) == []
    (found,) = layout_problems(
        "--optimizer sophia --pipeline-model-parallel-size 2 --context-parallel-size 2",
        pipeline=2,
        context=2,
    )
    assert "`--pipeline-model-parallel-size 2` and `--context-parallel-size 2`" in found
    assert "logits of the whole vocabulary" in found
