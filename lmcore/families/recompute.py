"""Recompute policy of a model: the layers and attention ops that it runs in training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from lmcore.contract.recompute import Placement, remembering

if TYPE_CHECKING:
    from lmcore.runtime.runtime import Runtime

__all__ = ["KEEP_ALL", "Recompute", "recompute_of"]

Run = Callable[..., Tensor]


@dataclass(frozen=True)
class Recompute:
    """Recompute policy, as a model uses it.

    Attributes:
        block: Function that runs a group of layers, `block(call, x)`; None: called directly.
        attention: Function that runs the attention op, `attention(call, q, k, v)`; None: called
            directly.
        placement: Layers that `block` runs.
    """

    block: Run | None = None
    attention: Run | None = None
    placement: Placement = field(default_factory=Placement)

    def run_blocks(self, blocks: Sequence[Callable[[Tensor], Tensor]], x_BSH: Tensor) -> Tensor:
        """Return x after all blocks.

        Args:
            blocks: Layers, in order; `placement` groups them.
            x_BSH: Hidden states.
        """
        if self.block is None:
            return _through(blocks, x_BSH)
        for first, end, recomputed in self.placement.groups(len(blocks)):
            group = blocks[first:end]
            if recomputed:
                # A group of one layer is passed as the module itself.
                call = group[0] if len(group) == 1 else functools.partial(_through, group)
                x_BSH = self.block(call, x_BSH)
            else:
                x_BSH = _through(group, x_BSH)
        return x_BSH


KEEP_ALL = Recompute()
"""No recompute: every layer keeps its activations."""


def recompute_of(runtime: Runtime, *, compile_blocks: bool = False) -> Recompute:
    """Return the run's recompute policy for a model.

    Args:
        runtime: Policy, placement, random number streams and precision.
        compile_blocks: True if layers are compiled; the attention policy then breaks the graph.
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
    """Return *run* with a graph break: the compiler cannot trace its hooks."""
    import torch

    disabled: Run = torch.compiler.disable(run)
    return disabled
