"""`PartSums`: numbers of whole parameters from the parts that processes hold.

For optimizers that need a parameter's norm; see `lmcore.optim.optimizer.SumOverShards`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lmcore.parallel.parallel_model import ParallelModel

__all__ = ["PartSums"]


class PartSums:
    """Adds one number for each parameter over the processes that hold its other parts."""

    def __init__(self, parallel: ParallelModel) -> None:
        """Note who holds what; nothing is exchanged yet."""
        mesh, layout = parallel.mesh, parallel.mesh.layout
        self._device = parallel.device
        # Parts may be empty here and not elsewhere: places are those of the module's parameters.
        names = [name for name, _ in parallel.model.named_parameters()]
        self._places = {name: place for place, name in enumerate(names)}
        self._times = {  # how often a part would be counted
            one.name: mesh.tensor.size if one.replicated else 1 for one in parallel.parameters
        }
        axes = [mesh.tensor, mesh.shards] if layout.zero_stage else [mesh.tensor]
        self._groups = [axis.group for axis in axes if axis.size > 1]
        self._known: dict[tuple[str, ...], tuple[Tensor, Tensor]] = {}

    def __call__(self, names: Sequence[str], values: Tensor) -> Tensor:
        """Return the sums; all processes that divide layers or shards must call it.

        Args:
            names: Parameters of which there is a part here, each once; others may name others.
            values: Of each part here; where there is none, on whichever device.
        """
        if not self._groups:
            return values
        from torch import distributed

        values = values.to(self._device)  # the others' are there: groups may take nothing else
        places, times = self._places_and_times(tuple(names), values)
        sums = values.new_zeros(len(self._places))
        sums[places] = values / times
        for group in self._groups:
            distributed.all_reduce(sums, group=group)
        return sums[places]

    def _places_and_times(self, names: tuple[str, ...], values: Tensor) -> tuple[Tensor, Tensor]:
        """Return both on the device; they go there once, as a copy from the host is waited for."""
        if names not in self._known:
            places = torch.tensor([self._places[name] for name in names], dtype=torch.long)
            times = values.new_tensor([self._times[name] for name in names])
            self._known[names] = places.to(values.device), times
        return self._known[names]
