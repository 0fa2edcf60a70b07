"""Pipeline parallelism: each rank has some of the layers, run by torch's pipelining schedules.

A stage is some layers of the rank's model; the first stage also embeds, the last also computes the
loss.  torch's schedules order the micro-batches and send hidden states and their gradients: of a
model with two stacks, the stages of the second one also pass on the last states of the first.
Shapes: B micro-batch, S sequence of this rank, H hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from lmcore.contract.torch_versions import (
    EQUAL_FIRST_MESSAGES,
    SCHEDULE_WITHOUT_OUTPUTS,
    STAGE_GRADIENTS,
)
from lmcore.model.family import stacks_of
from lmcore.parallel.pipeline_split import owner_of, stack_of, stage_layers, stages_of
from lmcore.runtime.profiler_range import ProfilerRange, no_range

if TYPE_CHECKING:
    from lmcore.data.loading.batch import Batch
    from lmcore.families.protocol import Model
    from lmcore.parallel.mesh import ParallelMesh

__all__ = ["Pipeline", "StageModule"]

Context = Callable[[], AbstractContextManager[Any]]
Sizes = tuple[tuple[int, int, int], ...]
"""Sizes of the hidden states of each stack, [B, S, H]."""


@dataclass
class _Feed:
    """Micro-batches of the current step, with the context and profiler ranges of forward."""

    batches: Sequence[Batch] = ()
    context: Context = contextlib.nullcontext
    profiler_range: ProfilerRange = no_range


class StageModule(nn.Module):
    """Pipeline stage; its forward pass takes the next micro-batch of the feed.

    Attributes:
        layers: Layers of the stage.
        first: True for the stage that embeds.
        last: True for the stage that computes the loss.
        taken: Number of micro-batches of the step whose forward pass has run.
    """

    def __init__(
        self, model: Model, layers: range, feed: _Feed, *, first: bool, last: bool
    ) -> None:
        """Register the modules of a stage.

        Args:
            model: Part of the model on this rank, which keeps the modules too.
            layers: Numbers of the layers.
            feed: Micro-batches of the current step.
            first: True for the stage that embeds.
            last: True for the stage that computes the loss.
        """
        super().__init__()
        if len(model.layers) != len(model.part.layers):  # its class does not build parts
            raise model.unsupported("--pipeline-model-parallel-size")
        by_number = dict(zip(model.part.layers, model.layers, strict=True))
        self.layers = nn.ModuleList(by_number[number] for number in layers)
        for name, module in model.stage_modules(first=first, last=last).items():
            self.add_module(name, module)
        self._run_stage, self._feed = model.run_stage, feed  # the model itself is no submodule
        self.first, self.last = first, last
        self.taken = 0

    def forward(self, *hidden: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the hidden states after the last layer; of the last stage the losses, [L].

        Args:
            hidden: States of the stage before; of two stacks in their order.
        """
        batch = self._feed.batches[self.taken]
        self.taken += 1
        with self._feed.profiler_range("forward"), self._feed.context():
            given = None if self.first else hidden[0] if len(hidden) == 1 else hidden
            out = self._run_stage(given, batch, list(self.layers), last=self.last)
            return torch.stack([out]) if self.last and not out.dim() else out


class Pipeline:
    """Pipeline stages of this rank, and their schedule.

    Attributes:
        modules: Stages of this rank; with ZeRO, `fully_shard` is applied to them.
    """

    def __init__(self, model: Model, mesh: ParallelMesh, device: torch.device) -> None:
        """Split *model* into the stages of this rank.

        Args:
            model: Part of the model that `own_part` gives this rank.
            mesh: Mesh of the run.
            device: Device of this rank.
        """
        self.layout, self.axis, self._clock = mesh.layout, mesh.pipeline, mesh.clock
        self._stacks = stacks_of(model.shape)
        layers = stage_layers(self._stacks, self.layout)
        self.count = len(layers)
        self.numbers = stages_of(self.axis.rank, self.layout)
        self._feed = _Feed()
        self.modules = [
            StageModule(
                model,
                layers[stage],
                self._feed,
                first=stage == 0,
                last=stage == self.count - 1,
            )
            for stage in self.numbers
        ]
        self._device, self._family = device, model.family
        self._hidden_size = model.shape.hidden_size
        self._losses: list[Tensor] = []
        self._schedule_key: tuple[int, Sizes] | None = None
        self._cached: Any = None

    def run(
        self,
        micro_batches: Iterable[Batch],
        count: int,
        context: Context,
        profiler_range: ProfilerRange = no_range,
    ) -> list[Tensor]:
        """Run forward and backward of a step; return its losses if this rank has the last stage.

        Args:
            micro_batches: Micro-batches, on the device.
            count: Number of micro-batches.
            context: Context of a forward pass, which sets the precision.
            profiler_range: Profiler ranges of forward and backward.
        """
        batches = list(micro_batches)
        schedule = self._schedule(batches[0], count)
        self._losses = []
        # Targets come with the micro-batch; the schedule requires some to pass to the loss.
        target = {"target": torch.arange(count)} if self._has_last else {}
        # What is not the forward or backward pass of a stage is a wait for another rank.
        with self._feeding(batches, context, profiler_range), self._clock:
            # Otherwise it returns the losses, too.
            options = {"return_outputs": False} if SCHEDULE_WITHOUT_OUTPUTS else {}
            schedule.step(**options, **target)
        return self._losses

    def evaluate(self, batch: Batch, context: Context) -> Tensor:
        """Return the loss of a micro-batch, without gradients; 0 without the last stage.

        Args:
            batch: Micro-batch, on the device.
            context: Context of a forward pass, which sets the precision.
        """
        none = torch.zeros(self._values, device=self._device)
        group, sizes = self.axis.group, self._sizes(batch)
        hidden: tuple[Tensor, ...] = ()
        with self._feeding([batch], context):
            for stage, module in zip(self.numbers, self.modules, strict=True):
                before, after = stage - 1, stage + 1
                if stage and before not in self.numbers:
                    hidden = tuple(
                        self._empty(sizes[stack], module) for stack in self._crossing(stage)
                    )
                    for x in hidden:
                        distributed.recv(x, self._rank_of(before), group)
                out = module(*hidden)
                hidden = out if isinstance(out, tuple) else (out,)
                if after < self.count and after not in self.numbers:
                    for x in hidden:
                        distributed.send(x.contiguous(), self._rank_of(after), group)
        return hidden[0].view(self._values) if self._has_last else none

    @property
    def _has_last(self) -> bool:
        return self.count - 1 in self.numbers

    def _rank_of(self, stage: int) -> int:
        return self.axis.ranks[owner_of(stage, self.layout)]

    @contextlib.contextmanager
    def _feeding(
        self,
        batches: Sequence[Batch],
        context: Context,
        profiler_range: ProfilerRange = no_range,
    ) -> Any:
        self._feed.batches, self._feed.context, self._feed.profiler_range = (
            batches,
            context,
            profiler_range,
        )
        for module in self.modules:
            module.taken = 0
        try:
            yield
        finally:
            self._feed.batches, self._feed.profiler_range = (), no_range

    def _sizes(self, batch: Batch) -> Sizes:
        """Return the size of the hidden states of each stack."""
        parts = self.layout.tensor if self.layout.sequence else 1
        tokens = [batch[stack.tokens].shape for stack in self._stacks]
        return tuple((size[0], size[1] // parts, self._hidden_size) for size in tokens)

    def _crossing(self, stage: int) -> list[int]:
        """Return the stacks whose states a stage gets from the one before."""
        if stage == 0:
            return []
        own, before = stack_of(stage, self.layout), stack_of(stage - 1, self.layout)
        return [*range(own), own] if before == own else [before]

    def _empty(self, shape: tuple[int, ...], module: nn.Module) -> Tensor:
        return torch.empty(shape, dtype=next(module.parameters()).dtype, device=self._device)

    def _schedule(self, batch: Batch, count: int) -> Any:
        """Return the schedule for *count* micro-batches of this shape; cached until either changes.

        A schedule holds receive buffers for each micro-batch; the old ones are freed first.
        """
        sizes = self._sizes(batch)
        if self._schedule_key != (count, sizes):
            self._cached = None
            self._cached, self._schedule_key = self._new_schedule(sizes, count), (count, sizes)
        return self._cached

    def _new_schedule(self, sizes: Sizes, count: int) -> Any:
        from torch.distributed.pipelining import schedules

        several, kind = {
            "1f1b": (False, schedules.Schedule1F1B),
            "gpipe": (False, schedules.ScheduleGPipe),
            "interleaved": (True, schedules.ScheduleInterleaved1F1B),
            "zero-bubble": (True, schedules.ScheduleInterleavedZeroBubble),
            "zero-bubble-v": (True, schedules.ScheduleZBVZeroBubble),
        }[self.layout.schedule]
        stages = [
            self._stage(number, module, sizes)
            for number, module in zip(self.numbers, self.modules, strict=True)
        ]
        make: Any = kind
        return make(
            stages if several else stages[0],
            count,
            loss_fn=self._loss,
            scale_grads=False,  # loss weights do
        )

    def _loss(self, losses_L: Tensor, _number: Tensor) -> Tensor:
        """Keep the losses of a micro-batch; return their sum, which backward starts from."""
        several = len(self._family.losses) > 1
        self._losses.append(losses_L.detach() if several else losses_L.detach().squeeze(0))
        return losses_L.sum()  # not a view: the schedule detaches it

    @property
    def _values(self) -> tuple[int, ...]:
        """Size of what the model's loss returns in evaluation."""
        count = len(self._family.losses) + len(self._family.accuracies)
        return (count,) if count > 1 else ()

    def _stage(self, number: int, module: StageModule, sizes: Sizes) -> Any:
        from torch.distributed.pipelining import PipelineStage

        dtype = next(module.parameters()).dtype
        wide = torch.promote_types(dtype, torch.float32)
        terms = len(self._family.losses)
        loss = torch.empty(terms, dtype=wide, device="meta", requires_grad=True)

        def states(stage: int) -> tuple[Tensor, ...]:
            return tuple(
                torch.empty(sizes[stack], dtype=dtype, device="meta", requires_grad=True)
                for stack in self._crossing(stage)
            )

        last = number == self.count - 1
        before, after = states(number), () if last else states(number + 1)
        tensors: dict[str, Any] = {
            "input_args": before,
            "output_args": (loss,) if last else after,
        }
        if STAGE_GRADIENTS:
            tensors["input_grads"] = tuple(x.detach() for x in before)
            tensors["output_grads"] = tuple(x.detach() for x in after)
        stage: Any = PipelineStage(
            module, number, self.count, self._device, group=self.axis.group, **tensors
        )
        if not EQUAL_FIRST_MESSAGES and hasattr(stage, "_get_init_p2p_neighbors_ops"):
            stage._get_init_p2p_neighbors_ops = _with_equal_sizes(stage)  # noqa: SLF001
        for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            call = self._clock.interrupted(getattr(stage, name))
            setattr(stage, name, call if name.startswith("forward") else self._named(call))
        return stage

    def _named(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a stage's backward pass within its profiler range."""

        def run(*arguments: Any, **options: Any) -> Any:
            with self._feed.profiler_range("backward"):
                return call(*arguments, **options)

        return run


def _with_equal_sizes(stage: Any) -> Callable[[], list[Any]]:
    """Return a stage's function for its first messages, with tensors of one size.

    In torch 2.9 int64 is sent and float32 received, which gloo refuses by ending the process.
    """
    messages = stage._get_init_p2p_neighbors_ops  # noqa: SLF001 - torch calls it

    def equal() -> list[Any]:
        found: list[Any] = messages()
        for message in found:
            message.tensor = torch.zeros(1, device=stage.device)
        return found

    return equal
