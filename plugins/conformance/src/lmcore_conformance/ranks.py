"""One of several processes in which the checks of a distributed group are made, all in step."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lmcore.runtime.launch.rank import rank_info
from lmcore.runtime.process.consistency import check_device
from lmcore.runtime.process.group import Processes, start_processes
from lmcore.runtime.process.join import join_processes
from lmcore_conformance.bench import Bench
from lmcore_conformance.child import SETUP_SECONDS, Told, make_check
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
        """This process's place."""
        return self.processes.rank.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.processes.rank.world_size


def run_group(
    group: str,
    ids: Sequence[str],
    closed: Sequence[str],
    patience: float,
    subject: str = "",
    entry_points: Sequence[str] = (),
) -> Iterator[Told]:
    """Join the other ranks, run the checks, and yield their results on this rank.

    Args:
        group: group of checks; in the one about missing processes, collectives fail after seconds.
        ids: The checks, in order; the same on every rank.
        closed: requirements that the author declares as missing.
        patience: Factor on the time limits of checks.
        subject: Name of the plugin without a device whose offers alone are tried.
        entry_points: Plugins that level 0 is about, which is none of these groups.
    """
    del entry_points
    faulthandler.dump_traceback_later(SETUP_SECONDS, exit=True)
    wanted = [check for check in all_checks() if check.id in ids]
    bench = RankBench(closed, subject=subject)
    place = rank_info(os.environ)
    seconds = _SHORT_SECONDS if group.endswith("timeout") else _COLLECTIVE_SECONDS
    with join_processes(place, timeout=SETUP_SECONDS / 2) as rendezvous:
        check_device(rendezvous, bench.selection, bench.plugins)
        arguments = (bench.plugins, bench.selection, bench.device, rendezvous)
        with start_processes(*arguments, timeout=seconds, wanted=bench.wanted_backend) as processes:
            bench.processes = replace(
                processes, rendezvous=replace(rendezvous, timeout=_COLLECTIVE_SECONDS)
            )
            yield {"ready": True}
            for check in wanted:
                yield {"begins": check.id}
                faulthandler.dump_traceback_later(patience * check.seconds, exit=True)
                result = _made(check, bench)
                yield {"ends": result.to_dict()}
                states = bench.processes.gather(str(result.status), f"`{check.id}`")
                faulthandler.cancel_dump_traceback_later()
                if Status.FAILED in states:
                    return  # nobody knows what the others still wait for


def _made(check: Check, bench: RankBench) -> Result:
    result = make_check(check, bench)
    findings = tuple(f"rank {bench.rank}: {line}" for line in result.findings)
    return replace(result, findings=findings)
