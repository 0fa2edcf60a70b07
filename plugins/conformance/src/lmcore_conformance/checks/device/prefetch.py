"""Level 1: batches arrive whole while the device computes, as the run's data path copies them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, cast

import torch

from lmcore.data.loading.batch import Batch
from lmcore.data.loading.device_prefetch import prefetch_to_device
from lmcore_conformance.registry import check, conclude

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

_BATCHES = 10
_SIZE = 2**19
_STEPS = 20


class _Loader:
    """Loader whose batches are ready: batch k is full of k, in pinned memory."""

    wait_seconds = 0.0

    def __init__(self, bench: Bench) -> None:
        pin = bench.device.require("pin_memory")
        self._left = deque({"x": pin(torch.full((_SIZE,), float(k)))} for k in range(_BATCHES))

    def __next__(self) -> Batch:
        if not self._left:
            raise StopIteration
        return self._left.popleft()

    def next_if_ready(self) -> Batch | None:
        return self._left.popleft() if self._left else None


@check(
    "device.prefetch",
    "A batch that is copied on its own stream arrives whole before the computation reads it, and "
    "its memory is not overwritten before the computation is done.",
    level="L1",
    reason="Training reads each batch while the next one is copied; a wrong order trains on "
    "damaged samples, silently.",
    group="streams",
    requires=["streams", "events", "pin_memory"],
)
def prefetch(bench: Bench) -> str:
    """Compute with batches from the data path, release each, and compare all results."""
    faults = set()
    for _ in range(2):
        batches = prefetch_to_device(cast("Any", _Loader(bench)), bench.device)
        results = []
        for batch in batches:
            result = batch["x"]
            del batch  # its memory is free for a later batch, while work on it is queued
            for _ in range(_STEPS):
                result = result + 1
            results.append(result)
        bench.device.synchronize()
        faults |= {
            f"batch {k} of {_BATCHES} was computed with other numbers than the host sent"
            for k, result in enumerate(results)
            if not torch.equal(result.cpu(), torch.full((_SIZE,), float(k + _STEPS)))
        }
    return conclude(sorted(faults)[:3], f"{_BATCHES} batches, twice")
