"""`TrainState`: everything that training changes, and its form in a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.accelerator.op.records import OpContext
from lmcore.config.derived.layout import ParallelLayout
from lmcore.optim.create import create_optimizer
from lmcore.optim.loss_scale import FixedLossScale, LossScale, loss_scale_of
from lmcore.optim.optimizer import Optimizer
from lmcore.optim.schedule import LearningRateSchedule
from lmcore.parallel import tensor_parallel
from lmcore.parallel.scalar_collectives import ShardSums
from lmcore.parallel.tensor_layout import TensorLayout

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.model.protocol import Model
    from lmcore.parallel.parallel_model import ParallelModel
    from lmcore.runtime.runtime import Runtime

__all__ = [
    "TrainState",
    "named_random_states",
    "random_state_name",
    "random_states",
    "seed_everything",
    "set_random_states",
]

_COUNTERS = (
    "iteration",
    "consumed_samples",
    "consumed_tokens",
    "scheduled_samples",
    "skipped_iterations",
)
_STREAM = "rng.stream."
_ALONE = ParallelLayout()
_SEED_OF_PROCESS = 1_000_003
"""Difference between the seeds of consecutive ranks."""
_SEED_OF_STEP = 2_654_435_761
"""Difference between the seeds of consecutive steps; generators may use 32 bits only."""
_SEED_OF_PARTS = 2718
"""Offset of the seed of the tensor-parallel random stream."""


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
        where = OpContext(runtime.device.type, runtime.precision.keep)
        optimizer = create_optimizer(
            plan.config.optimizer,
            parallel.named_parameters(),
            bind=lambda op: runtime.ops.bind(op, where),
            sum_over_shards=ShardSums(parallel),
            warns=runtime.rank.rank == 0,
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
        """Return the fields of the learning-rate schedule, which a resumed run must share."""
        return asdict(self.schedule)


def random_states(runtime: Runtime) -> dict[str, Tensor]:
    """Return copies of all random states by checkpoint name: host, device, and each stream."""
    states = {
        "rng.host": torch.get_rng_state(),
        "rng.device": runtime.device.get_rng_state().clone(),
    }
    return states | {_STREAM + name: state for name, state in runtime.rng.states().items()}


def random_state_name(name: str, rank: int) -> str:
    """Return the checkpoint name of a random state; names of rank 0 have no prefix.

    Args:
        name: Name of the state in `random_states`.
        rank: Rank that the state belongs to.
    """
    return name if rank == 0 else f"rng.rank{rank}.{name.removeprefix('rng.')}"


def named_random_states(runtime: Runtime) -> dict[str, Tensor]:
    """Return copies of this rank's random states by checkpoint name."""
    states, rank = random_states(runtime), runtime.rank.rank
    return {random_state_name(name, rank): state for name, state in states.items()}


def set_random_states(states: dict[str, Tensor], runtime: Runtime) -> None:
    """Set the random states that `random_states` returned."""
    torch.set_rng_state(states["rng.host"])
    runtime.device.set_rng_state(states["rng.device"])
    runtime.rng.set_states(
        {
            name.removeprefix(_STREAM): state
            for name, state in states.items()
            if name.startswith(_STREAM)
        }
    )


def seed_everything(
    seed: int, runtime: Runtime, layout: ParallelLayout = _ALONE, *, step: int = 0
) -> None:
    """Seed the generators of host and device, and the tensor-parallel random stream.

    Ranks with the same activations draw the same numbers: the ranks of a tensor-parallel group,
    unless they divide the sequence.  All other ranks draw different numbers.  Numbers for the parts
    of a divided layer come from a stream, seeded as in Megatron with seed + 2718 + tensor rank.

    Args:
        seed: Seed of the run.
        runtime: Rank, device and random streams.
        layout: Parallel layout of the run.
        step: Number of steps done, in a run that resumes with new random numbers.
    """
    place, tensor = divmod(runtime.rank.rank, layout.tensor)
    apart = layout.sequence or layout.tensor == 1
    number = runtime.rank.rank if apart else place
    begin = seed + _SEED_OF_STEP * step
    own = (begin + _SEED_OF_PROCESS * number) % 2**63
    torch.default_generator.manual_seed(own)
    runtime.device.seed(own)
    others = runtime.rng.states()
    others.pop(tensor_parallel.STREAM, None)
    runtime.rng.set_states(others)
    if not apart:
        parts = begin + _SEED_OF_PARTS + tensor + _SEED_OF_PROCESS * place
        runtime.rng.add(tensor_parallel.STREAM, parts % 2**63)
