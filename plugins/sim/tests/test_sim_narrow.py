"""A device without float64 trains, validates and generates: lmcore asks for none there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

RUN = Path(__file__).with_name("narrow_run.py")
TINY = (
    "--device sim --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32"
    " --micro-batch-size 2 --global-batch-size 4 --train-iters 3 --eval-interval 2 --eval-iters 1"
    " --progress plain --num-threads 1 --attention-dropout 0.1 --hidden-dropout 0.1"
)


def test_a_device_without_float64(run_python: Callable[..., Any]) -> None:
    """Checks at the start, loss scale, clipping, an optimizer's sums and samples need none."""
    more = "--precision fp16 --initial-loss-scale 1024 --optimizer schedulefree"
    more += " --recompute full --sample-tokens 3"
    done = run_python(str(RUN), "train", *TINY.split(), *more.split(), LMCORE_SIM_DEVICES="1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "backward True" in done.stdout
