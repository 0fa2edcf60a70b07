"""`lmcore train --profile`: whole runs, alone and in a pipeline."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest


def annotations(path: Path) -> list[dict[str, Any]]:
    """Return the ranges of a trace."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [one for one in events if one.get("cat") == "user_annotation"]


def test_trace(train: Any, train_once: Any) -> None:
    """Each part of each step has its name in the trace; the run is the one without a profile."""
    flags = "--train-iters 6 --global-batch-size 8 --save-interval 4"
    run = train("profiled", f"{flags} --profile --profile-step-start 2 --profile-step-end 4")
    assert run.status == 0, run.err
    (path,) = (run.directory / "profile").iterdir()
    assert path.name == "steps_3-4.rank0.pt.trace.json.gz"
    found = annotations(path)
    counts = Counter(one["name"] for one in found)
    wanted = {"data": 4, "forward": 4, "backward": 4, "reduce": 2, "optimizer": 2, "checkpoint": 1}
    assert {name: counts[name] for name in wanted} == wanted
    steps = [one for one in found if one["name"].startswith("ProfilerStep#")]
    assert len(steps) == 2
    for one in found:  # each within one step
        assert any(
            step["ts"] <= one["ts"] and one["ts"] + one["dur"] <= step["ts"] + step["dur"]
            for step in steps
        ), one["name"]
    assert f"profile   steps 3 to 4: {path}" in run.err
    assert "host, ms a step: data " in run.err
    assert train_once(flags).curve() == run.curve()


def test_refused(train: Any) -> None:
    """Steps and processes that the run does not have are refused before anything is made."""
    run = train("run", "--train-iters 6 --profile --profile-ranks 4")
    assert run.status == 2
    assert "`profile_step_end: 12` (the default) is after the last step, 6" in run.err
    assert "`--profile-ranks 4`: there is no rank 4" in run.err
    assert not run.directory.exists()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(200)
def test_pipeline(start: Any, finish: Any) -> None:
    """Each process that is asked leaves a trace, with every micro-batch of its stage in it."""
    flags = (
        "--train-iters 3 --nproc-per-node 2 --pipeline-model-parallel-size 2 --global-batch-size 16"
        " --profile --profile-step-start 1 --profile-step-end 2 --profile-ranks 0 1"
    )
    run = finish(start("run", flags), "run")
    assert run.status == 0, run.err
    paths = sorted((run.directory / "profile").iterdir())
    assert [path.name.split(".")[1] for path in paths] == ["rank0", "rank1"]
    for path in paths:
        counts = Counter(one["name"] for one in annotations(path))
        assert (counts["forward"], counts["backward"], counts["optimizer"]) == (4, 4, 1)
        assert counts["reduce"] >= 1
