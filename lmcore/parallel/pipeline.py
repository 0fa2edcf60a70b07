"""Pipeline parallelism: each process has some of the layers, by torch's pipelining schedules.

A stage is a few layers of the process's model; the first also embeds, the last also computes the
loss.  torch's schedule says when which stage takes which micro-batch and moves hidden states and
their gradients.  Shapes: B micro-batch, S sequence of this process, H hidden.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version
from torch import Tensor, distributed, nn

from lmcore.errors import RunError
from lmcore.parallel.pipeline_split import owner_of, stage_layers, stages_of
from lmcore.runtime.profiler_range import ProfilerRange, no_range

if TYPE_CHECKING:
    from lmcore.model.gpt import GPT
    from lmcore.parallel.mesh import ParallelMesh

__all__ = ["Arguments", "Pipeline", "StageModule"]

_DIVIDES_BACKWARD = Version("2.13")

Context = Callable[[], AbstractContextManager[Any]]
Arguments = tuple[tuple[Tensor, ...], dict[str, Tensor]]
"""What `GPT.loss` takes, by place and by name."""


@dataclass
class _Feed:
    """The micro-batches of the step that runs, the context of their forward pass, and names."""

    batches: Sequence[Arguments] = ()
    context: Context = contextlib.nullcontext
    profiler_range: ProfilerRange = no_range


class StageModule(nn.Module):
    """One stage: takes hidden states, but the first; micro-batches come in their order."""

    def __init__(self, model: GPT, layers: range, feed: _Feed, *, first: bool, last: bool) -> None:
        """Take the layers of a stage from a process's model, which keeps them too."""
        super().__init__()
        self.layers = nn.ModuleList(model.blocks[str(number)] for number in layers)
        shape = model.shape
        if first or (last and shape.tied):
            self.token_embedding = model.token_embedding
        if first and shape.learned_positions:
            self.position_embedding = model.position_embedding
        if last:
            self.final_norm = model.final_norm
            if not shape.tied:
                self.output_embedding = model.output_embedding
        self._model, self._feed = (model,), feed  # a tuple hides the rest of it from torch
        self.first, self.last = first, last
        self.taken = 0

    def forward(self, *hidden: Tensor) -> Tensor:
        """Return the hidden states after the last layer; of the last stage the loss, [1]."""
        model = self._model[0]
        arguments, options = self._feed.batches[self.taken]
        self.taken += 1
        with self._feed.profiler_range("forward"), self._feed.context():
            tokens_BS, positions = arguments[0], options.get("positions_BS")
            x_BSH = model.embed(tokens_BS, positions) if self.first else hidden[0]
            rotation = model.rotation(tokens_BS, positions, x_BSH.dtype)
            x_BSH = model.run_blocks(
                x_BSH, options.get("documents_BS"), list(self.layers), rotation=rotation
            )
            if not self.last:
                return x_BSH
            loss = model.loss_of(model.final_norm(x_BSH), *arguments[1:])
            return torch.stack([loss])


def _require_divided_backward(schedule: str) -> None:
    """Refuse schedules that this torch cannot run.

    Raises:
        RunError: It cannot.
    """
    if schedule.startswith("zero-bubble") and Version(torch.__version__) < _DIVIDES_BACKWARD:
        raise RunError(
            f"`--pipeline-schedule {schedule}` needs torch {_DIVIDES_BACKWARD} or newer",
            why="it divides backward passes in two, which older ones cannot where a function has a "
            f"backward pass of its own; this is torch {torch.__version__}",
            hint="use `1f1b` or `interleaved`, or install a newer torch",
        )


class Pipeline:
    """The stages of this process, and their schedules.

    Attributes:
        modules: This process's stages; where gradients are to be sharded, torch's `fully_shard`
            has been applied to them.
    """

    def __init__(self, model: GPT, mesh: ParallelMesh, device: torch.device) -> None:
        """Cut *model*, built as `own_part` says, into this process's stages."""
        self.layout, self.axis = mesh.layout, mesh.pipeline
        layers = stage_layers(model.shape.num_layers, self.layout)
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
        self._device = device
        self._hidden_size = model.shape.hidden_size
        self._made_for: tuple[int, ...] = ()
        self._made: Any = None

    def run(
        self,
        micro_batches: Iterable[Arguments],
        count: int,
        context: Context,
        profiler_range: ProfilerRange = no_range,
    ) -> list[Tensor]:
        """Run forward and backward of a step; return the losses where the last stage is."""
        batches = list(micro_batches)
        schedule = self._schedule(batches[0][0][0], count)
        losses: list[Tensor] = []
        # Targets come with the micro-batch; the schedule wants something to hand out.
        target = {"target": torch.arange(count), "losses": losses} if self._has_last else {}
        with self._feeding(batches, context, profiler_range):
            schedule.step(return_outputs=False, **target)
        return [loss.detach() for loss in losses]

    def evaluate(self, batch: Arguments, context: Context) -> Tensor:
        """Return the loss of a micro-batch where the last stage is, elsewhere 0; no gradients."""
        x: Tensor = torch.zeros((), device=self._device)
        group = self.axis.group
        shape = self._hidden_shape(batch[0][0])
        with self._feeding([batch], context):
            for stage, module in zip(self.numbers, self.modules, strict=True):
                before, after = stage - 1, stage + 1
                hidden: tuple[Tensor, ...] = ()
                if stage:
                    if before not in self.numbers:
                        x = self._empty(shape, module)
                        distributed.recv(x, self._rank_of(before), group)
                    hidden = (x,)
                x = module(*hidden)
                if after < self.count and after not in self.numbers:
                    distributed.send(x.contiguous(), self._rank_of(after), group)
        return x.squeeze(0) if self._has_last else torch.zeros((), device=self._device)

    @property
    def _has_last(self) -> bool:
        return self.count - 1 in self.numbers

    def _rank_of(self, stage: int) -> int:
        return self.axis.ranks[owner_of(stage, self.layout)]

    @contextlib.contextmanager
    def _feeding(
        self,
        batches: Sequence[Arguments],
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

    def _hidden_shape(self, tokens_BS: Tensor) -> tuple[int, int, int]:
        parts = self.layout.tensor if self.layout.sequence else 1
        return tokens_BS.shape[0], tokens_BS.shape[1] // parts, self._hidden_size

    def _empty(self, shape: tuple[int, ...], module: nn.Module) -> Tensor:
        return torch.empty(shape, dtype=next(module.parameters()).dtype, device=self._device)

    def _schedule(self, tokens_BS: Tensor, count: int) -> Any:
        """Return the schedule for so many micro-batches of this size; made when these change.

        It has memory for what each micro-batch receives: of a batch that has grown that of the
        smaller one is given back.
        """
        shape = self._hidden_shape(tokens_BS)
        if self._made_for != (count, *shape):
            self._made = None
            self._made, self._made_for = self._new_schedule(shape, count), (count, *shape)
        return self._made

    def _new_schedule(self, shape: tuple[int, int, int], count: int) -> Any:
        from torch.distributed.pipelining import schedules

        _require_divided_backward(self.layout.schedule)
        several, kind = {
            "1f1b": (False, schedules.Schedule1F1B),
            "gpipe": (False, schedules.ScheduleGPipe),
            "interleaved": (True, schedules.ScheduleInterleaved1F1B),
            "zero-bubble": (True, schedules.ScheduleInterleavedZeroBubble),
            "zero-bubble-v": (True, schedules.ScheduleZBVZeroBubble),
        }[self.layout.schedule]
        stages = [
            self._stage(number, module, shape)
            for number, module in zip(self.numbers, self.modules, strict=True)
        ]
        make: Any = kind
        return make(
            stages if several else stages[0],
            count,
            loss_fn=lambda loss, _number: loss.sum(),  # not a view: the schedule detaches it
            scale_grads=False,  # the weights of the loss do
        )

    def _stage(self, number: int, module: StageModule, shape: tuple[int, int, int]) -> Any:
        from torch.distributed.pipelining import PipelineStage

        dtype = next(module.parameters()).dtype
        hidden = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        loss = torch.empty(1, dtype=torch.float32, device="meta", requires_grad=True)
        tensors: dict[str, Any] = {
            "input_args": () if number == 0 else (hidden,),
            "output_args": (loss if number == self.count - 1 else hidden,),
        }
        if "input_grads" in inspect.signature(PipelineStage).parameters:  # from torch 2.12
            grad = hidden.detach()
            tensors["input_grads"] = () if number == 0 else (grad,)
            tensors["output_grads"] = () if number == self.count - 1 else (grad,)
        stage = PipelineStage(
            module, number, self.count, self._device, group=self.axis.group, **tensors
        )
        for name in ("backward_one_chunk", "backward_weight_one_chunk"):
            setattr(stage, name, self._named(getattr(stage, name)))
        return stage

    def _named(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a stage's backward pass with the name that it has in a profile."""

        def run(*arguments: Any, **options: Any) -> Any:
            with self._feed.profiler_range("backward"):
                return call(*arguments, **options)

        return run
