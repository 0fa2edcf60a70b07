"""Data parallelism: replicas of the weights that compute gradients of different samples.

Gradients are averaged while backward still runs: by `GradientBuckets`, or, if weights, gradients
and optimizer state are sharded (ZeRO; Rajbhandari et al., 2020), by torch's `fully_shard`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from lmcore.contract.torch_versions import CUSTOM_SHARD_COLLECTIVES
from lmcore.parallel.collectives import gather_into, scatter_into
from lmcore.runtime.profiler_range import ProfilerRange, no_range

if TYPE_CHECKING:
    from lmcore.families.protocol import Model
    from lmcore.parallel.gradient_buckets import GradientBuckets
    from lmcore.parallel.mesh import ParallelMesh
    from lmcore.parallel.pipeline import StageModule
    from lmcore.parallel.sharded_gradients import ShardedGradients
    from lmcore.parallel.wait_clock import WaitClock

__all__ = [
    "Accumulation",
    "LossModule",
    "Replica",
    "replicate",
    "shard_stages",
    "squared_norm",
]


class Accumulation(Protocol):
    """Context of forward and backward of one micro-batch."""

    def __call__(
        self, *, last: bool, profiler_range: ProfilerRange = no_range
    ) -> AbstractContextManager[None]:
        """Return the context.

        Args:
            last: True for the last micro-batch of a step, after which gradients are averaged.
            profiler_range: Profiler range for the time spent waiting for the all-reduce.
        """


class LossModule(nn.Module):
    """A model whose forward pass returns its loss, from which backward starts."""

    def __init__(self, model: Model) -> None:
        """Wrap *model*."""
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Tensor:
        """Return the model's loss; see `Model.loss`."""
        return self.model.loss(**batch)


@dataclass(frozen=True)
class Replica:
    """This rank's replica of a model.

    Attributes:
        root: Module whose parameters are replicated or sharded.
        accumulation: Context of each micro-batch, which averages gradients at the right time.
        buckets: Gradient buckets; None with one replica, or if `fully_shard` reduces gradients.
        sharded: Gradients that `fully_shard` reduces, if they may be missing.
    """

    root: nn.Module
    accumulation: Accumulation
    buckets: GradientBuckets | None = None
    sharded: ShardedGradients | None = None

    @property
    def filled(self) -> bool:
        """True if the last backward pass gave a parameter a gradient; False with one replica."""
        gradients = self.buckets or self.sharded
        return gradients is not None and gradients.filled


def replicate(
    root: nn.Module,
    layers: Iterable[nn.Module],
    mesh: ParallelMesh,
    *,
    all_used: bool = True,
    reduced: Container[int] = (),
) -> Replica:
    """Connect a model with its replicas; all ranks must call it.

    After the backward pass of the last micro-batch of a step, gradients are means over
    `mesh.replicas`.  Replicas must hold the same weights.

    Args:
        root: Model on this rank's device; sharded in place with ZeRO.
        layers: Modules of it that ZeRO shards separately, unless parts of the model share them.
        mesh: Mesh of the run.
        all_used: See `GradientBuckets`.
        reduced: Ids of parameters whose gradients another model's buckets average.
    """
    if mesh.replicas.size == 1:
        return Replica(root, _no_reduction)
    if mesh.layout.zero_stage:
        sharding = _shard(root, list(layers), mesh)
        if all_used:
            return Replica(root, sharding)
        from lmcore.parallel.sharded_gradients import ShardedGradients

        gradients = ShardedGradients(root, mesh, sharding)
        return Replica(root, gradients.backward, sharded=gradients)
    from lmcore.parallel.gradient_buckets import GradientBuckets

    named = [pair for pair in root.named_parameters() if id(pair[1]) not in reduced]
    buckets = GradientBuckets(named, mesh.replicas, all_used=all_used)
    return Replica(root, buckets.backward, buckets)


def _shard(root: nn.Module, layers: Iterable[nn.Module], mesh: ParallelMesh) -> Accumulation:
    """Shard a module in place: each layer separately, and the rest together.

    Stage 1 keeps whole gradients until the last micro-batch, stages 2 and 3 shard them at once;
    stages 1 and 2 keep the weights gathered for a step, stage 3 for a layer.
    """
    from torch.distributed.fsdp import FSDPModule

    stage = mesh.layout.zero_stage
    _shard_layers(root, layers, mesh)

    # torch itself waits for its collectives at the end of backward.
    def accumulation(*, last: bool, **_: Any) -> AbstractContextManager[None]:
        assert isinstance(root, FSDPModule)
        if stage == 1:
            root.set_requires_gradient_sync(last)
        else:
            root.set_requires_all_reduce(last)
        if stage < 3:
            root.set_reshard_after_backward(last)
        return contextlib.nullcontext()

    return accumulation


def squared_norm(
    norm: Callable[[list[Tensor]], Tensor],
    gradients: Mapping[int, list[Tensor]],
    *,
    scale: float = 1.0,
) -> Tensor | float:
    """Return this rank's term of the squared gradient norm, which is the sum over all ranks.

    Args:
        norm: Bound `grad_norm`.
        gradients: Local gradients by the number of ranks that hold the same ones.
        scale: Loss scale that gradients are divided by.

    Returns:
        A scalar on the device; 0.0 if this rank has no gradients.
    """
    total: Tensor | float = 0.0
    for replica_count, tensors in gradients.items():
        if tensors:  # divided first: the square of a scaled norm may overflow
            total = total + (norm(tensors) / scale) ** 2 / replica_count
    return total


def shard_stages(stages: Sequence[StageModule], mesh: ParallelMesh) -> None:
    """Shard the stages of a pipeline in place, if the layout has ZeRO.

    torch's schedules reduce gradients at the end of a step, so that stage 2 keeps whole gradients
    until then, as stage 1 does.

    Args:
        stages: Pipeline stages of this rank.
        mesh: Mesh of the run.
    """
    if mesh.layout.zero_stage:
        for stage in stages:
            _shard_layers(stage, stage.layers, mesh)


def _shard_layers(root: nn.Module, layers: Iterable[nn.Module], mesh: ParallelMesh) -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    shard_mesh = mesh.shard_mesh()
    for layer in _separate(root, layers):
        fully_shard(layer, mesh=shard_mesh, reshard_after_forward=mesh.layout.zero_stage == 3)
    fully_shard(root, mesh=shard_mesh, reshard_after_forward=False)
    if mesh.clock.on_host and CUSTOM_SHARD_COLLECTIVES:
        gather: Any = _TimedCollective(gather_into, mesh.clock)
        scatter: Any = _TimedCollective(scatter_into, mesh.clock)
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(scatter)
    if not mesh.can_average:  # torch then sums, and divides by the number of replicas
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)


def _separate(root: nn.Module, layers: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the layers that occur once, and share no parameter with the rest of the model."""
    uses = _uses(root)
    for layer, count in Counter(layers).items():
        if count == 1 and all(uses[key] == own for key, own in _uses(layer).items()):
            yield layer


def _uses(module: nn.Module) -> Counter[int]:
    """Return the number of parts of a module that have each parameter, by its id."""
    return Counter(id(each) for part in module.modules() for each in part.parameters(recurse=False))


class _TimedCollective:
    """A collective of `fully_shard` that the host waits for, by torch's interface `Comm`."""

    def __init__(self, collective: Callable[..., Any], clock: WaitClock) -> None:
        self._collective, self._clock = collective, clock

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        return self._clock.wait(self._collective, output_tensor, input_tensor, **options)


def _no_reduction(**_: Any) -> AbstractContextManager[None]:
    return contextlib.nullcontext()
