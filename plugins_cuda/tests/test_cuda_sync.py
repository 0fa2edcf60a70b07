"""Steps on the GPU, which are queued without waiting; torch itself reports a wait."""

from __future__ import annotations

import gzip
import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

TINY = (
    "train --device cuda --num-layers 2 --hidden-size 128 --num-attention-heads 2 --seq-length 64"
    " --micro-batch-size 4 --global-batch-size 8 --sample-tokens 0 --log-interval 1"
    " --progress none --nproc-per-node 1 --train-iters 8 --eval-interval 4 --eval-iters 1"
)
FIRST = 3
"""The first step that is watched: before it kernels are loaded and compiled."""

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture(autouse=True)
def _installed() -> None:
    """Skip where lmcore would not find the plugin."""
    try:
        importlib.metadata.distribution("lmcore-cuda")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("lmcore-cuda is not installed")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts the steps that were queued while each wait for the GPU is an error."""
    from lmcore.train.step import TrainStep

    steps: list[int] = []
    real = TrainStep.__call__

    def step(self: Any, *args: Any) -> Any:
        if self.state.iteration + 1 < FIRST:
            return real(self, *args)
        torch.cuda.set_sync_debug_mode("error")
        try:
            pending = real(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        steps.append(self.state.iteration)
        return pending

    monkeypatch.setattr(TrainStep, "__call__", step)
    yield steps
    torch.cuda.set_sync_debug_mode("default")


def train(folder: Path, flags: str) -> list[dict[str, Any]]:
    """Train in this process; return the rows."""
    from lmcore.cli.main import main

    assert main([*TINY.split(), *flags.split(), "--save", str(folder)]) == 0
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_mode_sees_what_waits() -> None:
    """To read a number of the GPU is an error in the mode that the other tests use."""
    value = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            value.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("flags", ["", "--no-compile", "--precision fp32", "--recompute full"])
def test_nothing_waits_in_a_step(tmp_path: Path, watched: list[int], flags: str) -> None:
    """From the batch to the update the host only queues."""
    rows = train(tmp_path / "run", flags)
    assert watched == list(range(FIRST, 9))
    assert len(rows) == 8


def test_late_numbers_are_the_numbers(tmp_path: Path) -> None:
    """Read late or at once, the losses are the same."""
    flags = "--deterministic --no-compile"
    late = train(tmp_path / "late", flags)
    at_once = train(tmp_path / "at-once", f"{flags} --no-async-metrics")
    for first, other in zip(late, at_once, strict=True):
        assert first["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert first["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)


def test_profile(tmp_path: Path) -> None:
    """A profile has the GPU's kernels, and the parts of a step by name."""
    train(tmp_path / "run", "--profile --profile-step-start 5 --profile-step-end 6")
    (path,) = (tmp_path / "run" / "profile").iterdir()
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    named = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert named >= {"data", "forward", "backward", "reduce", "optimizer"}
