"""Whole runs of a divided model: its sample, and other commands that read its checkpoint."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from lmcore.cli.main import main
from lmcore.train.report import sample

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

SAME = "--global-batch-size 4 --train-iters 4 --vocab-size 264 --sample-tokens 8"
DIVIDED = "--nproc-per-node 2 --tensor-model-parallel-size 2 --make-vocab-size-divisible-by 4"


@pytest.fixture
def divided(start: Any, finish: Any) -> Any:
    """A run of two processes that divide the layers."""
    run = finish(
        start("divided", f"{SAME} {DIVIDED} --async-save --save-interval 2 --norm-epsilon 1e-5"),
        "divided",
    )
    assert run.status == 0, run.err
    assert run.err.count("was translated") == 1  # by the launcher, not by its processes again
    return run


def test_a_divided_model(divided: Any, train: Any, capsys: Any) -> None:
    """Loss and sample match one process; others fine-tune it and generate from it."""
    alone = train("alone", SAME)
    assert alone.status == 0, alone.err
    assert divided.rows[-1]["loss"] == pytest.approx(alone.rows[-1]["loss"], rel=2e-6)
    assert divided.summary["sample"] == alone.summary["sample"]
    assert divided.summary["sample"]["text"]
    assert sorted(path.name for path in (divided.directory / "checkpoints").glob("iter_*")) == [
        "iter_0000002",
        "iter_0000004",
    ]
    tuned = train("tuned", f"{SAME} --finetune --load {divided.directory}")
    assert tuned.status == 0, tuned.err
    assert tuned.rows[0]["loss"] < alone.rows[0]["loss"]
    command = ["generate", "--load", str(divided.directory), "--prompt", "To be", "--tokens", "4"]
    assert main(command) == 0
    assert capsys.readouterr().out.strip()


def test_too_large_for_a_sample(
    train_once: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One process does not load weights that may not fit; a line says what does."""
    monkeypatch.setattr(sample, "_LARGEST_BYTES", 1000)
    runtime: Any = None  # nothing is built
    with caplog.at_level("INFO", logger="lmcore"):
        checkpoint = train_once("--train-iters 4").directory / "checkpoints/iter_0000004"
        monkeypatch.setattr(logging.getLogger("lmcore"), "propagate", True)
        assert sample.whole_model(checkpoint, runtime) is None
    assert f"`lmcore generate --load {checkpoint}` takes one" in caplog.text
