"""A step of the native engine: forward and backward of each micro-batch, clipping, update.

The loss is the mean over the valid targets of the global batch: gradients are multiplied by their
share until they are clipped, as by a loss scale; see `lmcore.train.token_mean`.  A synchronous step
reads loss and gradient norm before the update: if they are not finite, nothing is updated; the step
is skipped if the loss scale can be lowered, and is an error otherwise.  An asynchronous step queues
everything and reads nothing; numbers that are not finite are an error when its result is read.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmcore.contract.transfer.async_scalars import ScalarCopier, supports_async_scalars
from lmcore.optim.clip import clip_by_norm_on_device, clip_factor
from lmcore.parallel.scalar_collectives import all_reduce_scalars_on_device
from lmcore.runtime.profiler_range import ProfilerRange, no_range
from lmcore.train.diagnose.non_finite import (
    non_finite,
    non_finite_after_update,
    where_in_run,
)
from lmcore.train.sophia_hessian import estimate_hessian, hessian_is_due
from lmcore.train.step_record import PendingStep, StepRecord
from lmcore.train.token_mean import TokenMean, no_valid_target

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.contract.transfer.async_scalars import AsyncScalars
    from lmcore.data.loading.batch import Batch
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.state import TrainState

__all__ = ["TrainStep"]


class _Statistics:
    """Numbers that only observe a step: the norm of the parameters and the zeros in gradients.

    They are summed over all ranks on their own, after the update, so that a run with them has the
    same losses.
    """

    def __init__(
        self,
        state: TrainState,
        plan: RunPlan,
        runtime: Runtime,
        norm: Callable[[list[Tensor]], Tensor],
    ) -> None:
        """Observe nothing yet.

        Args:
            state: State of the run.
            plan: The run, whose logging settings say what is wanted.
            runtime: Device and process group.
            norm: Bound `grad_norm`.
        """
        settings = plan.config.logging
        self._wants_norm = settings.log_params_norm
        self._wants_zeros = settings.log_num_zeros_in_grad
        self._state, self._runtime, self._norm = state, runtime, norm
        # In float32 a count above 2**24 would be rounded.
        wide = "float64" in runtime.device.dtypes
        self._dtype = torch.float64 if wide else torch.float32
        self._zeros: Tensor | float = 0.0

    def count_zeros(self) -> None:
        """Queue the count of zeros in this rank's gradients, which an optimizer may change."""
        if self._wants_zeros:
            self._zeros = self._state.parallel.zero_gradients(self._dtype)

    def sums(self) -> Tensor | None:
        """Return the sums over all ranks after the update; None if no number is wanted.

        All ranks must call it.
        """
        if not (self._wants_norm or self._wants_zeros):
            return None
        square: Tensor | float = 0.0
        if self._wants_norm:
            square = self._state.parallel.squared_parameter_norm(self._norm)
        wait = self._state.parallel.mesh.clock.wait
        sums: Tensor = wait(all_reduce_scalars_on_device, self._runtime, square, self._zeros)
        return sums

    def complete(self, record: StepRecord, sums: Sequence[float]) -> None:
        """Set the numbers of a step's record.

        Args:
            record: Record with the gradient norm, by which it says if the step was skipped.
            sums: Content of `sums`; empty without it.
        """
        if not sums:
            return
        square, zeros = sums
        if self._wants_norm and math.isfinite(square):
            record.params_norm = math.sqrt(square)
        if self._wants_zeros and not record.skipped:
            record.num_zeros_in_grad = round(zeros)


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
        self.state, self.plan = state, plan
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
        self._statistics = _Statistics(state, plan, runtime, self.norm)
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
            DataError: All targets of the global batch are masked; raised in the same way.
        """
        state, parallel, scale = self.state, self.state.parallel, self.state.loss_scale.value
        counters = state.counters()
        samples = self.batch_sizes.at(state.consumed_samples)
        count = samples // self.samples_at_once
        if hessian_is_due(state):
            first = next(batches)
            estimate_hessian(state, first, self._mean(), self.context, self.norm, self.runtime)
            batches = itertools.chain([first], batches)
        parallel.zero_grad()
        mean = self._mean()
        micro_batches = self._micro_batches(batches, count, mean, scale / count)
        losses = parallel.run(micro_batches, count, self.context, self.profiler_range)
        with self.profiler_range("reduce"):
            gradients = parallel.gradients()
            square = parallel.squared_grad_norm(self.norm, scale=scale)
            numbers = (*self._terms(losses, scale), square, *mean.excluded, *requests())
            wait = parallel.mesh.clock.wait
            sums = wait(all_reduce_scalars_on_device, self.runtime, *numbers)
        self._statistics.count_zeros()
        if self._copier is None:
            return self._update(samples, losses, gradients, counters, mean, sums.tolist())
        scalars = self._copier.copy(sums)
        record, observed = self._update_on_device(samples, gradients, mean, sums)
        last = scalars if observed is None else self._copier.copy(observed)
        read = functools.partial(self._read, record, losses, counters, mean, scalars, last)
        return PendingStep(read, ready=last.ready)

    def _mean(self) -> TokenMean:
        return TokenMean(self.plan, self.state.model.family, self.device)

    def _micro_batches(
        self, batches: Iterator[Batch], count: int, mean: TokenMean, share: float
    ) -> Iterator[Batch]:
        taken = len(mean.family.losses) > 1
        if taken:
            with self.profiler_range("data"):
                batches = mean.take(batches, count, self.runtime)
        for _ in range(count):
            with self.profiler_range("data"):
                batch = next(batches) if taken else mean.count(next(batches))
                batch = mean.batch(batch, share=share)
            yield batch

    def _terms(self, losses: list[Tensor], scale: float) -> Sequence[Tensor | float]:
        """Return this rank's sum of each loss; zeros if it has no last stage of a pipeline."""
        if not losses:
            return [0.0 for _ in self.state.model.family.losses]
        total: Tensor = sum(losses) / scale  # type: ignore[assignment]
        return total.unbind() if total.dim() else (total,)

    def _update(
        self,
        samples: int,
        losses: list[Tensor],
        gradients: list[Tensor],
        counters: Mapping[str, int],
        mean: TokenMean,
        sums: list[float],
    ) -> PendingStep:
        """Update the weights if loss and gradient norm are finite; return the finished step."""
        state, scale = self.state, self.state.loss_scale.value
        # All ranks see the same sums: all skip the step or none, and all scales stay equal.
        terms, norm, divisor, requests = self._numbers(samples, counters, mean, sums)
        loss = sum(terms)
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
                factor = clip_factor(norm, self.clip, loss_scale=scale * divisor)
                state.optimizer.scale_gradients(gradients, factor)
                state.optimizer.step(rate)
                self.runtime.device.step_boundary()
        record = StepRecord.count(state, samples, self.seq_length, rate)
        self._complete(record, terms, None if skipped else norm, requests)
        observed = self._statistics.sums()
        self._statistics.complete(record, [] if observed is None else observed.tolist())
        return PendingStep.of(record)

    def _update_on_device(
        self, samples: int, gradients: list[Tensor], mean: TokenMean, sums: Tensor
    ) -> tuple[StepRecord, Tensor | None]:
        """Queue the update of the weights; return the record, as yet without loss and norm.

        With it come the sums of `_Statistics`, which a lazy device computes with the update.

        The weights are updated even if the numbers turn out not to be finite, and are lost then:
        read the result of the step before saving them.
        """
        state = self.state
        with self.profiler_range("optimizer"):
            sums = sums.to(torch.promote_types(sums.dtype, self._wide))
            terms = len(mean.family.losses)
            norm, excluded = sums[terms].sqrt(), sums[terms + 1 : 2 * terms + 1]
            divisor = mean.divisor_on_device(excluded, self.runtime.rank.world_size)
            clip_by_norm_on_device(gradients, norm, self.clip, divisor=divisor)
            state.scheduled_samples += samples
            rate = state.schedule(state.scheduled_samples)
            state.optimizer.step(rate)
            observed = self._statistics.sums()
            self.runtime.device.step_boundary()
        return StepRecord.count(state, samples, self.seq_length, rate), observed

    def _read(
        self,
        record: StepRecord,
        losses: list[Tensor],
        counters: Mapping[str, int],
        mean: TokenMean,
        scalars: AsyncScalars,
        last: AsyncScalars,
    ) -> StepRecord:
        """Return the record of a queued step; waits until the device has computed it.

        Args:
            record: Record without loss and gradient norm.
            losses: Losses of the micro-batches, on the device.
            counters: Counters of the state before the step.
            mean: Targets of the step.
            scalars: Sums over all ranks.
            last: Sums of the statistics, queued after the update; *scalars* without them.

        Raises:
            DataError: All targets are masked; the state is as after a `NonFiniteError`.
            NonFiniteError: Loss or gradient norm is NaN or infinite; the state has the counters
                from before the step again, but its weights are lost.
        """
        samples = record.global_batch_size
        terms, norm, _, requests = self._numbers(samples, counters, mean, scalars.read())
        loss = sum(terms)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.state.set_counters(counters)
            raise non_finite_after_update(self.state, samples, losses, loss, norm)
        self._complete(record, terms, norm, requests)
        self._statistics.complete(record, [] if last is scalars else last.read())
        return record

    def _complete(
        self,
        record: StepRecord,
        terms: Sequence[float],
        norm: float | None,
        requests: tuple[float, ...],
    ) -> None:
        names = [loss.key for loss in self.state.model.family.losses]
        record.complete(dict(zip(names, terms, strict=True)), norm, requests)

    def _numbers(
        self, samples: int, counters: Mapping[str, int], mean: TokenMean, sums: list[float]
    ) -> tuple[list[float], float, float, tuple[float, ...]]:
        """Return losses, gradient norm, the divisor of gradients and the summed requests.

        Args:
            samples: Number of samples in the step, over all ranks.
            counters: Counters of the state before the step.
            mean: Targets of the step.
            sums: Sums over all ranks.

        Raises:
            DataError: All targets are masked.
        """
        count = len(mean.family.losses)
        totals, square, excluded = sums[:count], sums[count], sums[count + 1 : 2 * count + 1]
        ranks = self.runtime.rank.world_size
        if not mean.has_targets(excluded, ranks):
            self.state.set_counters(counters)
            raise no_valid_target(where_in_run(self.state, samples))
        divisors = mean.divisors(excluded, ranks)
        total_loss = self.state.parallel.total_loss
        terms = [total_loss(one) / divisor for one, divisor in zip(totals, divisors, strict=True)]
        norm = math.sqrt(square) / divisors[0] if square >= 0 else math.nan
        return terms, norm, divisors[0], tuple(sums[2 * count + 1 :])
