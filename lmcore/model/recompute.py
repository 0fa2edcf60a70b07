"""How a model's layers run in training: a recompute policy on the layers that it is meant for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from lmcore.accelerator.recompute import Placement, remembering

if TYPE_CHECKING:
    from lmcore.runtime.runtime import Runtime

__all__ = ["KEEP_ALL", "Recompute", "recompute_of"]

Run = Callable[..., Tensor]


@dataclass(frozen=True)
class Recompute:
    """What a model needs of a policy.

    Attributes:
        block: Runs a group of layers: `block(call, x)`; None calls it.
        attention: Runs the attention op: `attention(call, q, k, v)`; None calls it.
        placement: Which layers `block` runs.
    """

    block: Run | None = None
    attention: Run | None = None
    placement: Placement = field(default_factory=Placement)

    def run_blocks(self, blocks: Sequence[Callable[[Tensor], Tensor]], x_BSH: Tensor) -> Tensor:
        """Return x after all of *blocks*, each group run as the placement says."""
        if self.block is None:
            return _through(blocks, x_BSH)
        for first, end, again in self.placement.groups(len(blocks)):
            group = blocks[first:end]
            if again:
                # A group of one is the layer itself, whatever module stands in its place.
                call = group[0] if len(group) == 1 else functools.partial(_through, group)
                x_BSH = self.block(call, x_BSH)
            else:
                x_BSH = _through(group, x_BSH)
        return x_BSH


KEEP_ALL = Recompute()
"""Every layer is called, and keeps what it wants."""


def recompute_of(runtime: Runtime, *, compile_blocks: bool = False) -> Recompute:
    """Return how a model runs under the run's policy.

    Args:
        runtime: Policy, placement, random numbers and precision.
        compile_blocks: Whether layers are compiled; what runs within one is then left out of it.
    """
    policy = runtime.recompute
    remember = remembering(runtime.rng, runtime.precision.context)

    def with_memory(run: Run | None) -> Run | None:
        return None if run is None else functools.partial(run, remember=remember)

    attention = with_memory(policy.attention)
    if attention is not None and compile_blocks:
        attention = _outside_of_compiled(attention)
    return Recompute(with_memory(policy.block), attention, runtime.placement)


def _through(blocks: Sequence[Callable[[Tensor], Tensor]], x_BSH: Tensor) -> Tensor:
    for block in blocks:
        x_BSH = block(x_BSH)
    return x_BSH


def _outside_of_compiled(run: Run) -> Run:
    """Return *run* so that a compiled layer is split there: a compiler cannot see through hooks."""
    import torch

    disabled: Run = torch.compiler.disable(run)
    return disabled
