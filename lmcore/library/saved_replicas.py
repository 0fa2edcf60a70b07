"""Check before a save that weights and hyperparameters are equal on all ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lmcore.base.errors import RunError
from lmcore.parallel.mesh import ReplicaClass
from lmcore.parallel.replica_comparison import ReplicaComparison
from lmcore.runtime.launch.rank import named_ranks

if TYPE_CHECKING:
    from torch import Tensor

    from lmcore.runtime.runtime import Runtime

__all__ = ["SavedReplicas"]


class SavedReplicas:
    """Comparison of the values of a checkpoint that must be equal on all ranks."""

    def __init__(self, runtime: Runtime) -> None:
        """Compare nothing yet.

        Args:
            runtime: Device and processes.
        """
        self._runtime, self._comparison = runtime, ReplicaComparison(runtime)

    def check(self, weights: Mapping[str, Tensor], groups: Mapping[str, Any]) -> None:
        """Check that all ranks have equal values; all ranks must call it.

        Args:
            weights: Parameters that every rank holds whole, by name, the same names on all ranks.
            groups: Parameter groups of optimizers as JSON values, by the name of the optimizer.

        Raises:
            RunError: Values differ; on all ranks, with the ranks and likely causes.
        """
        processes = self._runtime.processes
        if processes is None:
            return
        digest = hashlib.sha256(json.dumps(groups, sort_keys=True).encode()).hexdigest()
        subject = "the hyperparameters of optimizers"
        lines: list[str] = []
        if len(set(processes.gather(digest, subject))) > 1:
            lines = [*_differences(processes.gather(groups, subject))]
        ranks = np.arange(self._runtime.rank.world_size)[None]
        drift = self._comparison.find_drift([ReplicaClass(ranks, weights)]) if weights else None
        if drift is None and not lines:
            return
        if drift is None:
            raise RunError(
                "`save`: the ranks have different hyperparameters",
                why="\n".join(lines),
                hint="give schedulers values that are equal on all ranks: "
                "`scheduler.step(rt.all_reduce(loss))`",
            )
        lines = [*drift.lines, *lines]
        raise RunError(
            f"`save`: replicas differ: {drift.title}, on {named_ranks(drift.ranks)}",
            why="\n".join(lines),
            hint="set weights and hyperparameters alike on all ranks, as by `rt.broadcast`, and "
            "give schedulers equal values: `scheduler.step(rt.all_reduce(loss))`; else suspect the "
            "memory or the device of a rank",
        )


def _differences(of_ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield lines about hyperparameters that differ.

    Args:
        of_ranks: Parameter groups of each rank, by the name of the optimizer.
    """
    for name, groups in of_ranks[0].items():
        for index, group in enumerate(groups):
            for key in group["values"]:
                found = [own[name][index]["values"].get(key) for own in of_ranks]
                if any(value != found[0] for value in found):
                    values = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(found))
                    yield f"`{key}` of group {index} of `{name}`: {values}"
