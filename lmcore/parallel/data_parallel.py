"""Data parallelism: processes with the same weights that see different samples, or parts of them.

Their gradients become means while backward still runs: by `GradientBuckets`, or, where weights,
gradients and optimizer state are sharded (ZeRO; Rajbhandari et al., 2020), by torch's
`fully_shard`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from lmcore.parallel.gradient_buckets import GradientBuckets
from lmcore.runtime.profiler_range import ProfilerRange, no_range

if TYPE_CHECKING:
    from lmcore.model.gpt import GPT
    from lmcore.parallel.mesh import ParallelMesh
    from lmcore.parallel.pipeline import StageModule

__all__ = ["Accumulating", "Copies", "LossModule", "place_copies", "place_stages"]


class Accumulating(Protocol):
    """Gives the context of a micro-batch's forward and backward."""

    def __call__(
        self, *, last: bool, profiler_range: ProfilerRange = no_range
    ) -> AbstractContextManager[None]:
        """Return it.

        Args:
            last: Whether this is the last micro-batch of a step.
            profiler_range: Names the time for which the exchange is waited.
        """


class LossModule(nn.Module):
    """A model whose forward is its loss, which is what gradients start from."""

    def __init__(self, model: GPT) -> None:
        """Wrap *model*."""
        super().__init__()
        self.model = model

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        """Return `GPT.loss`."""
        return self.model.loss(*arguments, **options)


@dataclass(frozen=True)
class Copies:
    """A model among its copies.

    Attributes:
        root: Its forward is the model's loss.
        accumulating: When gradients are exchanged.
        buckets: Where they lie; None where there are no copies, or where they are exchanged in
            another way.
    """

    root: nn.Module
    accumulating: Accumulating
    buckets: GradientBuckets | None = None


def place_copies(model: GPT, mesh: ParallelMesh) -> Copies:
    """Place a model among its copies.

    After the backward of the last micro-batch of a step gradients are means over `mesh.copies`.
    All processes must call it; copies must hold the same weights.

    Args:
        model: On this process's device; sharded in place where the layout says so.
        mesh: The run's processes.
    """
    root = LossModule(model)
    if mesh.copies.size == 1:
        return Copies(root, _nothing)
    if mesh.layout.zero_stage:
        return Copies(root, _shard(root, mesh))
    buckets = GradientBuckets(model.named_parameters(), mesh.copies)
    return Copies(root, buckets.backward, buckets)


def _shard(root: LossModule, mesh: ParallelMesh) -> Accumulating:
    """Shard every layer by itself, and the rest together.

    Stage 1 keeps gradients whole until the last micro-batch, stages 2 and 3 shard them at once;
    stages 1 and 2 keep the weights gathered through a step, stage 3 through a layer.
    """
    from torch.distributed.fsdp import FSDPModule

    stage = mesh.layout.zero_stage
    _shard_layers(root, root.model.layers, mesh)

    # torch waits for its exchanges at the end of backward itself.
    def accumulating(
        *,
        last: bool,
        profiler_range: ProfilerRange = no_range,  # noqa: ARG001
    ) -> AbstractContextManager[None]:
        assert isinstance(root, FSDPModule)
        if stage == 1:
            root.set_requires_gradient_sync(last)
        else:
            root.set_requires_all_reduce(last)
        if stage < 3:
            root.set_reshard_after_backward(last)
        return contextlib.nullcontext()

    return accumulating


def place_stages(stages: Sequence[StageModule], mesh: ParallelMesh) -> None:
    """Shard the stages of a pipeline in place, as far as the layout says so.

    torch's schedules exchange gradients at the end of a step, so that stage 2 keeps them whole
    until then, as stage 1 does.
    """
    if mesh.layout.zero_stage:
        for stage in stages:
            _shard_layers(stage, stage.layers, mesh)


def _shard_layers(root: nn.Module, layers: Iterable[nn.Module], mesh: ParallelMesh) -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    where = mesh.shard_mesh()
    for layer in layers:
        fully_shard(layer, mesh=where, reshard_after_forward=mesh.layout.zero_stage == 3)
    fully_shard(root, mesh=where, reshard_after_forward=False)
    if not mesh.can_average:  # torch sums then, and divides what it gets by the number of copies
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


# Nobody is waited for.
def _nothing(
    *,
    last: bool,  # noqa: ARG001
    profiler_range: ProfilerRange = no_range,  # noqa: ARG001
) -> AbstractContextManager[None]:
    return contextlib.nullcontext()
