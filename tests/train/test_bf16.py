"""Runs in bf16: losses beside those in fp32, and the choice by measured products."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import pytest

from lmcore.optim import adamw
from lmcore_cpu import device
from lmcore_cpu.kernel.processor import facts

STEPS = 300
FAMILIES = {
    "gpt": "",
    "llama": "--normalization RMSNorm --swiglu --ffn-hidden-size 128 --disable-bias-linear"
    " --position-embedding-type rope --group-query-attention --num-query-groups 1",
}


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_losses_of_300_steps(train: Any, name: str) -> None:
    """Each step is within 2%, and the mean of the last 50 within 0.5%."""
    flags = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64 --lr 1e-3 "
        f"--max-position-embeddings 64 --train-iters {STEPS} --global-batch-size 16 "
        f"--micro-batch-size 16 --eval-iters 0 {FAMILIES[name]}"
    )
    losses = {}
    for precision in ("fp32", "bf16"):
        run = train(precision, f"{flags} --precision {precision}", None)
        assert run.status == 0, run.err
        losses[precision] = [row["loss"] for row in run.rows]
    assert len(losses["fp32"]) == STEPS
    assert losses["bf16"] != losses["fp32"]
    assert losses["fp32"][-1] < 0.8 * losses["fp32"][0]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)
    means = [statistics.mean(losses[one][-50:]) for one in ("bf16", "fp32")]
    assert means[0] == pytest.approx(means[1], rel=0.005)


def test_copies_of_weights_change_no_bit(
    train: Any, assert_same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several micro-batches, saves, validation and a resumed run read what a cast would give."""
    flags = (
        "--precision bf16 --train-iters 8 --save-interval 4 --async-save --eval-interval 3 "
        "--eval-iters 1 --split 8,4,3 --global-batch-size 8 --micro-batch-size 2 --clip-grad 0.1"
    )
    written: list[bool] = []
    plain = adamw.copies_of

    def counted(weights: Any) -> Any:
        found = plain(weights)
        written.append(any(one is not None for one in found))
        return found

    monkeypatch.setattr(adamw, "copies_of", counted)
    run = train("copies", flags)
    assert run.status == 0, run.err
    assert any(written) == facts().bfloat16_products
    resumed = train("resumed", f"{flags} --ckpt-step 4 --load {run.directory}")
    assert resumed.curve() == run.curve()[4:]
    monkeypatch.setattr(adamw, "keep_copies", lambda weights, dtype: None)
    cast = train("cast", flags)
    assert cast.curve() == run.curve()
    assert_same(cast.saved(), run.saved())
    assert_same(resumed.saved(), run.saved())


@pytest.fixture
def say_rates(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Function that gives the CPU the rates of its products."""

    def say(**rates: float) -> None:
        monkeypatch.setattr(device._PeakFlops, "__call__", lambda self, dtype: rates[dtype])

    return say


def test_auto_is_chosen_once_for_a_run(train: Any, say_rates: Callable[..., None]) -> None:
    """The run's files have what was measured, and a run that continues keeps it."""
    say_rates(float32=1e9, bfloat16=2e9)
    flags = "--train-iters 4 --save-interval 2 --cpu-peak-seconds 0.5"
    first = train("first", f"{flags} --precision auto")
    assert "precision bf16: products in bfloat16 are 2.0 times as fast" in first.err
    named = train("named", f"{flags} --precision bf16")
    assert first.curve() == named.curve()
    assert "precision: bf16" in (first.directory / "config.yaml").read_text("utf-8")
    say_rates(float32=1e9, bfloat16=1e9)
    resumed = train("second", f"{flags} --precision auto --ckpt-step 2 --load {first.directory}")
    assert "precision fp32" not in resumed.err
    assert "precision bf16: the" not in resumed.err
    assert resumed.curve() == first.curve()[2:]
    other = train("other", f"{flags} --precision auto")
    assert "precision fp32: the device's default" in other.err
    assert other.curve() != first.curve()
