"""What does not go with `--step-graph`."""

from __future__ import annotations

import pytest

from lmcore.config.load import load_config
from lmcore.config.rules.all import problems_of

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
    """One process and copies of the model are recorded."""
    assert problems(f"--step-graph {line}", world_size) == []


@pytest.mark.parametrize(
    "line,world_size,why",
    [
        ("--tensor-model-parallel-size 2", 2, "exchange tensors within forward and backward"),
        ("--context-parallel-size 2", 2, "exchange tensors within forward and backward"),
        ("--pipeline-model-parallel-size 2", 2, "exchange tensors within forward and backward"),
        ("--zero-stage 1", 2, "exchange tensors within forward and backward"),
        ("--use-distributed-optimizer", 2, "exchange tensors within forward and backward"),
        ("--recompute full", 1, "random numbers back from the host"),
        ("--optimizer sophia", 1, "draws targets from the model"),
    ],
)
def test_refused(line: str, world_size: int, why: str) -> None:
    """Whatever the host takes part in between forward and update is refused, by name."""
    ((what, reason),) = problems(f"--step-graph {line}", world_size)
    assert what == f"`--step-graph` does not go with `{line}`"
    assert why in reason
    assert problems(line, world_size) == []


def test_other_engine() -> None:
    """DeepSpeed's engine runs forward and backward itself."""
    ((what, why),) = problems("--step-graph --engine deepspeed", 2)
    assert what == "`--step-graph` does not go with `--engine deepspeed`"
    assert "runs forward and backward itself" in why


def test_megatrons_switch() -> None:
    """Megatron's flag takes no value, and neither does the translation."""
    loaded = load_config(["--enable-cuda-graph", *SHAPE.split()])
    assert loaded.config.training.step_graph
