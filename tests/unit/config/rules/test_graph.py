"""Rules for `--step-graph`."""

from __future__ import annotations

import pytest
from stand_in_engine import stand_in_for_deepspeed

from lmcore.config.load import load_config
from lmcore.config.validate import problems_of

SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64"


def problems(line: str, world_size: int) -> list[tuple[str, str]]:
    loaded = load_config([*SHAPE.split(), *line.split()])
    return [
        (one.what, one.why or "")
        for one in problems_of(loaded, world_size=world_size)
        if "--step-graph" in one.what
    ]


@pytest.mark.parametrize("line,world_size", [("", 1), ("--global-batch-size 32", 2)])
def test_accepted(line: str, world_size: int) -> None:
    """One process and data-parallel replicas are captured."""
    assert problems(f"--step-graph {line}", world_size) == []


@pytest.mark.parametrize(
    "line,world_size,why",
    [
        ("--tensor-model-parallel-size 2", 2, "contain collectives"),
        ("--context-parallel-size 2", 2, "contain collectives"),
        ("--pipeline-model-parallel-size 2", 2, "contain collectives"),
        ("--zero-stage 1", 2, "contain collectives"),
        ("--use-distributed-optimizer", 2, "contain collectives"),
        ("--recompute full", 1, "restores the random states"),
        ("--optimizer sophia", 1, "sampled labels"),
    ],
)
def test_refused(line: str, world_size: int, why: str) -> None:
    """Every option that involves the host in forward and backward is refused by name."""
    ((what, reason),) = problems(f"--step-graph {line}", world_size)
    assert what == f"`--step-graph` cannot be combined with `{line}`"
    assert why in reason
    assert problems(line, world_size) == []


def test_other_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's engine runs forward and backward itself."""
    stand_in_for_deepspeed(monkeypatch)
    ((what, why),) = problems("--step-graph --engine deepspeed", 2)
    assert what == "`--step-graph` cannot be combined with `--engine deepspeed`"
    assert "runs forward and backward itself" in why


def test_megatrons_switch() -> None:
    """Megatron's flag takes no value, and neither does the translation."""
    loaded = load_config(["--enable-cuda-graph", *SHAPE.split()])
    assert loaded.config.training.step_graph
