"""Asynchronous copies: batches to the device, and the scalars of a step from it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lmcore.contract.transfer.async_scalars import ScalarCopier
from lmcore.data.loading.device_prefetch import prefetch_to_device
from lmcore.data.loading.loader import BatchLoader
from lmcore.library.loader import shard_loader
from lmcore.runtime.launch.rank import RankInfo

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 4"
    " --num-threads 1 --sample-tokens 0 --log-interval 1 --progress plain --nproc-per-node 1"
    " --global-batch-size 8 --eval-interval 3 --eval-iters 1 --device sim"
)


# Other numbers in each case: memory that one gave back may hold its numbers, which would be right
# in the next, also if no event is waited for.
FIRST = {True: 0, False: 1000}
"""First number of the samples, with and without marks."""


class Counting:
    """Sample i is first + i, first + i + 1, ..."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        return np.arange(self.first + i, self.first + i + 65, dtype=np.int64)


class Forgets(torch.Event):
    """An event that marks nothing."""

    def record(self, stream: Any = None) -> None: ...


@pytest.mark.parametrize("marks", [True, False])
def test_batches_are_late_and_right(
    sim: ModuleType, misbehave: Callable[[str], None], marks: bool
) -> None:
    """Copies are queued without waiting; the computation sees them whole, thanks to their events.

    Without the events it does not, which shows that the copies are late indeed.
    """
    from lmcore_sim.device import create_device

    device = create_device()
    if not marks:
        device = dataclasses.replace(device, new_event=lambda: Forgets("sim"))
    misbehave("slow:copy=20ms")
    right = []
    samples = Counting(FIRST[marks])
    with BatchLoader(samples, micro_batch_size=4, prefetch=2, pin=device.pin_memory) as loader:
        batches = prefetch_to_device(loader, device)
        while not loader._ready.full():
            time.sleep(0.001)
        for number in range(4):
            began = time.perf_counter()
            batch = next(batches)
            took = time.perf_counter() - began
            seen = batch["tokens_BS"] + 0  # on the stream of the computation, which waits
            wanted = FIRST[marks] + torch.arange(64) + torch.arange(4)[:, None] + 4 * number
            right.append(torch.equal(seen.cpu(), wanted))
            assert batch["tokens_BS"].device.type == "sim"
            assert took < 0.06 or number, "the copies of three tensors were waited for"
    assert all(right) is marks


@pytest.mark.parametrize("marks", [True, False])
def test_batches_of_a_users_loader_are_late_and_right(
    sim: ModuleType, misbehave: Callable[[str], None], marks: bool
) -> None:
    """Batches in pageable memory are pinned, queued one ahead, and whole if events order them."""
    from lmcore_sim.device import create_device

    device = create_device()
    if not marks:
        device = dataclasses.replace(device, new_event=lambda: Forgets("sim"))
    misbehave("slow:copy=20ms")
    runtime: Any = SimpleNamespace(device=device, rank=RankInfo(), processes=None)
    numbers = range(FIRST[marks], FIRST[marks] + 8)
    samples = [{"x": torch.full((64,), float(i)), "pair": (i, "text")} for i in numbers]
    batches = shard_loader(DataLoader(samples, 2), runtime, seed=0)  # type: ignore[arg-type]
    for _ in batches:
        break  # the copy of the second batch is in flight
    right, is_last, waits = [], [], []
    began = time.perf_counter()
    for number, batch in enumerate(batches):
        waits.append(time.perf_counter() - began)
        assert batch["pair"][0].device.type == "sim"
        assert batch["pair"][1] == ("text", "text")
        seen = batch["x"] + batch["pair"][0][:, None]
        is_last.append(batches.is_last)
        wanted = 2.0 * torch.tensor(numbers[2 * number : 2 * number + 2])[:, None].expand(2, 64)
        right.append(torch.equal(seen.cpu(), wanted))
        began = time.perf_counter()
    assert min(waits) < 0.03, "the copies of two tensors were waited for"
    assert is_last == [False] * 3 + [True]
    assert all(right) is marks


def test_numbers_are_read_when_they_are_there(
    sim: ModuleType, misbehave: Callable[[str], None]
) -> None:
    """Sent without waiting, read whole, and of the moment when they were sent."""
    from lmcore_sim.device import create_device

    device = create_device()
    values = torch.tensor([1.5, 2.5], device="sim")
    misbehave("slow:copy=20ms")
    copier = ScalarCopier(device)
    began = time.perf_counter()
    sent = [copier.copy(values) for _ in range(3)]
    assert time.perf_counter() - began < 0.02
    values += 1.0
    assert [scalars.read() for scalars in sent] == [[1.5, 2.5]] * 3
    assert time.perf_counter() - began > 0.05


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_waits_for_nothing_and_is_the_same(run_python: RunPython, tmp_path: Path) -> None:
    """No step waits for the device; rows and validations equal a run that waits."""
    rows = {}
    for name, flags in (("late", ""), ("at-once", "--no-async-metrics")):
        arguments = f"{TINY} {flags} --train-iters 7 --save {tmp_path / name} --save-interval 5"
        script = str(Path(__file__).parent / "watched_run.py")
        done = run_python(script, *arguments.split(), LMCORE_SIM_FAULTS="slow:copy=500us")
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == f"watched {7 if name == 'late' else 0}"
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        keep = ("step", "loss", "grad_norm", "learning_rate", "consumed_samples", "valid_loss")
        rows[name] = [[json.loads(line).get(key) for key in keep] for line in lines]
        times = sorted(json.loads(line)["step_time_ms"] for line in lines)
        assert times[0] > times[3] / 10  # the last step took its time, too
    assert [row[0] for row in rows["late"]] == list(range(1, 8))
    assert rows["late"] == rows["at-once"]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_profile(run_python: RunPython, tmp_path: Path) -> None:
    """A profile names the parts of a step on this device too."""
    import gzip

    arguments = f"{TINY} --train-iters 4 --save {tmp_path / 'run'} --profile --save-interval 3"
    steps = "--profile-step-start 2 --profile-step-end 3"
    done = run_python("-m", "lmcore.cli.main", "train", *arguments.split(), *steps.split())
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "run" / "profile").iterdir()
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    found = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    counts = {"data": 2, "forward": 2, "backward": 2, "reduce": 1, "optimizer": 1, "checkpoint": 1}
    assert {name: found.count(name) for name in counts} == counts
    assert "host, ms a step: data " in done.stderr
