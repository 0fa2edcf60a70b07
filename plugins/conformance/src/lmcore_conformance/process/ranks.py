"""One of several processes in which the checks of a distributed group are made, all in step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lmcore.runtime.launch.rank import rank_info
from lmcore.runtime.process.consistency import check_device
from lmcore.runtime.process.group import Processes, start_processes
from lmcore.runtime.process.join import join_processes
from lmcore_conformance.bench import Bench
from lmcore_conformance.process.child import SETUP_SECONDS, Message, make_check
from lmcore_conformance.process.watchdog import SILENCE, watched
from lmcore_conformance.registry import Check, all_checks
from lmcore_conformance.result import Result, Status

__all__ = ["RankBench", "run_group"]

_COLLECTIVE_SECONDS = 30.0
"""Seconds after which a collective that some rank misses fails."""

_SHORT_SECONDS = 3.0
"""The same, where a check lets a rank miss one."""


class RankBench(Bench):
    """A process with its device and a process group."""

    processes: Processes

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.processes.rank.rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.processes.rank.world_size


def run_group(
    group: str,
    ids: Sequence[str],
    closed: Sequence[str],
    patience: float,
    subject: str = "",
    entry_points: Sequence[str] = (),
    shapes: Mapping[str, Any] | None = None,
) -> Iterator[Message]:
    """Join the other ranks, run the checks, and yield their results on this rank.

    Args:
        group: group of checks; in the one about missing processes, collectives fail after seconds.
        ids: The checks, in order; the same on every rank.
        closed: requirements that the author declares as missing.
        patience: Factor on the time limits of checks.
        subject: Name of the plugin without a device whose offers alone are tried.
        entry_points: Plugins of level 0; unused, as its checks are in no group of ranks.
        shapes: Shapes of ops; unused for the same reason.
    """
    del entry_points, shapes
    limits = (patience * SILENCE, SETUP_SECONDS)
    with watched(*limits):
        wanted = [check for check in all_checks("--shapes-of") if check.id in ids]
        bench = RankBench(closed, subject=subject, patience=patience)
        arguments = (bench.plugins, bench.selection, bench.device)
    place = rank_info(os.environ)
    seconds = _SHORT_SECONDS if group.endswith("timeout") else _COLLECTIVE_SECONDS
    with contextlib.ExitStack() as stack:
        with watched(SETUP_SECONDS / 2, SETUP_SECONDS):  # the other process may be slow to start
            joined = join_processes(place, timeout=SETUP_SECONDS / 2)
            rendezvous = stack.enter_context(joined)
            check_device(rendezvous, bench.selection, bench.plugins)
        with watched(*limits):
            started = start_processes(
                *arguments, rendezvous, timeout=seconds, wanted=bench.wanted_backend
            )
            processes = stack.enter_context(started)
        bench.processes = replace(
            processes, rendezvous=replace(rendezvous, timeout=_COLLECTIVE_SECONDS)
        )
        yield {"ready": True}
        for check in wanted:
            yield {"begins": check.id}
            with watched(patience * check.silence, patience * check.seconds):
                result = _made(check, bench)
            yield {"ends": result.to_dict()}
            # The other process may still be making the check, with progress.
            with watched(patience * check.seconds, patience * check.seconds):
                states = bench.processes.gather(str(result.status), f"`{check.id}`")
            if Status.FAILED in states:
                return  # other processes may still wait in a collective


def _made(check: Check, bench: RankBench) -> Result:
    result = make_check(check, bench)
    findings = tuple(f"rank {bench.rank}: {line}" for line in result.findings)
    return replace(result, findings=findings)
