"""`ParallelModel`: a run's model on the ranks of a mesh, as plain local tensors with layouts.

The step, checkpoints and optimizers use it the same way in every parallel layout.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lmcore.families.build import build_model
from lmcore.model.family import stacks_of
from lmcore.parallel import context_parallel, tensor_parallel
from lmcore.parallel.collectives import all_gather, all_reduce_coalesced
from lmcore.parallel.context_parallel import local_positions, local_tokens
from lmcore.parallel.data_parallel import LossModule, replicate, shard_stages, squared_norm
from lmcore.parallel.graph_capture import GraphedMicroBatch, allocate_gradients
from lmcore.parallel.mesh import Axis, ParallelMesh, ReplicaClass
from lmcore.parallel.pipeline import Pipeline
from lmcore.parallel.pipeline_split import own_part
from lmcore.parallel.sharded_gradients import reshard
from lmcore.parallel.tensor_layout import TensorLayout, local_part
from lmcore.runtime.profiler_range import ProfilerRange, no_range

if TYPE_CHECKING:
    from lmcore.config.derived.layout import ParallelLayout
    from lmcore.contract.device import Device
    from lmcore.data.loading.batch import Batch
    from lmcore.families.protocol import Model
    from lmcore.model.shape import ModelShape
    from lmcore.runtime.runtime import Runtime

__all__ = ["LocalParameter", "ParallelModel", "parallelize"]


@dataclass(frozen=True)
class LocalParameter:
    """This rank's part of one parameter.

    Attributes:
        name: Name in the whole model.
        tensor: Local tensor that the optimizer updates; `ParallelModel.gradients` sets its `grad`.
        source: Parameter of the module: `tensor` itself, or a DTensor with `tensor` as local part.
        layout: Position in the whole tensor.
        replica_count: Number of ranks of the run that hold the same part.
        replicated: True if all ranks of the tensor axis hold it.
        partial: True if its gradient must be summed over the tensor axis, as each rank saw some of
            the tokens.
        holders: Ranks of the pipeline axis that hold it, if there are several.
    """

    name: str
    tensor: nn.Parameter
    source: nn.Parameter
    layout: TensorLayout
    replica_count: int
    replicated: bool
    partial: bool
    holders: tuple[int, ...] = ()


class ParallelModel:
    """Model on the ranks of a run.

    Attributes:
        model: Part of the model on this rank.
        mesh: Mesh of the run.
        shape: Sizes of the whole model.
        device: Device of this rank.
        parameters: Local parameters that are not empty.
    """

    def __init__(
        self,
        model: Model,
        mesh: ParallelMesh,
        shape: ModelShape,
        layouts: dict[str, TensorLayout],
        device: Device,
    ) -> None:
        """Replicate, shard or pipeline *model*; all ranks must call it.

        Args:
            model: Part of the model on this rank, with the collectives of its layers connected.
            mesh: Mesh of the run.
            shape: Sizes of the whole model.
            layouts: Layout of each parameter before ZeRO, by name.
            device: Device of this rank; parameters on the meta device get memory there.
        """
        self.model, self.mesh, self.shape = model, mesh, shape
        self.device, self._step_boundary = device.torch_device, device.step_boundary
        self._pipeline = None
        self._holders: Mapping[str, tuple[int, ...]] = {}
        if mesh.layout.pipeline > 1:
            self._pipeline = Pipeline(model, mesh, self.device)
            stacks, ranks = stacks_of(shape), range(mesh.layout.pipeline)
            self._holders = model.holders([own_part(stacks, rank, mesh.layout) for rank in ranks])
        # In the same order on all ranks, which create all groups.
        shared = sorted(set(self._holders.values()))
        self._shared = {holders: mesh.pipeline_holders(holders) for holders in shared}
        if self._pipeline is not None:
            shard_stages(self._pipeline.modules, mesh)
            roots: list[nn.Module] = list(self._pipeline.modules)
        else:
            self.root = LossModule(model)
            self._replica = replicate(self.root, model.layers, mesh)
            roots = [self.root]
        if any(parameter.is_meta for parameter in model.parameters()):
            for root in roots:
                root.to_empty(device=self.device)
        self.parameters = tuple(self._local(layouts))
        self._graphed: GraphedMicroBatch | None = None
        self._by_replica_count: dict[int, list[nn.Parameter]] = {}
        for local in self.parameters:
            self._by_replica_count.setdefault(local.replica_count, []).append(local.tensor)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the local parameters that are not empty, with their names in the whole model."""
        return [(local.name, local.tensor) for local in self.parameters]

    @property
    def layouts(self) -> dict[str, TensorLayout]:
        """Layout of each local parameter, by name."""
        return {local.name: local.layout for local in self.parameters}

    def replica_classes(self) -> list[ReplicaClass]:
        """Return the parameters that other ranks hold too; all ranks return as many classes.

        ZeRO of every stage shards the weights between two steps.
        """
        found = []
        replicated = (False, True) if self.mesh.tensor.size > 1 else (True,)
        for tensor, holders in itertools.product(replicated, ((), *self._shared)):
            groups = self.mesh.replica_groups(tensor=tensor, holders=holders)
            own = {
                local.name: local.tensor
                for local in self.parameters
                if (local.replicated, local.holders) == (tensor, holders)
            }
            if groups.shape[1] > 1:
                found.append(ReplicaClass(groups, own))
        return found

    def initialize(self, seed: int) -> None:
        """Set every weight to its initial value, the same in every layout.

        Args:
            seed: Seed of the run.
        """
        for local in self.parameters:
            size = torch.Size(local.layout.shape)
            whole = self.model.initial_weight(local.name, size, seed)
            local.layout.fill(local.tensor, whole)

    def run(
        self,
        micro_batches: Iterable[Batch],
        count: int,
        context: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        profiler_range: ProfilerRange = no_range,
    ) -> list[Tensor]:
        """Run forward and backward of a step and return the loss of each micro-batch.

        Args:
            micro_batches: Micro-batches, on the device.
            count: Number of micro-batches.
            context: Context of a forward pass, which sets the precision.
            profiler_range: Profiler ranges of forward, backward and gradient reduction.

        Returns:
            Losses; empty if this rank does not have the last pipeline stage.
        """
        if self._pipeline is not None:
            own = map(self._local_batch, micro_batches)
            losses = self._pipeline.run(own, count, context, profiler_range)
            self._step_boundary()
            return losses
        if self._graphed is not None:
            return self._run_graphed(self._graphed, micro_batches, context, profiler_range)
        losses = []
        for number, batch in enumerate(micro_batches, start=1):
            with self._replica.accumulation(last=number == count, profiler_range=profiler_range):
                with profiler_range("forward"), context():
                    loss = self.loss(**batch)
                with profiler_range("backward"):
                    (loss.sum() if loss.dim() else loss).backward()
            self._step_boundary()
            losses.append(loss.detach())
        return losses

    def capture_graph(self, device: Device) -> None:
        """Make `run` capture forward and backward of a micro-batch as a graph, and replay it.

        Args:
            device: Device of the run; the layout may have data parallelism only.

        Raises:
            DeviceError: The device cannot capture graphs.
        """
        parameters = [local.source for local in self.parameters]
        buckets = self._replica.buckets
        allocate: Callable[[], None] = functools.partial(allocate_gradients, parameters)
        if buckets is not None:
            allocate = buckets.allocate_gradients
        self._graphed = GraphedMicroBatch(self.loss, parameters, device, allocate=allocate)

    def _run_graphed(
        self,
        graphed: GraphedMicroBatch,
        micro_batches: Iterable[Batch],
        context: Callable[[], AbstractContextManager[Any]],
        profiler_range: ProfilerRange,
    ) -> list[Tensor]:
        losses = []
        for batch in micro_batches:
            # A replay is one launch: backward has no separate profiler range.
            with (
                self._replica.accumulation(last=False, profiler_range=profiler_range),
                profiler_range("forward"),
            ):
                losses.append(graphed(batch, context))
        if self._replica.buckets is not None:
            self._replica.buckets.all_reduce(profiler_range)
        return losses

    def loss(self, **batch: Tensor) -> Tensor:
        """Return the losses of a micro-batch; see `Model.loss`.

        With context parallelism, each rank returns the loss of its tokens times the number of
        ranks, so that the mean over the axis is the loss of all tokens.  In a pipeline there are no
        gradients, and ranks without the last stage return zeros.

        Args:
            batch: Tensors by the names of `Family.batch`.
        """
        own = self._local_batch(batch)
        if self._pipeline is not None:
            return self._pipeline.evaluate(own, contextlib.nullcontext)
        loss: Tensor = self.root(**own)
        return loss

    def _local_batch(self, batch: Batch) -> Batch:
        """Return a micro-batch with this rank's part of the sequences."""
        axis, family = self.mesh.context, self.model.family
        if axis.size == 1:
            return batch
        own = {
            name: local_tokens(values, axis) if family.batch[name] == "BS" else values
            for name, values in batch.items()
        }
        if "positions_BS" in family.batch and "positions_BS" not in own:
            tokens_BS = batch[family.tokens]
            own["positions_BS"] = local_positions(tokens_BS.shape[1], axis).to(tokens_BS.device)
        for loss in family.losses:
            if family.batch[loss.weight] == "BS":
                own[loss.weight] = own[loss.weight] * axis.size
        return own

    def reshard(self) -> None:
        """Drop weights that ZeRO has gathered; the next pass gathers them again.

        Must be called after weights change in any other way than by a step of the optimizer, as a
        pass without backward leaves them gathered.
        """
        if not self.mesh.layout.zero_stage:
            return
        roots = self._pipeline.modules if self._pipeline is not None else [self.root]
        for root in roots:
            reshard(root)

    def zero_grad(self) -> None:
        """Drop all gradients; set them to zero in place if a captured graph writes them."""
        if self._graphed is not None and self._graphed.captured:
            self._graphed.zero_grad()
            return
        for local in self.parameters:
            local.tensor.grad = local.source.grad = None

    def gradients(self) -> list[Tensor]:
        """Finish the gradients of a step and return the local ones; all ranks must call it."""
        for local in self.parameters:
            if local.tensor is not local.source:
                grad = local.source.grad
                local.tensor.grad = None if grad is None else local_part(grad)
        params, mesh = self.parameters, self.mesh
        pairs = [(local, grad) for local in params if (grad := local.tensor.grad) is not None]
        grads = [grad for _, grad in pairs]
        if self._pipeline is not None:
            if not mesh.layout.zero_stage:
                all_reduce_coalesced(grads, mesh.replicas, scale=1.0 / mesh.replicas.size)
            for holders, axis in self._shared.items():
                own = sorted((pair for pair in pairs if pair[0].holders == holders), key=_name)
                all_reduce_coalesced([grad for _, grad in own], axis)
        all_reduce_coalesced([grad for local, grad in pairs if local.partial], mesh.tensor)
        return grads

    def total_loss(self, total: float) -> float:
        """Return the loss of a step.

        Args:
            total: Sum of the losses that `run` returned, over all ranks.
        """
        return total * self.mesh.layout.pipeline / self.mesh.layout.world_size

    def squared_grad_norm(
        self, norm: Callable[[list[Tensor]], Tensor], *, scale: float = 1.0
    ) -> Tensor | float:
        """Return this rank's term of the squared gradient norm, which is the sum over all ranks.

        Args:
            norm: Bound `grad_norm`.
            scale: Loss scale that gradients are divided by.

        Returns:
            A scalar on the device; 0.0 if this rank has no gradients.
        """
        gradients = {
            replica_count: [tensor.grad for tensor in parameters if tensor.grad is not None]
            for replica_count, parameters in self._by_replica_count.items()
        }
        return squared_norm(norm, gradients, scale=scale)

    @torch.no_grad()
    def squared_parameter_norm(self, norm: Callable[[list[Tensor]], Tensor]) -> Tensor | float:
        """Return this rank's term of the squared parameter norm, which is the sum over all ranks.

        Args:
            norm: Bound `grad_norm`.

        Returns:
            A scalar on the device; 0.0 if this rank has no parameters.
        """
        weights = {
            replica_count: [parameter.detach() for parameter in parameters]
            for replica_count, parameters in self._by_replica_count.items()
        }
        return squared_norm(norm, weights)

    @torch.no_grad()
    def zero_gradients(self, dtype: torch.dtype) -> Tensor:
        """Return this rank's term of the number of zeros in all gradients: the sum over all ranks.

        Args:
            dtype: Dtype of the term, a scalar on the device: in float64 the rounded sum is exact.
        """
        total = torch.zeros((), dtype=dtype, device=self.device)
        for replica_count, parameters in self._by_replica_count.items():
            for parameter in parameters:
                if parameter.grad is not None:
                    zeros = (parameter.grad == 0).sum().to(dtype)
                    total = total + zeros / replica_count
        return total

    def _local(self, layouts: dict[str, TensorLayout]) -> Iterable[LocalParameter]:
        layout, shards = self.mesh.layout, self.mesh.shards
        replicas = layout.replicas if layout.zero_stage else self.mesh.replicas.size
        for name, source in self.model.named_parameters():
            whole = layouts[name]
            tensor = source
            if layout.zero_stage:
                tensor = nn.Parameter(local_part(source.detach()))
                whole = whole.shard(source.shape[0], shards.rank, shards.size)
                if not tensor.numel():
                    continue
            replicated = layouts[name].shape == tuple(source.shape)
            replica_count = replicas * (layout.tensor if replicated else 1)
            holders = self._holders.get(name, ())
            replica_count *= max(1, len(holders))
            yield LocalParameter(
                name,
                tensor,
                source,
                whole,
                replica_count=replica_count,
                replicated=replicated,
                holders=holders,
                partial=replicated and layout.sequence,
            )


def parallelize(
    shape: ModelShape,
    layout: ParallelLayout,
    runtime: Runtime,
    *,
    compile_blocks: bool = False,
    masked: bool = False,
) -> ParallelModel:
    """Build an uninitialized model and place it on the ranks of a run; all ranks must call it.

    Args:
        shape: Sizes of the whole model.
        layout: Parallel layout of the run.
        runtime: Rank, device, kernels and policies.
        compile_blocks: See `build_model`.
        masked: See `build_model`.
    """
    mesh = ParallelMesh.of(layout, runtime)
    part = None
    if layout.pipeline > 1:
        part = own_part(stacks_of(shape), mesh.pipeline.rank, layout)
    model = build_model(
        shape.narrowed(layout.tensor),
        runtime,
        compile_blocks=compile_blocks,
        masked=masked,
        part=part,
        device=torch.device("meta") if layout.zero_stage else None,  # never whole on one device
    )
    layouts = tensor_parallel.tensor_layouts(model, mesh.tensor)
    if mesh.replicas.size > 1:
        gather = functools.partial(_gather_samples, mesh.replicas)
        model.gather_samples = gather  # type: ignore[method-assign]
    context_parallel.connect(model, mesh.context)
    tensor_parallel.connect(model, mesh.tensor, sequence=layout.sequence, rng=runtime.rng)
    return ParallelModel(model, mesh, shape, layouts, runtime.device)


def _name(pair: tuple[LocalParameter, Tensor]) -> str:
    return pair[0].name


def _gather_samples(replicas: Axis, x: Tensor) -> tuple[Tensor, int]:
    return all_gather(x, replicas, dim=0), replicas.rank * x.shape[0]
