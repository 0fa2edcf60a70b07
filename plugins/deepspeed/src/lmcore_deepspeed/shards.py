"""Conversion between DeepSpeed's shards and the whole tensors of a checkpoint.

All ranks take part.  Tensors are gathered on the device, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lmcore_deepspeed.flat_optimizer import FlatUpdate, StateKind

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
        """Create the optimizer's state, which DeepSpeed itself creates in the first step.

        Args:
            package: The package `deepspeed`.
            engine: DeepSpeed's engine.
            parameters: Parameters of the model, by name.
            update: Optimizer of the engine.
        """
        self._fragments = package.utils
        self.optimizer, self.parameters, self.update = engine.optimizer, parameters, update
        self.whole = hasattr(self.optimizer, "fp32_partitioned_groups_flat")  # stage 3
        update.create_state(self._rows())
        if not self.whole:
            # DeepSpeed links the state of all groups after the update of the first group, when the
            # other groups have none yet.
            self.optimizer._lazy_init_hp_params_optimizer_state()  # noqa: SLF001

    def _rows(self) -> Iterator[tuple[Tensor, int]]:
        """Yield the float32 rows of this rank, each with the index of its group."""
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
        """Return whole optimizer state of a parameter."""
        if not kind.shaped:
            return self.update.number(kind.name)
        found: Tensor = self._fragments.safe_get_full_optimizer_state(
            self.parameters[name], kind.name
        )
        return found

    def set_weight(self, name: str, value: Tensor) -> None:
        """Set a weight in the float32 rows; the model's low-precision weights are unchanged."""
        self._set(name, value, None)

    def set_state(self, name: str, kind: StateKind, value: Tensor) -> None:
        """Set optimizer state of a parameter."""
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
    """Return this rank's part of a tensor that stage 3 divides, padded with zeros at its end."""
    from torch import distributed

    size: int = parameter.ds_tensor.numel()
    first = size * distributed.get_rank(parameter.ds_process_group)
    part = torch.zeros(size, dtype=value.dtype, device=value.device)
    own = value.flatten()[first : first + size]
    part[: own.numel()] = own
    return part
