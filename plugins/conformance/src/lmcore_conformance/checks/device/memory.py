"""Level 1: the device's memory statistics, and its survival of a request that is too large."""

from __future__ import annotations

import contextlib
import gc
from functools import partial
from typing import TYPE_CHECKING

import psutil
import torch

from lmcore.contract import MemoryStats
from lmcore_conformance.registry import Failure, check, conclude

if TYPE_CHECKING:
    from torch import Tensor

    from lmcore_conformance.bench import Bench

_check = partial(check, level="L1", group="memory")

_MIB = 2**20
_BLOCK = 64 * _MIB
_SLACK = 8 * _MIB
"""Tolerance for memory that the process takes or frees meanwhile."""

_TOO_MUCH = 2**50

_LARGEST = 2**44
"""Bytes that no accelerator has; the largest have less than a TiB each."""


def _filled(bench: Bench, size: int) -> Tensor:
    """Return a tensor of so many bytes, each of them written."""
    block = torch.ones(size, dtype=torch.uint8, device=bench.torch_device)
    bench.device.synchronize()
    return block


def _settle(bench: Bench) -> None:
    gc.collect()
    bench.device.synchronize()
    if bench.device.empty_cache is not None:
        bench.device.empty_cache()


def _now(bench: Bench) -> MemoryStats:
    found: object = bench.device.require("memory_stats")()
    if not isinstance(found, MemoryStats):
        raise Failure(f"`memory_stats` returned {found!r:.80}")
    return found


def _mib(count: int) -> str:
    return f"{count / _MIB:.1f} MiB"


@_check(
    "device.memory-rises-and-falls",
    "Bytes in use increase by a tensor's size when it is allocated and decrease when it is freed.",
    reason="Memory reports and out-of-memory messages depend on them.",
    requires=["memory_stats"],
)
def rises_and_falls(bench: Bench) -> str:
    """Make and drop a tensor of 64 MiB, three times."""
    _filled(bench, _MIB)
    _settle(bench)
    start = _now(bench).allocated
    faults = []
    for _ in range(3):
        block = _filled(bench, _BLOCK)
        high = _now(bench).allocated
        if not _BLOCK - _SLACK <= high - start <= _BLOCK + _BLOCK // 2:
            faults.append(f"a tensor of {_mib(_BLOCK)} raises it by {_mib(high - start)}")
        del block
        if not bench.is_host:  # what the C library keeps of the host's memory is not seen
            gc.collect()
            bench.device.synchronize()
            if _now(bench).allocated - start > _SLACK:
                faults.append(
                    "a freed tensor stays in `allocated` until the cache is emptied: memory of the "
                    "cache belongs in `reserved` alone"
                )
        _settle(bench)
        low = _now(bench).allocated
        if low - start > _SLACK:
            faults.append(f"{_mib(low - start)} stay in use when the tensor is gone")
    return conclude(dict.fromkeys(faults), f"{_mib(start)} in use without it")


@_check(
    "device.memory-peak",
    "The peak includes freed memory until `reset_peak_memory` resets it.",
    reason="`peak_memory_bytes` in a run's summary is this figure.",
    requires=["memory_stats", "peak_memory"],
)
def peak(bench: Bench) -> str:
    """Reset, make and drop a tensor, read the peak, reset again."""
    _settle(bench)
    reset = bench.device.require("reset_peak_memory")
    reset()
    start = _now(bench)
    block = _filled(bench, _BLOCK)
    del block
    _settle(bench)
    high = _now(bench)
    if high.peak_allocated - start.allocated < _BLOCK - _SLACK:
        risen = _mib(high.peak_allocated - start.allocated)
        raise Failure(f"a tensor of {_mib(_BLOCK)} raised the peak by {risen}")
    reset()
    again = _now(bench)
    if again.peak_allocated - again.allocated > _SLACK + _BLOCK // 2:
        raise Failure(f"after the reset the peak is {_mib(again.peak_allocated)}, as it was before")
    return f"peak {_mib(high.peak_allocated)}"


@_check(
    "device.memory-consistent",
    "Bytes in use do not exceed the peak, the reserved and the total bytes, and the total does not "
    "exceed torch's figure.",
    reason="Messages show the share of the total.",
    requires=["memory_stats"],
)
def consistent(bench: Bench) -> str:
    """Compare the four figures with each other, and the total with other sources of it."""
    block = _filled(bench, _BLOCK)
    found = _now(bench)
    faults = []
    if found.allocated < block.numel():
        faults.append(f"in use {_mib(found.allocated)}, and one tensor has {_mib(block.numel())}")
    if found.peak_allocated < found.allocated:
        faults.append("the peak is below what is in use")
    if found.reserved < found.allocated:
        faults.append("less is reserved than is in use")
    if found.total is not None:
        # What the host reserves is virtual memory.
        used = found.allocated if bench.is_host else max(found.reserved, found.peak_allocated)
        if found.total < used:
            faults.append(f"more is in use or reserved than there is: total {_mib(found.total)}")
        source, most = _most_memory(bench)
        if found.total > most:
            faults.append(f"the total is {_mib(found.total)}, and {source} is {_mib(most)}")
    total = "unknown" if found.total is None else _mib(found.total)
    return conclude(faults, f"total {total}")


def _most_memory(bench: Bench) -> tuple[str, int]:
    """Return the bytes that the device can have at most, and how they are known."""
    if bench.is_host:
        return "the host's memory", psutil.virtual_memory().total
    index, module = bench.device.index, torch.get_device_module(bench.device.type)
    own = []
    for ask in (
        lambda: torch.accelerator.get_memory_info(index)[1],
        lambda: module.mem_get_info(index)[1],
        lambda: module.get_device_properties(index).total_memory,
    ):
        with contextlib.suppress(Exception):  # torch has not every figure of every device
            own.append(int(ask()))
    known = [figure for figure in own if figure > 0]
    if known:
        return "torch's figure", int(1.01 * max(known))
    return "more than any accelerator has", _LARGEST


@_check(
    "device.memory-cache",
    "After a large tensor is freed, `empty_cache` gives its memory back; live tensors keep their "
    "values.",
    reason="It is called before a phase of a run that needs the memory.",
    requires=["empty_cache"],
)
def cache(bench: Bench) -> str:
    """Free a large tensor and empty the cache, beside a live tensor."""
    live = bench.values(100, 100).float().to(bench.torch_device)
    _settle(bench)
    block = _filled(bench, _BLOCK)
    before = bench.device.memory_stats() if bench.device.memory_stats else None
    del block
    _settle(bench)
    after = bench.device.memory_stats() if bench.device.memory_stats else None
    if not torch.equal(live.cpu(), bench.values(100, 100).float()):
        raise Failure("a tensor that is in use has other numbers afterwards")
    if before is None or after is None:
        return "a live tensor is as it was; there are no figures of memory"
    fell = before.reserved - after.reserved
    if bench.is_host:  # the C library may keep the addresses, without memory
        fell = max(fell, before.allocated - after.allocated)
    if fell < _BLOCK - _SLACK:
        raise Failure(
            f"a tensor of {_mib(_BLOCK)} was freed and the cache emptied, and `reserved` fell by "
            f"{_mib(fell)}"
        )
    return f"{_mib(fell)} given back"


@_check(
    "device.memory-leak",
    "Repeated forward and backward passes do not leak memory.",
    reason="A run has hundreds of thousands of them.",
    requires=["memory_stats"],
)
def leak(bench: Bench) -> str:
    """Repeat a pass of some MiB and compare the memory in use."""

    def passes(count: int) -> None:
        for _ in range(count):
            x = torch.ones(512, 1024, device=bench.torch_device, requires_grad=True)
            w = torch.ones(1024, 1024, device=bench.torch_device, requires_grad=True)
            torch.tanh(x @ w).sum().backward()

    passes(4)
    _settle(bench)
    start = _now(bench).allocated
    passes(20)
    _settle(bench)
    left = _now(bench).allocated - start
    if left > _SLACK:
        raise Failure(f"20 passes leave {_mib(left)} in use")
    return f"{_mib(max(0, left))} after 20 passes"


@_check(
    "device.out-of-memory",
    "An allocation that is too large raises, and the device still works.",
    reason="The run ends with a message and its last checkpoint, not with a crash.",
    requires=["out_of_memory"],
)
def out_of_memory(bench: Bench) -> str:
    """Allocate more than the total, and a pebibyte several times, and compute afterwards."""
    stats = bench.device.memory_stats
    total = stats().total if stats is not None and not bench.is_host else None
    if total is not None:
        _refused(bench, 2 * total + 2**30)
    # Once unmeasured: a first product and a first error load code and make buffers.
    raised = _refused(bench)
    _product_is_right(bench)
    _settle(bench)
    before = _now(bench).allocated if bench.device.memory_stats else 0
    for _ in range(3):
        _refused(bench)
    _product_is_right(bench)
    if bench.device.memory_stats is not None:
        _settle(bench)
        left = _now(bench).allocated - before
        if left > _SLACK:
            raise Failure(f"{_mib(left)} more are in use afterwards")
    return raised


def _refused(bench: Bench, size: int = _TOO_MUCH) -> str:
    """Allocate too much memory; return the error."""
    try:
        block = torch.empty(size, dtype=torch.uint8, device=bench.torch_device)
        bench.device.synchronize()  # a lazy device allocates when it runs what is recorded
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]:.120}"
    del block
    raise Failure(f"a tensor of {size / 2**40:.4g} TiB can be made")


def _product_is_right(bench: Bench) -> None:
    x = bench.values(64, 64).float()
    found = x.to(bench.torch_device) @ x.to(bench.torch_device)
    bench.device.synchronize()
    if not torch.allclose(found.cpu(), x @ x, rtol=1e-4, atol=1e-3):
        raise Failure("products are wrong afterwards")
