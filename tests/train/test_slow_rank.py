"""A rank that is slower than the other ranks is named, in every layout; none is in other runs."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.distributed

SLEEP = """
import os, sys, time
def patch():
    if "torch" not in sys.modules:  # not loaded in this process: it is no rank
        return
    import lmcore.data.loading.loader as loader, lmcore.families.layers.transformer as transformer
    for owner, name in ((loader.BatchLoader, "__next__"), (transformer.Block, "forward")):
        def late(self, *arguments, original=getattr(owner, name), **options):
            if os.environ.get("RANK") == "RANK_SLOW":
                time.sleep(0.015)
            return original(self, *arguments, **options)
        setattr(owner, name, late)
os.register_at_fork(after_in_child=patch)
"""
SLOW = SLEEP.replace("RANK_SLOW", "1")
SMALL = "--train-iters 19 --log-interval 9"
TP = "--tensor-model-parallel-size 2"
PP = "--pipeline-model-parallel-size 2 --global-batch-size 16"


@pytest.mark.parametrize(
    "flags, size",
    [
        ("", 2),
        pytest.param(f"{TP} --sequence-parallel", 2, marks=pytest.mark.full),
        pytest.param("--zero-stage 3", 2, marks=pytest.mark.full),
        pytest.param("", 4, marks=pytest.mark.full),
        pytest.param("--zero-stage 1", 2, marks=pytest.mark.full),
        pytest.param("--context-parallel-size 2", 2, marks=pytest.mark.full),
        pytest.param(PP, 4, marks=pytest.mark.full),
        pytest.param(f"{TP} {PP}", 4, marks=pytest.mark.full),
    ],
)
def test_it_is_named(start: Any, finish: Any, flags: str, size: int) -> None:
    """Once, though it is slow in every exchange, and its time is in the metrics."""
    run = finish(start("run", f"--nproc-per-node {size} {SMALL} {flags}", before=SLOW), "run")
    assert run.status == 0, run.err
    assert run.err.count("the median step of the other ranks") == 1, run.err
    assert "warning: rank 1 on host " in run.err
    rows = [row for row in run.rows if "slowest_rank" in row]
    assert [row["step"] for row in rows] == [9, 18]
    for row in rows:
        assert row["slowest_rank"] == 1
        assert row["rank_time_max_ms"] > 1.5 * row["rank_time_min_ms"]
        assert row["rank_time_min_ms"] <= row["rank_time_median_ms"] <= row["rank_time_max_ms"]
        assert row["rank_time_max_ms"] < row["step_time_ms"] * 1.5
