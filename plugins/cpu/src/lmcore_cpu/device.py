"""The host as a `Device`.

torch's own device module for the CPU has neither memory nor generator, so the functions are
ours.  Memory is the process's: bytes that the operating system keeps resident for it (weights,
activations, the interpreter and libraries alike), because torch does not count host tensors.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmcore.contract import Device, MemoryStats
from lmcore.contract.op.packages import FACT, describe
from lmcore_cpu import ipex
from lmcore_cpu.allocator import keep_freed_memory
from lmcore_cpu.host import cpu_count, cpu_name, memory_limit
from lmcore_cpu.kernel import linear
from lmcore_cpu.kernel.constant_projection import constant_projection
from lmcore_cpu.kernel.next_token_attention import next_token_attention
from lmcore_cpu.kernel.processor import facts
from lmcore_cpu.settings import CpuSection

__all__ = ["create_device"]

_DEFAULTS = CpuSection()
_DTYPES = frozenset({"float32", "float64", "bfloat16", "float16"})
_SMALL = 256
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_measured: dict[tuple[str, int, int, int, float], float] = {}
"""FLOP/s of each case that this process has measured."""
_RESET_PEAK = "5"  # man 5 proc: resets the high-water mark of resident memory


def create_device(settings: CpuSection = _DEFAULTS) -> Device:
    """Return the host as the device of this process.

    Args:
        settings: Settings of the run: whether the allocator keeps freed memory, for the whole
            process; seconds for which the peak rate is measured.
    """
    keeps = settings.keep_freed_memory and keep_freed_memory()
    abilities: dict[str, Any] = {}
    missing = {
        "pin_memory": "the device is the host itself",
        "new_stream": "work on the CPU is done when its call returns; there are no queues",
        "new_event": "work on the CPU is done when its call returns; nothing can be waited for",
        "new_graph": "work on the CPU is done when its call returns; none is queued",
    }
    if settings.peak_seconds:
        abilities["peak_flops"] = _PeakFlops(seconds=settings.peak_seconds)
    else:
        missing["peak_flops"] = "`--cpu-peak-seconds 0` asks not to measure it"
    if _memory_bytes() is None:
        missing["memory_stats"] = f"this system has no `{_STATUS}` to read the peak from"
    else:
        abilities["memory_stats"] = _memory_stats
    if _can_reset_peak():
        abilities["reset_peak_memory"] = _reset_peak_memory
    else:
        missing["reset_peak_memory"] = f"`{_CLEAR_REFS}` cannot be written on this system"
    trim = _trim_function()
    if trim is None:
        missing["empty_cache"] = "the C library has no `malloc_trim`"
    else:
        abilities["empty_cache"] = trim
    return Device(
        type="cpu",
        index=0,
        name=cpu_name(),
        dtypes=_DTYPES,
        synchronize=_nothing_to_wait_for,
        set_current=_only_device,
        seed=_seed,
        get_rng_state=torch.default_generator.get_state,
        set_rng_state=_set_rng_state,
        missing=missing,
        facts=_facts() | {"keeps_freed_memory": keeps},
        constant_projection=constant_projection,
        next_token_attention=next_token_attention,
        **abilities,
    )


def _nothing_to_wait_for() -> None:
    """Return at once: a call on the CPU comes back when its work is done."""


def _only_device() -> None:
    """Return at once: a process is always on its own host."""


def _seed(seed: int) -> None:
    # torch.manual_seed would seed every accelerator in the process as well.
    torch.default_generator.manual_seed(seed)


def _set_rng_state(state: torch.Tensor) -> None:
    torch.default_generator.set_state(state)


def _memory_bytes() -> tuple[int, int, int] | None:
    """Return resident bytes of this process, now and at the peak, and virtual; None if unknown."""
    try:
        text = _STATUS.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = dict(re.findall(r"^(VmRSS|VmHWM|VmSize):\s+(\d+) kB", text, re.MULTILINE))
    if len(found) < 3:
        return None
    return int(found["VmRSS"]) * 1024, int(found["VmHWM"]) * 1024, int(found["VmSize"]) * 1024


def _memory_stats() -> MemoryStats:
    memory = _memory_bytes()
    assert memory is not None
    now, peak, virtual = memory
    return MemoryStats(
        allocated=now,
        peak_allocated=max(now, peak),
        reserved=virtual,
        total=memory_limit(),
    )


def _can_reset_peak() -> bool:
    try:
        with _CLEAR_REFS.open("w", encoding="ascii"):
            return True
    except OSError:
        return False


def _reset_peak_memory() -> None:
    _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")


def _trim_function() -> Callable[[], None] | None:
    try:
        library = ctypes.CDLL(None)
        malloc_trim = library.malloc_trim
    except (OSError, AttributeError, TypeError):
        return None

    def trim() -> None:
        malloc_trim(ctypes.c_size_t(0))

    return trim


class _PeakFlops:
    """The ceiling of dense products on this host: measured on request, once per case.

    Makers publish no figure that a given number of threads, clock and cooling would reach, so the
    honest ceiling is the best rate of a large square product on the run's own threads, by the best
    of the products that the kernels of this plugin call.  Another process takes time away and
    never gives any, so the measurement continues until several products in a row were no faster.
    """

    def __init__(self, size: int = 1024, patience: int = 5, seconds: float = 0.5) -> None:
        """Square products of *size*; give up after *seconds* for each kind of product.

        Where one would take much of that time they are of 256.
        """
        self.size = size
        self.patience = patience
        self.seconds = seconds

    def __call__(self, dtype: str) -> float | None:
        """Return FLOP/s for a dtype's name, or None for one that products are not computed in."""
        if dtype not in _DTYPES:
            return None
        case = (dtype, torch.get_num_threads(), self.size, self.patience, self.seconds)
        if case not in _measured:
            with torch.inference_mode():
                _measured[case] = max(self._rates(getattr(torch, dtype)))
        return _measured[case]

    def _rates(self, dtype: torch.dtype) -> list[float]:
        size = self.size
        if size > _SMALL and self._time(dtype, _SMALL) * (size / _SMALL) ** 3 > self.seconds / 2:
            size = _SMALL  # a dtype that this host emulates: a large product takes seconds
        left = torch.ones(size, size, dtype=dtype)
        out = torch.empty_like(left)
        rates = [self._best_rate(size, lambda: torch.mm(left, left, out=out))]
        if dtype == torch.float32 and facts().onednn:
            rates.append(self._best_rate(size, lambda: linear.product(left, left)))
        return rates

    def _time(self, dtype: torch.dtype, size: int) -> float:
        """Return the seconds of the better of two products."""
        left = torch.ones(size, size, dtype=dtype)
        times = []
        for _ in range(2):
            start = time.perf_counter()
            torch.mm(left, left)
            times.append(time.perf_counter() - start)
        return min(times)

    def _best_rate(self, size: int, multiply: Callable[[], Tensor]) -> float:
        multiply()
        best, since_best = float("inf"), 0
        begin = time.perf_counter()
        while since_best < self.patience and time.perf_counter() - begin < self.seconds:
            start = time.perf_counter()
            multiply()
            took = time.perf_counter() - start
            # A hundredth is the clock's jitter; it must not keep the measurement going.
            since_best = 0 if took < 0.99 * best else since_best + 1
            best = min(best, took)
        return 2.0 * size**3 / best


def _facts() -> dict[str, Any]:
    extension = ipex.package()
    return {
        FACT: describe({ipex.NAME: extension} if extension is not None else {}),
        "cores": cpu_count(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "onednn": facts().onednn,
        "mkl": facts().mkl,
        "memory": "resident memory of the process, interpreter and libraries included",
        "peak_flops": "measured once per dtype and thread count: the best of 1024^3 products",
    }
