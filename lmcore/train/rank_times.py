"""Rank times: the time of a step that each rank works itself, and the rank that is slow.

The times are medians over the steps since the last exchange, so that a pause of one step does not
count.  Ranks of different pipeline stages have different work, and are not compared.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from lmcore.contract.transfer.async_scalars import ScalarCopier, supports_async_scalars
from lmcore.parallel.scalar_collectives import all_gather_scalars

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.contract.transfer.async_scalars import AsyncScalars
    from lmcore.parallel.mesh import ParallelMesh
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.step_record import StepRecord

__all__ = ["RankTimer", "SlowRank", "slow_rank"]

logger = logging.getLogger(__name__)

SLOW = 1.5
"""Ratio to the median of the other ranks from which a rank is named."""
LEAST_MS = 10.0
"""Smallest difference from that median: less is noise of short steps."""
_MIN_STEPS = 8
_REPEAT_SECONDS = 600.0


class SlowRank(NamedTuple):
    """A rank that is slower than the ranks with the same work.

    Attributes:
        rank: The rank.
        own_ms: Its time in milliseconds.
        others_ms: Median time of the other ranks, in milliseconds.
    """

    rank: int
    own_ms: float
    others_ms: float


class RankTimer:
    """Measures the steps of this rank, and exchanges the times at the log interval."""

    def __init__(self, mesh: ParallelMesh, runtime: Runtime, *, interval: int) -> None:
        """Measure nothing yet.

        Args:
            mesh: Mesh of the run, with the clock of the waits in collectives.
            runtime: Device and processes.
            interval: Steps between exchanges; longer if that is fewer than eight.
        """
        self._clock, self._runtime = mesh.clock, runtime
        self._stages, self._interval = mesh.stage_ranks(), interval
        self._steps: deque[Callable[[], float]] = deque()
        self._seconds: list[float] = []
        self._is_first = True  # it compiles
        self._copier: ScalarCopier | None = None
        if supports_async_scalars(runtime.device):
            self._copier = ScalarCopier(runtime.device)
        self._copy: AsyncScalars | None = None
        self._named: tuple[int, float] | None = None  # rank, and when it was named

    @classmethod
    def of(cls, plan: RunPlan, mesh: ParallelMesh, runtime: Runtime) -> RankTimer | None:
        """Return the timer of a run; None if there is nothing to compare, or no way to measure."""
        clock = mesh.clock
        # Another engine's collectives have streams of their own.
        measured = clock.on_host or plan.config.parallel.by_layout
        if runtime.processes is None or not measured or not clock.available:
            return None
        return cls(mesh, runtime, interval=plan.config.logging.log_interval)

    def start(self) -> None:
        """Begin a step."""
        self._clock.start()

    def stop(self) -> None:
        """End a step."""
        self._steps.append(self._clock.stop())

    def complete(self, record: StepRecord) -> None:
        """Add the times of the ranks to the record of the oldest step, if they were exchanged.

        On an asynchronous device they are of the exchange after the step before.  All ranks must
        call it.
        """
        seconds = self._steps.popleft()()
        if self._copy is not None:
            self._report(record, self._copy.read())
            self._copy = None
        if self._is_first:
            self._is_first = False
            return
        self._seconds.append(seconds)
        if record.step % self._interval or len(self._seconds) < _MIN_STEPS:
            return
        device = self._runtime.device.torch_device
        own = torch.tensor([statistics.median(self._seconds) * 1e3], device=device)
        self._seconds.clear()
        times = all_gather_scalars(self._runtime, own).flatten()
        if self._copier is None:
            self._report(record, times.tolist())
        else:
            self._copy = self._copier.copy(times)

    def _report(self, record: StepRecord, times: list[float]) -> None:
        """Add times in milliseconds, by rank, to a record, and name a slow rank in the log."""
        record.rank_time_min_ms, record.rank_time_max_ms = min(times), max(times)
        record.rank_time_median_ms = statistics.median(times)
        record.slowest_rank = times.index(max(times))
        slow = slow_rank(times, self._stages)
        if slow is None:
            return
        hosts = self._runtime.hosts  # all ranks have the same times, and so all come here
        now = time.monotonic()
        if self._named is not None:
            rank, since = self._named
            if rank == slow.rank and now - since < _REPEAT_SECONDS:
                return
        self._named = (slow.rank, now)
        if self._runtime.rank.rank == 0:
            logger.warning(
                "rank %d on host %s takes %.1fx the median step of the other ranks: %.1f ms in "
                "place of %.1f ms, waits for other ranks left out; the run is as slow as this rank",
                slow.rank,
                hosts[slow.rank],
                slow.own_ms / slow.others_ms,
                slow.own_ms,
                slow.others_ms,
            )


def slow_rank(times: Sequence[float], stages: Sequence[Sequence[int]]) -> SlowRank | None:
    """Return the rank that is slowest in relation to the ranks with the same work, if it is slow.

    Args:
        times: Time of each rank in milliseconds.
        stages: Ranks with the same work: the ranks of each pipeline stage.
    """
    found: SlowRank | None = None
    for ranks in stages:
        if len(ranks) == 1:
            continue
        rank = max(ranks, key=lambda rank: times[rank])
        others = max(1e-3, statistics.median(times[other] for other in ranks if other != rank))
        if times[rank] < max(SLOW * others, others + LEAST_MS):
            continue
        if found is None or times[rank] / others > found.own_ms / found.others_ms:
            found = SlowRank(rank, times[rank], others)
    return found
