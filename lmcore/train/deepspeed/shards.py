"""Whole tensors from DeepSpeed's shards, and back: what a checkpoint holds.

All processes take part.  A tensor is gathered on the device, one at a time, and kept on the host
of rank 0 alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lmcore.train.deepspeed.flat_optimizer import FlatUpdate, StateKind

__all__ = ["Shards"]


class Shards:
    """Weights and optimizer state of a model that DeepSpeed has sharded."""

    def __init__(
        self,
        package: Any,
        engine: Any,
        parameters: Mapping[str, nn.Parameter],
        update: FlatUpdate,
    ) -> None:
        """Create the optimizer's state, which DeepSpeed itself would after the first step.

        Args:
            package: DeepSpeed.
            engine: Its engine.
            parameters: Of the model, by name.
            update: The optimizer that the engine has.
        """
        self._fragments = package.utils
        self.optimizer, self.parameters, self.update = engine.optimizer, parameters, update
        self.whole = hasattr(self.optimizer, "fp32_partitioned_groups_flat")  # stage 3
        update.create_state(self._rows())
        if not self.whole:
            # It links the state of all groups when the first of them has been updated, and would
            # find none for the others.
            self.optimizer._lazy_init_hp_params_optimizer_state()  # noqa: SLF001

    def _rows(self) -> Iterator[tuple[Tensor, int]]:
        """Yield this process's float32 rows, each with the number of its group."""
        optimizer = self.optimizer
        if self.whole:
            rows = optimizer.fp32_partitioned_groups_flat
            for number, row in enumerate(rows):
                yield row, optimizer.sub_group_to_group_id[number]
            return
        rows = getattr(optimizer, "single_partition_of_fp32_groups", None)
        if rows is None:
            rows = optimizer.fp32_groups_flat_partition
        for number, row in enumerate(rows):
            yield row, number

    def weight(self, name: str) -> Tensor:
        """Return a whole weight in float32, on the device."""
        found: Tensor = self._fragments.safe_get_full_fp32_param(self.parameters[name])
        return found

    def state(self, name: str, kind: StateKind) -> Tensor:
        """Return what the optimizer keeps of a parameter, whole."""
        if not kind.shaped:
            return self.update.number(kind.name)
        found: Tensor = self._fragments.safe_get_full_optimizer_state(
            self.parameters[name], kind.name
        )
        return found

    def set_weight(self, name: str, value: Tensor) -> None:
        """Give the float32 rows a weight; what the model computes with is left as it is."""
        self._set(name, value, None)

    def set_state(self, name: str, kind: StateKind, value: Tensor) -> None:
        """Give the optimizer what it keeps of a parameter."""
        if kind.shaped:
            self._set(name, value, kind.name)
        else:
            self.update.set_numbers(kind.name, value)

    def _set(self, name: str, value: Tensor, kind: str | None) -> None:
        parameter, fragments = self.parameters[name], self._fragments
        if not self.whole:
            if kind is None:
                fragments.safe_set_full_fp32_param(parameter, value)
            else:
                fragments.safe_set_full_optimizer_state(parameter, value, kind)
            return
        part = _own_part(value, parameter)
        if kind is None:
            fragments.safe_set_local_fp32_param(parameter, part)
        else:
            fragments.safe_set_local_optimizer_state(parameter, part, kind)


def _own_part(value: Tensor, parameter: Any) -> Tensor:
    """Return this process's part of a tensor that stage 3 divides, filled up at its end."""
    from torch import distributed

    size: int = parameter.ds_tensor.numel()
    first = size * distributed.get_rank(parameter.ds_process_group)
    part = torch.zeros(size, dtype=value.dtype, device=value.device)
    own = value.flatten()[first : first + size]
    part[: own.numel()] = own
    return part
