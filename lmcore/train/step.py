"""A step of the native engine: forward and backward of each micro-batch, clipping, update.

The loss is the mean over micro-batches of their means over counted tokens, as in Megatron.  A
synchronous step reads loss and gradient norm before the update: if they are not finite, nothing is
updated; the step is skipped if the loss scale can be lowered, and is an error otherwise.  An
asynchronous step queues everything and reads nothing; numbers that are not finite are an error when
its result is read.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmcore.accelerator.transfer.async_scalars import ScalarCopier, supports_async_scalars
from lmcore.optim.clip import clip_by_norm, clip_by_norm_on_device
from lmcore.parallel.scalar_collectives import all_reduce_scalars_on_device
from lmcore.runtime.profiler_range import ProfilerRange, no_range
from lmcore.train.diagnose.non_finite import non_finite, non_finite_after_update
from lmcore.train.sophia_hessian import estimate_hessian, hessian_is_due
from lmcore.train.step_record import PendingStep, StepRecord

if TYPE_CHECKING:
    from lmcore.accelerator.transfer.async_scalars import AsyncScalars
    from lmcore.config.plan import RunPlan
    from lmcore.data.loading.batch import Batch
    from lmcore.model.protocol import Arguments, SampleKind
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.state import TrainState

__all__ = [
    "TrainStep",
    "loss_arguments",
    "mean_loss",
]


def loss_arguments(
    batch: Batch, kind: SampleKind, device: torch.device, *, share: float = 1.0
) -> Arguments:
    """Return the positional and keyword arguments of the model's loss for a micro-batch.

    With them the loss is *share* times the mean loss over the batch, with the batch's loss weights.

    Args:
        batch: Tensors by the names of *kind*, on the host or the device.
        kind: Sample kind of the model.
        device: Device to compute on.
        share: Factor of the mean loss, such as 1 / number of micro-batches.
    """
    tensors = batch.to(device).named_tensors()
    weight_BS = tensors[kind.loss_weight]
    tensors[kind.loss_weight] = weight_BS * (share / weight_BS.sum().clamp(min=1.0))
    options = {name: tensors[name] for name in kind.options if name in tensors}
    return tuple(tensors[name] for name in kind.arguments), options


def mean_loss(
    loss: Callable[..., Tensor], batch: Batch, kind: SampleKind, device: torch.device
) -> Tensor:
    """Return the mean loss over a batch, with the batch's loss weights.

    Args:
        loss: Loss function of a model on *device*, with the arguments of `loss_arguments`.
        batch: Tensors by the names of *kind*.
        kind: Sample kind of the model.
        device: Device to compute on.
    """
    arguments, options = loss_arguments(batch, kind, device)
    return loss(*arguments, **options)


class TrainStep:
    """The step of the native engine.

    Attributes:
        state: State of the run, changed by each step.
        asynchronous: True if steps are queued without waiting for the device: the device has
            asynchronous copies, and no loss scale depends on the numbers of the step before.
    """

    def __init__(
        self,
        state: TrainState,
        plan: RunPlan,
        runtime: Runtime,
        profiler_range: ProfilerRange = no_range,
    ) -> None:
        """Bind the kernel of the gradient norm.

        Args:
            state: State of the run.
            plan: The run.
            runtime: Device, kernels and precision.
            profiler_range: Names the parts of a step in a profile.
        """
        self.state = state
        self.batch_sizes = plan.batch_sizes
        self.samples_at_once = plan.global_batch_size // plan.num_micro_batches
        self.seq_length = plan.config.model.seq_length
        self.clip = plan.config.optimizer.clip_grad
        self.device = runtime.device.torch_device
        self.context = runtime.precision.context
        self.runtime = runtime
        self.profiler_range = profiler_range
        self.norm: Callable[[list[Tensor]], Tensor] = runtime.bind_for_weights("grad_norm")
        self.asynchronous = (
            plan.config.training.async_metrics
            and not runtime.precision.loss_scaling
            and supports_async_scalars(runtime.device)
        )
        self._copier = ScalarCopier(runtime.device) if self.asynchronous else None
        # The clipping factor is computed as the host would, if the device can.
        wide = "float64" in runtime.device.dtypes
        self._wide = torch.float64 if wide else torch.float32

    def __call__(
        self,
        batches: Iterator[Batch],
        requests: Callable[[], tuple[float, ...]] = tuple,
    ) -> PendingStep:
        """Take one step and count it.

        Args:
            batches: Micro-batches of this rank.
            requests: Returns numbers to be summed over all ranks with the loss; called after the
                backward pass.

        Raises:
            NonFiniteError: Loss or gradient norm is NaN or infinite, and no loss scale can be
                lowered; nothing was updated.  An asynchronous step raises it with its result.
        """
        state, parallel, scale = self.state, self.state.parallel, self.state.loss_scale.value
        counters = state.counters()
        samples = self.batch_sizes.at(state.consumed_samples)
        count = samples // self.samples_at_once
        if hessian_is_due(state):
            first = next(batches)
            kind = state.model.sample_kind
            arguments_of_first = loss_arguments(first, kind, self.device, share=scale)
            estimate_hessian(state, arguments_of_first, self.context, self.norm, self.runtime)
            batches = itertools.chain([first], batches)
        parallel.zero_grad()
        arguments = (self._arguments(batches, scale / count) for _ in range(count))
        losses = parallel.run(arguments, count, self.context, self.profiler_range)
        with self.profiler_range("reduce"):
            gradients = parallel.gradients()
            loss, square = sum(losses) / scale, parallel.squared_grad_norm(self.norm, scale=scale)
            numbers = (loss, square, *requests())
            wait = parallel.mesh.clock.wait
            sums = wait(all_reduce_scalars_on_device, self.runtime, *numbers)
        if self._copier is None:
            return self._update(samples, losses, gradients, sums.tolist())
        scalars = self._copier.copy(sums)
        record = self._update_on_device(samples, gradients, sums)
        read = functools.partial(self._read, record, losses, counters, scalars)
        return PendingStep(read, ready=scalars.ready)

    def _arguments(self, batches: Iterator[Batch], share: float) -> Arguments:
        with self.profiler_range("data"):
            kind = self.state.model.sample_kind
            return loss_arguments(next(batches), kind, self.device, share=share)

    def _update(
        self, samples: int, losses: list[Tensor], gradients: list[Tensor], sums: list[float]
    ) -> PendingStep:
        """Update the weights if loss and gradient norm are finite; return the finished step."""
        state, scale = self.state, self.state.loss_scale.value
        # All ranks see the same sums: all skip the step or none, and all scales stay equal.
        loss, norm, requests = self._numbers(sums)
        skipped = not (math.isfinite(loss) and math.isfinite(norm))
        if not state.loss_scale.update(overflow=skipped):
            raise non_finite(state, samples, losses, loss, norm)
        if skipped:
            state.skipped_iterations += 1
        else:
            state.scheduled_samples += samples
        rate = state.schedule(state.scheduled_samples)
        if not skipped:
            with self.profiler_range("optimizer"):
                clip_by_norm(gradients, norm, self.clip, loss_scale=scale)
                state.optimizer.step(rate)
        record = StepRecord.count(state, samples, self.seq_length, rate)
        return PendingStep.of(record.complete(loss, None if skipped else norm, requests))

    def _update_on_device(self, samples: int, gradients: list[Tensor], sums: Tensor) -> StepRecord:
        """Queue the update of the weights; return the record, as yet without loss and norm.

        The weights are updated even if the numbers turn out not to be finite, and are lost then:
        read the result of the step before saving them.
        """
        state = self.state
        with self.profiler_range("optimizer"):
            norm = sums[1].to(self._wide).sqrt()
            clip_by_norm_on_device(gradients, norm, self.clip)
            state.scheduled_samples += samples
            rate = state.schedule(state.scheduled_samples)
            state.optimizer.step(rate)
        return StepRecord.count(state, samples, self.seq_length, rate)

    def _read(
        self,
        record: StepRecord,
        losses: list[Tensor],
        counters: Mapping[str, int],
        scalars: AsyncScalars,
    ) -> StepRecord:
        """Return the record of a queued step; waits until the device has computed it.

        Args:
            record: Record without loss and gradient norm.
            losses: Losses of the micro-batches, on the device.
            counters: Counters of the state before the step.
            scalars: Sums over all ranks.

        Raises:
            NonFiniteError: Loss or gradient norm is NaN or infinite; the state has the counters
                from before the step again, but its weights are lost.
        """
        loss, norm, requests = self._numbers(scalars.read())
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.state.set_counters(counters)
            samples = record.global_batch_size
            raise non_finite_after_update(self.state, samples, losses, loss, norm)
        return record.complete(loss, norm, requests)

    def _numbers(self, sums: list[float]) -> tuple[float, float, tuple[float, ...]]:
        """Return loss, gradient norm and the summed requests from the sums over all ranks."""
        total, square, *requests = sums
        norm = math.sqrt(square) if square >= 0 else math.nan
        return self.state.parallel.total_loss(total), norm, tuple(requests)
