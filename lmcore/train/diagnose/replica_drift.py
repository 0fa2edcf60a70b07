"""Replica drift: parameters that should be equal on several ranks, bit for bit, and are not.

Data-parallel ranks, the ranks of a tensor-parallel group and the ends of a pipeline hold replicas
of parameters, which stay equal because all of them apply the same gradients.  An error of memory,
of a device or of a program can change a replica; without a check the run would train and save a
mixture of models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcore.base.errors import RunError
from lmcore.parallel.replica_comparison import ReplicaComparison, ReplicaDrift
from lmcore.runtime.launch.rank import named_ranks

if TYPE_CHECKING:
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.due import Due
    from lmcore.train.state import TrainState

__all__ = ["ReplicaCheck", "ReplicaDriftError"]


class ReplicaDriftError(RunError):
    """An error about replicas of parameters that differ; nothing is saved."""


class ReplicaCheck:
    """Comparison of the replicas of a run's parameters."""

    def __init__(self, state: TrainState, runtime: Runtime, *, interval: int) -> None:
        """Compare nothing yet.

        Args:
            state: State of the run, ready for its first step.
            runtime: Device and processes.
            interval: Steps between checks; 0 for none, also before checkpoints.
        """
        self._state, self._runtime = state, runtime
        self._enabled = interval > 0 and runtime.processes is not None
        self._comparison = ReplicaComparison(runtime)
        self._equal_after: int | None = None  # step of the last check

    def after_step(self, due: Due) -> None:
        """Compare the replicas if that is due; see `check`."""
        if due.check_replicas:
            self.check()

    def check(self) -> None:
        """Compare the replicas, unless they were compared after this step; all ranks must call it.

        Raises:
            ReplicaDriftError: Replicas differ; raised on all ranks.
        """
        step = self._state.iteration
        if not self._enabled or step == self._equal_after:
            return
        classes = self._state.parallel.replica_classes()
        if not classes:
            self._enabled = False
            return
        drift = self._comparison.find_drift(classes)
        if drift is not None:
            raise self._error(drift)
        self._equal_after = step

    def _error(self, drift: ReplicaDrift) -> ReplicaDriftError:
        """Return the error of replicas that differ."""
        when, why = f"before step {self._state.iteration + 1}", drift.lines
        if self._equal_after is not None:
            when = f"after step {self._state.iteration}"
            why = [*why, f"all replicas were equal after step {self._equal_after}"]
        hosts = ", ".join(dict.fromkeys(self._runtime.hosts[rank] for rank in drift.ranks))
        ranks = named_ranks(drift.ranks)
        return ReplicaDriftError(
            f"replicas of the parameters differ {when}: {drift.title}, on {ranks}",
            why="\n".join(why),
            hint=f"suspect the memory or the device of {ranks} ({hosts}): run "
            "`lmcore doctor` there",
        )
