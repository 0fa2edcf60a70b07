"""One optimizer step: forward and backward of each micro-batch, clipping, update.

Loss is the mean over micro-batches of each one's mean over its counted tokens, as Megatron
reports it.  A step can be taken in two ways, which compute the same.  `TrainStep` called reads loss
and gradient norm before the update: nothing is updated where they are not finite, and the step is
skipped where the precision has a loss scale that can still give way, else it is an error.
`TrainStep.begin` queues all of the step and reads nothing; who asks for the result hears of numbers
that are not finite then.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lmcore.accelerator.op.records import OpContext
from lmcore.optim.clip import clip_by_norm, clip_by_norm_on_device
from lmcore.parallel.scalar_collectives import all_reduce_scalars_on_device
from lmcore.runtime.profiler_range import ProfilerRange, no_range
from lmcore.train.async_scalars import ScalarCopier, supports_async_scalars
from lmcore.train.diagnose.non_finite import (
    HINT,
    NonFiniteError,
    check_weights,
    non_finite,
    non_finite_after_update,
)
from lmcore.train.sophia_hessian import estimate_hessian, hessian_is_due

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.data.loading.loader import Batch
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.async_scalars import AsyncScalars
    from lmcore.train.state import TrainState

__all__ = [
    "HINT",
    "NonFiniteError",
    "PendingStep",
    "StepResult",
    "TrainStep",
    "check_weights",
    "loss_arguments",
    "mean_loss",
]


@dataclass(frozen=True)
class StepResult:
    """What one step yields, the same in all processes.

    Attributes:
        loss: Mean over all micro-batches; may not be finite where the step was skipped.
        grad_norm: Before clipping; None where the step was skipped.
        learning_rate: The rate that was used; where the step was skipped, that of the last one
            that was not.
        samples: Samples of the step over all processes.
        loss_scale: The scale after the step, as Megatron reports it.
        requests: How many processes ask for each of what `TrainStep.__call__` was told to ask.
    """

    loss: float
    grad_norm: float | None
    learning_rate: float
    samples: int
    loss_scale: float = 1.0
    requests: tuple[float, ...] = ()

    @property
    def skipped(self) -> bool:
        """Whether an overflow kept the step from updating anything."""
        return self.grad_norm is None


def loss_arguments(
    batch: Batch, device: torch.device, *, share: float = 1.0
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return what `GPT.loss` takes, by place and by name.

    It then is *share* times the mean loss over the batch's counted tokens.

    Args:
        batch: Tokens, targets and their weights, on the host or there already.
        device: Where to compute.
        share: Factor, such as 1 / number of micro-batches.
    """
    here = batch.to(device)
    mask_BS = here.loss_mask_BS
    weight_BS = mask_BS * (share / mask_BS.sum().clamp(min=1.0))
    of_documents = {
        name: tensor
        for name, tensor in (
            ("positions_BS", here.positions_BS),
            ("documents_BS", here.documents_BS),
        )
        if tensor is not None
    }
    return (here.tokens_BS, here.targets_BS, weight_BS), of_documents


def mean_loss(loss: Callable[..., Tensor], batch: Batch, device: torch.device) -> Tensor:
    """Return the mean loss over a batch's counted tokens.

    Args:
        loss: `GPT.loss` of a model on *device*, or another that takes its arguments.
        batch: See `loss_arguments`.
        device: See there.
    """
    arguments, options = loss_arguments(batch, device)
    return loss(*arguments, **options)


class _Backward(NamedTuple):
    """What forward and backward of a step leave.

    Attributes:
        samples: Of the step, over all processes.
        losses: Of this process's micro-batches, each times the loss scale, on the device.
        gradients: Those of the local parameters.
        sums: Over all processes: losses, squares of the gradients, and what was asked.
    """

    samples: int
    losses: list[Tensor]
    gradients: list[Tensor]
    sums: Tensor


class TrainStep:
    """The step of a run; its kernels are bound when it is made.

    Attributes:
        late: Whether `begin` can be used: the device works on its own, and no loss scale needs the
            numbers of a step before the next one.
    """

    def __init__(
        self, plan: RunPlan, runtime: Runtime, profiler_range: ProfilerRange = no_range
    ) -> None:
        """Bind the kernel of the gradient norm."""
        self.batch_sizes = plan.batch_sizes
        self.samples_at_once = plan.global_batch_size // plan.num_micro_batches
        self.seq_length = plan.config.model.seq_length
        self.clip = plan.config.optimizer.clip_grad
        self.device = runtime.device.torch_device
        self.context = runtime.precision.context
        self.runtime = runtime
        self.profiler_range = profiler_range
        self.norm: Callable[[list[Tensor]], Tensor] = runtime.ops.bind(
            "grad_norm", OpContext(runtime.device.type, runtime.precision.keep)
        )
        self.late = (
            plan.config.training.async_metrics
            and not runtime.precision.loss_scaling
            and supports_async_scalars(runtime.device)
        )
        self._reader = ScalarCopier(runtime.device) if self.late else None
        # The clipping factor is computed as the host would, where the device can.
        wide = "float64" in runtime.device.dtypes
        self._wide = torch.float64 if wide else torch.float32

    def __call__(
        self,
        state: TrainState,
        batches: Iterator[Batch],
        requests: Callable[[], tuple[float, ...]] = tuple,
    ) -> StepResult:
        """Take one step and count it.

        Args:
            state: Changed in place.
            batches: This process's micro-batches.
            requests: Called when backward is done; what it returns is summed over the processes.

        Raises:
            NonFiniteError: Loss or gradient norm is NaN or infinite, and no loss scale can give
                way; nothing was updated.
        """
        scale = state.loss_scale.value
        done = self._backward(state, batches, requests)
        # One process's overflow is every one's: all skip, and all scales stay equal.
        loss, norm, asked = _numbers(state, done.sums.tolist())
        skipped = not (math.isfinite(loss) and math.isfinite(norm))
        if not state.loss_scale.update(overflow=skipped):
            raise non_finite(state, done.samples, done.losses, loss, norm)
        if skipped:
            state.skipped_iterations += 1
        else:
            state.scheduled_samples += done.samples
        rate = state.schedule(state.scheduled_samples)
        if not skipped:
            with self.profiler_range("optimizer"):
                clip_by_norm(done.gradients, norm, self.clip, loss_scale=scale)
                state.optimizer.step(rate)
        self._count(state, done.samples)
        return StepResult(
            loss,
            None if skipped else norm,
            rate,
            done.samples,
            loss_scale=state.loss_scale.value,
            requests=asked,
        )

    def begin(
        self,
        state: TrainState,
        batches: Iterator[Batch],
        requests: Callable[[], tuple[float, ...]] = tuple,
    ) -> PendingStep:
        """Queue all of one step and count it; nothing that the device computes is waited for.

        The weights are updated whatever the numbers are: they are of no use where those turn out
        not to be finite, and who would save them must ask for the result first.

        Args:
            state: See `__call__`.
            batches: See there.
            requests: See there.
        """
        assert self._reader is not None, "the device, or the precision, is waited for"
        before = state.counters()
        done = self._backward(state, batches, requests)
        with self.profiler_range("optimizer"):
            sums = self._reader.copy(done.sums)
            norm = done.sums[1].to(self._wide).sqrt()
            clip_by_norm_on_device(done.gradients, norm, self.clip)
            state.scheduled_samples += done.samples
            rate = state.schedule(state.scheduled_samples)
            state.optimizer.step(rate)
        self._count(state, done.samples)
        return PendingStep(state, before, done.samples, done.losses, sums, rate)

    def _backward(
        self,
        state: TrainState,
        batches: Iterator[Batch],
        requests: Callable[[], tuple[float, ...]],
    ) -> _Backward:
        """Run forward and backward of a step's micro-batches and exchange what they leave."""
        parallel, scale, profiler_range = (
            state.parallel,
            state.loss_scale.value,
            self.profiler_range,
        )
        samples = self.batch_sizes.at(state.consumed_samples)
        count = samples // self.samples_at_once
        if hessian_is_due(state):
            first = next(batches)
            arguments_of_one = loss_arguments(first, self.device, share=scale)
            estimate_hessian(state, arguments_of_one, self.context, self.norm, self.runtime)
            batches = itertools.chain([first], batches)
        parallel.zero_grad()
        arguments = (self._arguments(batches, scale / count) for _ in range(count))
        losses = parallel.run(arguments, count, self.context, profiler_range)
        with profiler_range("reduce"):
            gradients = parallel.gradients()
            own, share = sum(losses) / scale, parallel.square(self.norm, scale=scale)
            sums = all_reduce_scalars_on_device(self.runtime, own, share, *requests())
        return _Backward(samples, losses, gradients, sums)

    def _arguments(
        self, batches: Iterator[Batch], share: float
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        with self.profiler_range("data"):
            return loss_arguments(next(batches), self.device, share=share)

    def _count(self, state: TrainState, samples: int) -> None:
        state.iteration += 1
        state.consumed_samples += samples
        state.consumed_tokens += samples * self.seq_length


class PendingStep:
    """A step that is queued; its result is asked for once."""

    def __init__(
        self,
        state: TrainState,
        before: Mapping[str, int],
        samples: int,
        losses: list[Tensor],
        sums: AsyncScalars,
        rate: float,
    ) -> None:
        """Keep what the result is made of.

        Args:
            state: Of the run.
            before: Its counters before the step.
            samples: Of the step.
            losses: Of its micro-batches, on the device.
            sums: Over all processes; see `_Backward`.
            rate: The learning rate that was used.
        """
        self._state, self._before, self._samples = state, before, samples
        self._losses, self._sums, self._rate = losses, sums, rate

    def result(self) -> StepResult:
        """Return it; waits until the device has computed it.

        Raises:
            NonFiniteError: Loss or gradient norm is NaN or infinite; the counters are those before
                the step, the weights are lost.
        """
        loss, norm, asked = _numbers(self._state, self._sums.read())
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._state.set_counters(self._before)
            raise non_finite_after_update(self._state, self._samples, self._losses, loss, norm)
        return StepResult(loss, norm, self._rate, self._samples, requests=asked)


def _numbers(state: TrainState, sums: list[float]) -> tuple[float, float, tuple[float, ...]]:
    """Return loss, gradient norm and what was asked from the sums over all processes."""
    total, square, *asked = sums
    norm = math.sqrt(square) if square >= 0 else math.nan
    return state.parallel.total_loss(total), norm, tuple(asked)
