"""Memory and tensors that calls leave in use, found by repeating them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

__all__ = ["memory_kept", "tensors_kept"]

_CALLS = 100
_FEW_CALLS = 20
"""Calls whose tensors are counted; a kernel may have buffers that it uses again after fewer."""

_SLACK = 2**16
_HOST_SLACK = 8 * 2**20
"""Bytes by which the figure may rise: on the host it counts the whole process."""


def memory_kept(bench: Bench, call: Callable[[], object]) -> Iterator[str]:
    """Yield if many calls leave memory in use, and do so again."""
    call()
    left = _least_in_use(bench, call, _CALLS)
    if left > (_HOST_SLACK if bench.is_host else _SLACK):
        yield f"keeps memory: {_CALLS} calls leave {left / 2**20:.1f} MiB more in use"


def tensors_kept(bench: Bench, call: Callable[[], object]) -> Iterator[str]:
    """Yield if calls leave tensors that Python holds, or memory of an accelerator.

    On the host the figure of memory is the whole process's, which says nothing of small tensors.
    """
    for _ in range(_FEW_CALLS):
        call()
    before = _live_tensors(bench)
    for _ in range(_FEW_CALLS):
        call()
    more = _live_tensors(bench) - before
    if more >= _FEW_CALLS:
        yield f"keeps tensors of every call: {_FEW_CALLS} calls leave {more} more"
    elif not bench.is_host:
        left = _least_in_use(bench, call, _FEW_CALLS)
        if left > _SLACK:
            yield f"keeps memory: {_FEW_CALLS} calls leave {left / 2**20:.1f} MiB more in use"


def _live_tensors(bench: Bench) -> int:
    import torch

    gc.collect()
    bench.device.synchronize()  # what is queued may hold tensors
    return sum(type(one) is torch.Tensor for one in gc.get_objects())


def _least_in_use(bench: Bench, call: Callable[[], object], calls: int) -> int:
    """Return the bytes that calls leave in use, the lesser of two trials; 0 without a figure."""
    stats = bench.device.memory_stats
    if stats is None:
        return 0
    left = []
    # Other processes may take memory meanwhile, where the figure is the device's or the host's.
    for _ in range(2):
        gc.collect()
        bench.device.synchronize()
        before = stats().allocated
        for _ in range(calls):
            call()
        gc.collect()
        bench.device.synchronize()
        left.append(stats().allocated - before)
    return min(left)
