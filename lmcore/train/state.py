"""`TrainState`: everything that training changes, and its form in a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.optim.create import create_optimizer
from lmcore.optim.loss_scale import FixedLossScale, LossScale, loss_scale_of
from lmcore.optim.optimizer import Optimizer
from lmcore.optim.schedule import LearningRateSchedule
from lmcore.parallel.scalar_collectives import ShardSums
from lmcore.parallel.tensor_layout import TensorLayout

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.families.protocol import Model
    from lmcore.parallel.parallel_model import ParallelModel
    from lmcore.runtime.runtime import Runtime

__all__ = ["TrainState"]

_COUNTERS = (
    "iteration",
    "consumed_samples",
    "consumed_tokens",
    "scheduled_samples",
    "skipped_iterations",
)


@dataclass
class TrainState:
    """Weights, optimizer, schedule, loss scale and counters of a run.

    Attributes:
        iteration: Number of steps done, including skipped steps.
        consumed_samples: Number of samples seen in training, over all ranks.
        consumed_tokens: Number of tokens seen in training, over all ranks.
        scheduled_samples: Number of samples in steps that were not skipped: the position in the
            learning-rate schedule.
        skipped_iterations: Number of steps that overflowed and updated nothing.
    """

    parallel: ParallelModel
    optimizer: Optimizer
    schedule: LearningRateSchedule
    loss_scale: LossScale = field(default_factory=FixedLossScale)
    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    scheduled_samples: int = 0
    skipped_iterations: int = 0

    @classmethod
    def create(cls, parallel: ParallelModel, plan: RunPlan, runtime: Runtime) -> TrainState:
        """Return the state of a run before its first step."""
        policy = runtime.precision
        copies = None if policy.compute == policy.keep else getattr(torch, policy.compute)
        optimizer = create_optimizer(
            plan.config.optimizer,
            parallel.named_parameters(),
            bind=runtime.bind_for_weights,
            sum_over_shards=ShardSums(parallel),
            warns=runtime.rank.rank == 0,
            owns_weights=not plan.layout.zero_stage,  # `fully_shard` keeps the shards' memory
            copies=copies,
        )
        scale = loss_scale_of(plan.config.accelerator, runtime.precision)
        return cls(parallel, optimizer, LearningRateSchedule.from_plan(plan), scale)

    @property
    def model(self) -> Model:
        """Part of the model on this rank."""
        return self.parallel.model

    @contextlib.contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        """Put the weights to validate, sample or save into the model within the context.

        For most optimizers they are the weights in training.  Training continues with weights that
        are loaded within the context.
        """
        self.optimizer.eval_mode()
        self.parallel.reshard()
        try:
            yield
        finally:
            self.optimizer.train_mode()
            self.parallel.reshard()

    def tensors(self, *, optimizer: bool = True) -> dict[str, Tensor]:
        """Return the live weights and, if wanted, optimizer state, by checkpoint name.

        To be called, read and loaded within `evaluation_weights`.
        """
        found = {f"model.{name}": p.detach() for name, p in self.parallel.named_parameters()}
        if optimizer:
            state = self.optimizer.state_tensors()
            found |= {f"optimizer.{name}": tensor for name, tensor in state.items()}
        return found

    def changed_by_optimizer(self) -> set[str]:
        """Return the names of those `tensors` that training changes by `optimizer` alone.

        To be called within `evaluation_weights`.
        """
        weights = {f"model.{name}" for group in self.optimizer.groups for name in group.names}
        return weights | {f"optimizer.{name}" for name in self.optimizer.state_tensors()}

    def layouts(self, tensors: Mapping[str, Tensor]) -> dict[str, TensorLayout]:
        """Return the layout of each of *tensors* within its whole tensor, by the same names.

        Optimizer state of a parameter's shape is divided as the parameter is; scalars, and the
        state of parameters that are not divided, are whole.
        """
        of_parameters = self.parallel.layouts
        shapes = {name: tuple(weight.shape) for name, weight in self.parallel.named_parameters()}
        found = {}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(".")
            parameter = rest if kind == "model" else rest.partition(".")[2]
            shape, layout = tuple(tensor.shape), of_parameters[parameter]
            if shape == shapes[parameter]:
                found[name] = layout
                continue
            divided = layout != TensorLayout.whole(shapes[parameter])
            assert not (shape and divided), f"`{name}` {shape} cannot be divided as its parameter"
            found[name] = TensorLayout.whole(shape)
        return found

    def counters(self) -> dict[str, int]:
        """Return iteration, consumed and other counts, as a checkpoint's metadata keeps them."""
        return {name: getattr(self, name) for name in _COUNTERS}

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        """Set the counters; missing ones are set as in a run without skipped steps."""
        plain = {"scheduled_samples": counters["consumed_samples"], "skipped_iterations": 0}
        for name in _COUNTERS:
            setattr(self, name, int(counters[name] if name in counters else plain[name]))

    def schedule_settings(self) -> dict[str, Any]:
        """Return the fields of the learning-rate schedule, which a resumed run must share.

        The start is left out if it is 0: versions before restarts do not know it.
        """
        fields = asdict(self.schedule)
        if not self.schedule.start_samples:
            del fields["start_samples"]
        return fields
