"""`ParallelModel`: the part of a run's model that one process holds, and how the parts act as one.

The step, checkpoints and optimizer see plain local tensors with their layouts, whatever divides
them.  Shapes: B batch, S sequence.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lmcore.model.build import build_model
from lmcore.model.gpt import initial_weight
from lmcore.model.shape import ModelPart
from lmcore.parallel import context_parallel, tensor_parallel
from lmcore.parallel.collectives import all_reduce_coalesced
from lmcore.parallel.context_parallel import own_places, own_tokens
from lmcore.parallel.data_parallel import replicate, shard_stages
from lmcore.parallel.graph_capture import GraphedMicroBatch, allocate_gradients
from lmcore.parallel.mesh import ParallelMesh
from lmcore.parallel.pipeline import Arguments, Pipeline
from lmcore.parallel.pipeline_split import own_part
from lmcore.parallel.tensor_layout import TensorLayout
from lmcore.runtime.profiler_range import ProfilerRange, no_range

if TYPE_CHECKING:
    from lmcore.accelerator.device import Device
    from lmcore.config.layout import ParallelLayout
    from lmcore.model.gpt import GPT
    from lmcore.model.shape import ModelShape
    from lmcore.runtime.runtime import Runtime

__all__ = ["LocalParameter", "ParallelModel", "parallelize"]

_TIED = "token_embedding.weight"
"""Held by the first stage of a pipeline and, where it is tied, by the last, whose loss uses it."""


@dataclass(frozen=True)
class LocalParameter:
    """A parameter of the model as far as this process holds it.

    Attributes:
        name: In the whole model.
        tensor: What an optimizer updates; its `grad` is set by `ParallelModel.gradients`.
        source: The module's parameter, of which `tensor` is the local part, or itself.
        layout: Which part of the whole it is.
        replica_count: Processes of the run that hold the same part.
        replicated: Whether those that divide a layer all hold it.
        partial: Whether its gradient is to be summed over them: each saw some of the tokens.
    """

    name: str
    tensor: nn.Parameter
    source: nn.Parameter
    layout: TensorLayout
    replica_count: int
    replicated: bool
    partial: bool


class ParallelModel:
    """A model on the processes of a run."""

    def __init__(
        self,
        model: GPT,
        mesh: ParallelMesh,
        shape: ModelShape,
        layouts: dict[str, TensorLayout],
        device: torch.device,
    ) -> None:
        """Place *model*; all processes must call it.

        Args:
            model: This process's part, connected with the others of its layers.
            mesh: The run's processes.
            shape: Of the whole model.
            layouts: Which part of each whole parameter the model has, by name.
            device: This process's; parameters that have no memory yet get it there.
        """
        self.model, self.mesh, self.shape, self.device = model, mesh, shape, device
        self._pipeline = Pipeline(model, mesh, device) if mesh.layout.pipeline > 1 else None
        if self._pipeline is not None:
            shard_stages(self._pipeline.modules, mesh)
            roots: list[nn.Module] = list(self._pipeline.modules)
        else:
            self._replica = replicate(model, mesh)
            self.root = self._replica.root
            roots = [self.root]
        if any(parameter.is_meta for parameter in model.parameters()):
            for root in roots:
                root.to_empty(device=device)
        self.parameters = tuple(self._local(layouts))
        self._graphed: GraphedMicroBatch | None = None
        self._by_replica_count: dict[int, list[nn.Parameter]] = {}
        for one in self.parameters:
            self._by_replica_count.setdefault(one.replica_count, []).append(one.tensor)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the local parameters that are not empty, by the names of the whole model."""
        return [(one.name, one.tensor) for one in self.parameters]

    @property
    def layouts(self) -> dict[str, TensorLayout]:
        """Which part of the whole each local parameter is, by name."""
        return {one.name: one.layout for one in self.parameters}

    def initialize(self, seed: int) -> None:
        """Give every weight the value that it has in a model that is not divided."""
        for one in self.parameters:
            whole = initial_weight(one.name, torch.Size(one.layout.shape), self.shape, seed)
            one.layout.fill(one.tensor, whole)

    def run(
        self,
        micro_batches: Iterable[Arguments],
        count: int,
        context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        profiler_range: ProfilerRange = no_range,
    ) -> list[Tensor]:
        """Run forward and backward of a step and return the loss of each micro-batch.

        Args:
            micro_batches: Arguments of `GPT.loss`, by place and by name, on the device.
            count: How many there are.
            context: The precision's, in which a forward pass runs.
            profiler_range: Names forward, backward and the exchange of gradients.

        Returns:
            Losses; none where the process does not have the last layer.
        """
        if self._pipeline is not None:
            own = (self._own(*arguments, **options) for arguments, options in micro_batches)
            return self._pipeline.run(own, count, context, profiler_range)
        if self._graphed is not None:
            return self._run_graphed(self._graphed, micro_batches, context, profiler_range)
        losses = []
        for number, (arguments, options) in enumerate(micro_batches, start=1):
            with self._replica.accumulation(last=number == count, profiler_range=profiler_range):
                with profiler_range("forward"), context():
                    loss = self.loss(*arguments, **options)
                with profiler_range("backward"):
                    loss.backward()
            losses.append(loss.detach())
        return losses

    def capture_graph(self, device: Device) -> None:
        """Make `run` capture forward and backward of a micro-batch as a graph, and replay it.

        Args:
            device: Device of the run; the layout may have data parallelism only.

        Raises:
            DeviceError: The device cannot capture graphs.
        """
        parameters = [one.source for one in self.parameters]
        buckets = self._replica.buckets
        allocate: Callable[[], None] = functools.partial(allocate_gradients, parameters)
        if buckets is not None:
            allocate = buckets.allocate_gradients
        self._graphed = GraphedMicroBatch(self.loss, parameters, device, allocate=allocate)

    def _run_graphed(
        self,
        graphed: GraphedMicroBatch,
        micro_batches: Iterable[Arguments],
        context: Callable[[], AbstractContextManager[Any]],
        profiler_range: ProfilerRange,
    ) -> list[Tensor]:
        losses = []
        for arguments in micro_batches:
            # A replay is one launch: backward has no profiler range of its own.
            with (
                self._replica.accumulation(last=False, profiler_range=profiler_range),
                profiler_range("forward"),
            ):
                losses.append(graphed(arguments, context))
        if self._replica.buckets is not None:
            self._replica.buckets.all_reduce(profiler_range)
        return losses

    def loss(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor,
        loss_weight_BS: Tensor,
        **options: Tensor,
    ) -> Tensor:
        """Return the loss of a micro-batch; see `GPT.loss`.

        Where sequences are divided each process returns that of its tokens, times the number of
        processes: the mean over them is the whole.  In a pipeline there are no gradients, and
        processes without the last layer return 0.
        """
        arguments, own = self._own(tokens_BS, targets_BS, loss_weight_BS, **options)
        if self._pipeline is not None:
            return self._pipeline.evaluate((arguments, own), contextlib.nullcontext)
        loss: Tensor = self.root(*arguments, **own)
        return loss

    def _own(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor,
        loss_weight_BS: Tensor,
        **options: Tensor,
    ) -> Arguments:
        """Return the arguments of `GPT.loss` for this process's part of the sequences."""
        axis = self.mesh.context
        arguments = (tokens_BS, targets_BS, loss_weight_BS)
        if axis.size == 1:
            return arguments, options
        own = {name: own_tokens(values, axis) for name, values in options.items()}
        if "positions_BS" not in own:
            own["positions_BS"] = own_places(tokens_BS.shape[1], axis).to(tokens_BS.device)
        tokens, targets, weights = (own_tokens(values, axis) for values in arguments)
        return (tokens, targets, weights * axis.size), own

    def drop_gathered(self) -> None:
        """Have the next pass gather sharded weights anew: a pass without backward keeps them.

        To be called wherever weights are changed other than by a step of the optimizer.
        """
        if not self.mesh.layout.zero_stage:
            return
        roots = self._pipeline.modules if self._pipeline is not None else [self.root]
        for module in (one for root in roots for one in root.modules()):
            reshard = getattr(module, "reshard", None)  # of those that `fully_shard` has made
            if reshard is not None:
                reshard()

    def zero_grad(self) -> None:
        """Drop all gradients; those that a captured graph writes are set to zero instead."""
        if self._graphed is not None and self._graphed.captured:
            self._graphed.zero_grad()
            return
        for one in self.parameters:
            one.tensor.grad = one.source.grad = None

    def gradients(self) -> list[Tensor]:
        """Finish the gradients of a step and return the local ones; all processes must call it."""
        for one in self.parameters:
            if one.tensor is not one.source:
                one.tensor.grad = _local(one.source.grad)
        found = [(one, one.tensor.grad) for one in self.parameters if one.tensor.grad is not None]
        grads, mesh = [grad for _, grad in found], self.mesh
        if self._pipeline is not None:
            if not mesh.layout.zero_stage:
                all_reduce_coalesced(grads, mesh.replicas, scale=1.0 / mesh.replicas.size)
            if self.shape.tied:
                tied = [grad for one, grad in found if one.name == _TIED]
                all_reduce_coalesced(tied, mesh.pipeline_ends)
        all_reduce_coalesced([grad for one, grad in found if one.partial], mesh.tensor)
        return grads

    def total_loss(self, total: float) -> float:
        """Return the loss of a step from the sum of what `run` returned over all processes."""
        return total * self.mesh.layout.pipeline / self.mesh.layout.world_size

    def square(
        self, norm: Callable[[list[Tensor]], Tensor], *, scale: float = 1.0
    ) -> Tensor | float:
        """Return this process's share of the squared gradient norm; all shares sum up to it.

        Args:
            norm: The bound `grad_norm`.
            scale: What gradients are to be divided by.

        Returns:
            On the device, where there are gradients.
        """
        total: Tensor | float = 0.0
        for replica_count, parameters in self._by_replica_count.items():
            grads = [one.grad for one in parameters if one.grad is not None]
            if grads:  # divided first: the square of a scaled norm may be beyond the dtype
                total = total + (norm(grads) / scale) ** 2 / replica_count
        return total

    def _local(self, layouts: dict[str, TensorLayout]) -> Iterable[LocalParameter]:
        layout, shards = self.mesh.layout, self.mesh.shards
        replicas = layout.replicas if layout.zero_stage else self.mesh.replicas.size
        for name, source in self.model.named_parameters():
            whole = layouts[name]
            tensor = source
            if layout.zero_stage:
                tensor = nn.Parameter(_local(source.detach()))
                each = -(-source.shape[0] // shards.size)
                whole = whole.rows(shards.rank * each, each)
                if not tensor.numel():
                    continue
            replicated = layouts[name].shape == tuple(source.shape)
            replica_count = replicas * (layout.tensor if replicated else 1)
            if name == _TIED and self.shape.tied:
                replica_count *= self.mesh.pipeline_ends.size
            yield LocalParameter(
                name,
                tensor,
                source,
                whole,
                replica_count=replica_count,
                replicated=replicated,
                partial=replicated and layout.sequence,
            )


def parallelize(
    shape: ModelShape,
    layout: ParallelLayout,
    runtime: Runtime,
    *,
    seed: int | None,
    compile_blocks: bool = False,
    masked: bool = False,
) -> ParallelModel:
    """Build a model and place it on the processes of a run; all must call it.

    Args:
        shape: Of the whole model.
        layout: How it is divided.
        runtime: This process.
        seed: Seed of the initial weights; None leaves them uninitialised, to be loaded.
        compile_blocks: See `build_model`.
        masked: See `build_model`.
    """
    mesh = ParallelMesh.of(layout, runtime)
    part = ModelPart.whole(shape)
    if layout.pipeline > 1:
        part = own_part(shape.num_layers, mesh.pipeline.rank, layout)
    model = build_model(
        shape.narrowed(layout.tensor),
        runtime,
        seed=None,
        compile_blocks=compile_blocks,
        masked=masked,
        part=part,
        device=torch.device("meta") if layout.zero_stage else None,  # never whole on one device
    )
    layouts = tensor_parallel.tensor_layouts(model, mesh.tensor)
    context_parallel.connect(model, mesh.context)
    tensor_parallel.connect(model, mesh.tensor, sequence=layout.sequence, rng=runtime.rng)
    placed = ParallelModel(model, mesh, shape, layouts, runtime.device.torch_device)
    if seed is not None:
        placed.initialize(seed)
    return placed


def _local(tensor: Tensor | None) -> Any:
    """Return the local part of a tensor that `fully_shard` has made, others as they are."""
    to_local = getattr(tensor, "to_local", None)  # without importing torch's class, 0.3 s
    return to_local() if to_local is not None else tensor
