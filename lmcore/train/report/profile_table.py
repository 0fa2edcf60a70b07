"""Summary of a profile in a few lines: time of each part of a step, and of the top ops."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lmcore.runtime.profiler_range import RANGES

__all__ = ["range_lines", "top_ops"]

_TOP = 10
_LONGEST = 48
"""Maximum length of a name; kernel names may have hundreds of characters."""
_STEP = "ProfilerStep"
_MS = 1e3
"""Microseconds in a millisecond; torch counts in microseconds."""


def range_lines(averages: Iterable[Any], steps: int) -> list[str]:
    """Return lines with the time of each named part, on the host and, if known, on the device.

    Args:
        averages: Averages from `key_averages` of torch's profiler.
        steps: Number of recorded steps.
    """
    host = {event.key: event.cpu_time_total for event in averages if _on_host(event)}
    device = {
        event.key: event.device_time_total
        for event in averages
        if not _on_host(event) and event.is_user_annotation
    }
    lines = []
    for where, times in (("host", host), ("device", device)):
        found = [(name, times[name]) for name in RANGES if name in times]
        if found:
            parts = ", ".join(f"{name} {time / _MS / steps:.1f}" for name, time in found)
            lines.append(f"          {where}, ms a step: {parts}")
    return lines


def top_ops(averages: Iterable[Any], count: int = _TOP) -> list[str]:
    """Return a table of the kernels, or without kernels of the host ops, with most own time.

    Args:
        averages: See `range_lines`.
        count: Number of rows.
    """
    device = [event for event in averages if not _on_host(event) and not event.is_user_annotation]
    if device:
        times = [(event, event.self_device_time_total) for event in device]
    else:
        times = [(event, event.self_cpu_time_total) for event in averages if _is_op(event)]
    total = sum(time for _, time in times)
    if not total:
        return []
    times.sort(key=lambda pair: -pair[1])
    title = "kernel on the device" if device else "op on the host"
    lines = [f"          {title:{_LONGEST}} {'calls':>8} {'ms':>10} {'share':>6}"]
    for event, time in times[:count]:
        lines.append(
            f"          {_short(event.key):{_LONGEST}} {event.count:8d} {time / _MS:10.2f} "
            f"{time / total:6.1%}"
        )
    return lines


def _on_host(event: Any) -> bool:
    return bool(event.device_type.name == "CPU")


def _is_op(event: Any) -> bool:
    named = event.key in RANGES or event.key.startswith(_STEP)
    return not named and not event.is_user_annotation


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 3]}..."
