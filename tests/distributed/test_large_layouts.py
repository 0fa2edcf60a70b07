"""Ranks of 128 processes and more, built and stepped with torch's fake process group."""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layouts.results import common_folder, once
from suite import warm

from lmcore.contract.torch_versions import SPLIT_BACKWARD

WORKER = Path(__file__).with_name("dry_run_worker.py")

pytestmark = pytest.mark.distributed

TP8 = "--tensor-model-parallel-size 8 --sequence-parallel"
CASES = {
    "tp8-pp4-dp4-zero1": {
        "flags": f"--num-layers 4 {TP8} --pipeline-model-parallel-size 4 --zero-stage 1"
        " --global-batch-size 16",
        "world_size": 128,
        "ranks": list(range(128)),
    },
    "tp8-cp2-dp8-hsdp3": {
        "flags": f"--num-layers 2 {TP8} --context-parallel-size 2 --zero-stage 3"
        " --data-parallel-replicas 2 --global-batch-size 16",
        "world_size": 128,
        "ranks": [0, 37, 127],
    },
    "pp8-interleaved-dp32": {
        "flags": "--num-layers 16 --pipeline-model-parallel-size 8"
        " --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 256",
        "world_size": 256,
        "ranks": [0, 100, 255],
    },
    "tp8-cp2-pp8-zero-bubble-v-dp8": {
        "flags": f"--num-layers 16 {TP8} --context-parallel-size 2"
        " --pipeline-model-parallel-size 8 --pipeline-schedule zero-bubble-v"
        " --global-batch-size 64",
        "world_size": 1024,
        "ranks": [0, 1023],
    },
}
if not SPLIT_BACKWARD:  # which the schedule needs
    del CASES["tp8-cp2-pp8-zero-bubble-v-dp8"]
COMPLETE = "tp8-pp4-dp4-zero1"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Parameters and axes of each rank, by case."""
    folder = common_folder(tmp_path_factory, "large-layouts")
    printed = folder / "ranks.txt"
    with once(folder) as missing:
        if missing:
            listed = folder / "cases.json"
            listed.write_text(json.dumps(CASES), encoding="utf-8")
            command = [sys.executable, str(WORKER), str(listed)]
            done = warm.run(command, capture_output=True, text=True, timeout=110)
            assert done.returncode == 0, done.stderr
            printed.write_text(done.stdout, encoding="utf-8")
    found = collections.defaultdict(list)
    for line in printed.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        found[one["case"]].append(one)
    return found


@pytest.mark.parametrize("name", CASES)
def test_ranks_take_a_step(name: str, ranks: dict[str, Any]) -> None:
    """All that a rank holds gets a gradient; the losses are where the last layer is."""
    assert [one["rank"] for one in ranks[name]] == CASES[name]["ranks"]
    for one in ranks[name]:
        assert one["parameters"]
        assert all(parameter["gradient"] for parameter in one["parameters"])
        pipeline = one["axes"]["pipeline"]
        ends_at = pipeline[0] if "zero-bubble-v" in name else pipeline[-1]
        assert (one["losses"] > 0) == (one["rank"] == ends_at)


def test_the_ranks_together_hold_the_model(ranks: dict[str, Any]) -> None:
    """Every element of every parameter is held by as many ranks as each of them says."""
    held: dict[str, Any] = {}
    said: dict[str, Any] = {}
    for one in ranks[COMPLETE]:
        for parameter in one["parameters"]:
            name, shape = parameter["name"], parameter["shape"]
            count = held.setdefault(name, np.zeros(shape, dtype=int))
            expected = said.setdefault(name, np.zeros(shape, dtype=int))
            for offset, size in parameter["pieces"]:
                box = tuple(slice(at, at + n) for at, n in zip(offset, size, strict=True))
                count[box] += 1
                expected[box] = parameter["replica_count"]
    assert len(held) == 2 + 4 * 12 + 2
    for name, count in held.items():
        assert count.min() >= 1, f"no rank has some of {name}"
        assert (count == said[name]).all(), name


def test_every_rank_sees_its_samples(ranks: dict[str, Any]) -> None:
    """Ranks of one replica see the same samples, other replicas see others."""
    slices = collections.Counter(one["data_rank"] for one in ranks[COMPLETE])
    assert slices == {0: 32, 1: 32, 2: 32, 3: 32}
    by_rank = {one["rank"]: one for one in ranks[COMPLETE]}
    for one in by_rank.values():
        for axis in ("tensor", "pipeline"):
            same = {by_rank[rank]["data_rank"] for rank in one["axes"][axis]}
            assert same == {one["data_rank"]}
        replicas = [by_rank[rank]["data_rank"] for rank in one["axes"]["replicas"]]
        assert replicas == [0, 1, 2, 3]
