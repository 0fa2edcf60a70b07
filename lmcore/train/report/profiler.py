"""`--profile`: a trace of some steps of a run, by torch's profiler.

The loop calls `Profile.at` between steps, and the code of a step opens `Profile.profiler_range`
around its parts, which costs next to nothing while nothing is recorded.  Each process that records
writes one file, in the format that Chrome, Perfetto and TensorBoard show.

Summary of a profile in a few lines: time of each part of a step, and of the top ops.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from lmcore.base.durable import hidden_path, publish_file
from lmcore.runtime.profiler_range import RANGES, no_range

if TYPE_CHECKING:
    from lmcore.config.section import ProfileSection


__all__ = [
    "Profile",
    "activities_of",
    "range_lines",
    "top_ops",
]

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


logger = logging.getLogger(__name__)

_WARM_UP = 1
"""Number of steps before the profile with the profiler running: it is slow at first."""


def activities_of(device_type: str) -> list[Any]:
    """Return the activities that torch's profiler can record: host and, if supported, device.

    Args:
        device_type: Device type of the run; types without a named activity are PrivateUse1.
    """
    from torch.profiler import ProfilerActivity, supported_activities

    own = getattr(ProfilerActivity, device_type.upper(), ProfilerActivity.PrivateUse1)
    wanted = dict.fromkeys((ProfilerActivity.CPU, own))
    return [activity for activity in wanted if activity in supported_activities()]


class Profile:
    """The profile of a run; a context manager that writes an unfinished profile at its exit."""

    def __init__(
        self,
        asked: ProfileSection,
        directory: Path,
        *,
        device_type: str,
        rank: int = 0,
        say: Callable[[str], None] = logger.info,
    ) -> None:
        """Record nothing yet.

        Args:
            asked: The `profile` section: steps, ranks, and details.
            directory: Folder of the trace; created when the trace is written.
            device_type: torch's name of the device type.
            rank: Rank of this process.
            say: Shows a line.
        """
        self.asked, self.directory, self._say = asked, directory, say
        self._device_type, self._rank = device_type, rank
        self._waiting = asked.profile and rank in asked.profile_ranks
        self._profiler: Any = None
        self._first = self._done = 0
        self._warm_up = 0

    def profiler_range(self, name: str) -> AbstractContextManager[Any]:
        """Return a context that has *name* in the trace; see `lmcore.runtime.profiler_range`."""
        if self._profiler is None:
            return no_range(name)
        from torch.profiler import record_function

        return record_function(name)

    def on_step(self, done: int, *, ends: bool = False) -> None:
        """Start, continue or end the profile; to be called between steps.

        Args:
            done: Number of steps done.
            ends: True if no other step follows.
        """
        if self._profiler is not None:
            self._done = done
            if ends and done < self._first:
                return  # only the warm-up was recorded
            self._profiler.step()
            if done >= self.asked.profile_step_end:
                self._end()
        elif self._waiting and not ends and done >= self.asked.profile_step_start - _WARM_UP:
            self._waiting = False
            self._begin(done)

    def _begin(self, done: int) -> None:
        from torch.profiler import ProfilerAction, profile

        start, end = self.asked.profile_step_start, self.asked.profile_step_end
        if done >= end:
            logger.warning("nothing is profiled: the run continues after step %d", done)
            return
        self._warm_up = max(start - done, 0)
        self._first, self._done = max(start, done) + 1, done
        steps = end - done

        def action(number: int) -> ProfilerAction:
            if number < self._warm_up:
                return ProfilerAction.WARMUP
            if number >= steps:
                return ProfilerAction.NONE
            last = number == steps - 1
            return ProfilerAction.RECORD_AND_SAVE if last else ProfilerAction.RECORD

        self._profiler = profile(
            activities=activities_of(self._device_type),
            schedule=action,
            on_trace_ready=self._write,
            profile_memory=self.asked.profile_memory,
            record_shapes=self.asked.profile_shapes,
            with_stack=self.asked.profile_stacks,
            acc_events=True,  # the default warns in torch 2.11, although there is one cycle only
        )
        self._profiler.start()

    def _end(self) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()

    def _write(self, profiler: Any) -> None:
        """Write the trace, whole or not at all, and show the most expensive operations."""
        last = max(self._done, self._first)
        steps = f"step {last}" if last == self._first else f"steps {self._first} to {last}"
        name = f"steps_{self._first}-{last}.rank{self._rank}.pt.trace.json.gz"
        path = self.directory / name
        temporary = Path(f"{hidden_path(path)}.gz")  # torch compresses by the end of the name
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(temporary))
            publish_file(temporary, path)
        except OSError as cause:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            logger.warning("the profile cannot be written: %s: %s", path, cause.strerror)
            return
        self._say(f"profile   {steps}: {path}")
        averages = profiler.key_averages()
        for line in (*range_lines(averages, last - self._first + 1), *top_ops(averages)):
            self._say(line)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write the recorded part of an unfinished profile."""
        if self._profiler is None:
            if self._waiting and kind is None:
                logger.warning(
                    "nothing is profiled: the run ended before step %d",
                    self.asked.profile_step_start + 1,
                )
            return
        if self._done < self._first:
            logger.warning("nothing is profiled: the run ended before step %d", self._first)
        self._end()
