"""Validation: the mean loss over samples that are not in the training set."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from lmcore.data.loading.loader import BatchLoader
from lmcore.parallel.scalar_collectives import all_reduce_scalars
from lmcore.train.diagnose.non_finite import HINT, NonFiniteError
from lmcore.train.token_mean import TokenMean, no_valid_target

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.data.loading.batch import Collation
    from lmcore.data.loading.loader import SampleSource
    from lmcore.parallel.parallel_model import ParallelModel
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.datasets import RunDatasets
    from lmcore.train.exit_conditions import ExitConditions
    from lmcore.train.resume.validation_history import ValidationHistory
    from lmcore.train.state import TrainState

__all__ = ["Evaluator", "Validation", "perplexity", "validate"]

_LARGEST_EXPONENT = 20.0


@dataclass(frozen=True)
class Validation:
    """The result of a validation.

    Attributes:
        losses: Mean of each loss over its valid targets by `Loss.key`, in nats.
        samples: Number of samples, over all ranks.
        accuracies: Share of the targets that the model predicts, by `Loss.accuracy_key`.
        sets: Result on each named validation set.
    """

    losses: Mapping[str, float]
    samples: int
    accuracies: Mapping[str, float] = field(default_factory=dict)
    sets: Mapping[str, Validation] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Sum of the losses."""
        return sum(self.losses.values())

    @property
    def perplexity(self) -> float | None:
        """exp(min(20, loss)) of the loss of tokens; None without one, as for classes."""
        loss = self.losses.get(_TOKEN_LOSS)
        return None if loss is None else perplexity(loss)

    @property
    def further(self) -> dict[str, float]:
        """Numbers beside loss and perplexity by name, for metrics and displays."""
        losses = self.losses if len(self.losses) > 1 else {}
        return {**losses, **self.accuracies}

    @property
    def numbers(self) -> dict[str, float]:
        """All numbers by name: "loss", "perplexity" if there is one, and `further`."""
        perplexity = {} if self.perplexity is None else {"perplexity": self.perplexity}
        return {"loss": self.loss, **perplexity, **self.further}

    def named(self, part: str) -> dict[str, float]:
        """Return `further` with the name of the evaluation before each: "valid_sop_loss"."""
        return {f"{part}_{name}": value for name, value in self.further.items()}


def perplexity(loss: float) -> float:
    """Return exp(min(20, loss)), as Megatron reports it."""
    return math.exp(min(_LARGEST_EXPONENT, loss))


class Evaluator:
    """Evaluation of the weights in training on the validation and test samples of a run.

    Attributes:
        history: Losses of the validations.
    """

    def __init__(
        self,
        state: TrainState,
        datasets: RunDatasets,
        plan: RunPlan,
        runtime: Runtime,
        exits: ExitConditions,
        history: ValidationHistory,
    ) -> None:
        """Evaluate nothing yet.

        Args:
            state: State of the run, with the model.
            datasets: Validation and test samples.
            plan: The run.
            runtime: Device and processes.
            exits: A signal ends an evaluation.
            history: Receives the loss of each validation.
        """
        self._state, self._datasets, self._plan = state, datasets, plan
        self._runtime, self._exits, self.history = runtime, exits, history

    def validate(self, step: int) -> Validation | None:
        """Return the loss of the validation samples for *step*; None after a signal.

        Each validation of a run continues after the samples of the previous validation.
        """
        training = self._plan.config.training
        number = -(-step // training.eval_interval) - 1
        count = training.eval_iters * self._plan.global_batch_size
        validation = self._evaluate(self._datasets.valid, number * count)
        if validation is None:
            return None
        sets = {}
        for name, named in self._datasets.sets.items():
            same = named.samples is self._datasets.valid
            found = validation if same else self._evaluate(named.samples, number * count)
            if found is None:
                return None
            sets[name] = found
        self.history.add(step, validation.loss, delta=training.early_stop_delta)
        return replace(validation, sets=sets)

    def test(self) -> Validation | None:
        """Return the loss of the test samples; None without test samples and after a signal."""
        return self._evaluate(self._datasets.test, 0)

    def _evaluate(self, samples: SampleSource | None, first_sample: int) -> Validation | None:
        if samples is None:
            return None
        with self._state.evaluation_weights():
            return validate(
                self._state.parallel,
                samples,
                self._plan,
                self._runtime,
                collation=self._datasets.collation,
                first_sample=first_sample,
                stop=lambda: self._exits.signalled,
            )


@torch.no_grad()
def validate(
    parallel: ParallelModel,
    dataset: SampleSource,
    plan: RunPlan,
    runtime: Runtime,
    *,
    first_sample: int,
    collation: Collation,
    stop: Callable[[], bool] = lambda: False,
) -> Validation | None:
    """Return the mean loss over `eval_iters` global batches, or None if *stop* returned True.

    It is the mean over their valid targets, as the loss of a step is; see `TokenMean`.

    All processes must call it; if *stop* returns True on one rank, all ranks stop.  The random
    state of training is restored afterwards.

    Args:
        parallel: The model, in training mode before and after.
        dataset: Validation samples.
        plan: The run, for batch size and `eval_iters`.
        runtime: Device and processes.
        first_sample: Position in *dataset* of the first sample.
        collation: Function that makes a micro-batch of samples.
        stop: Called before each batch; returns True to stop the validation.

    Raises:
        DataError: All targets are masked.
        NonFiniteError: The loss of a batch is NaN or infinite.
    """
    micro = plan.config.training.micro_batch_size
    wanted = plan.config.training.eval_iters * plan.global_batch_size
    data_rank, data_size = parallel.mesh.data_rank, plan.layout.data
    mean = TokenMean(plan, parallel.model.family, runtime.device.torch_device)
    parallel.model.eval()
    try:
        with (
            runtime.rng.preserved(),
            BatchLoader(
                dataset,
                micro_batch_size=micro,
                consumed_samples=first_sample,
                total_samples=first_sample + wanted,
                data_parallel_rank=data_rank,
                data_parallel_size=data_size,
                prefetch=plan.config.data.num_prefetch,
                collation=collation,
            ) as batches,
        ):
            found, ended = _losses(parallel, batches, mean, runtime, stop)
    finally:
        parallel.model.train()
    family = mean.family
    each, kinds = [sum(column) for column in zip(*found, strict=True)], len(family.losses)
    each = each or [0.0] * (kinds + len(family.accuracies))
    sums = all_reduce_scalars(runtime, *each, *map(float, mean.excluded))
    totals, excluded = sums[: len(each)], sums[len(each) :]
    if not all(map(math.isfinite, totals)):
        losses = [sum(one[:kinds]) for one in found]
        raise _non_finite(losses, first_sample + data_rank * micro, micro * data_size)
    if ended:
        return None
    ranks = runtime.rank.world_size
    if not mean.has_targets(excluded, ranks):
        last = first_sample + wanted - 1
        raise no_valid_target(f"the evaluation on samples {first_sample} to {last}")
    weights = [loss.weight for loss in family.losses]
    divisors = dict(zip(weights, mean.divisors(excluded, ranks), strict=True))
    means = [
        parallel.total_loss(total) / len(found) / (divisors[loss.weight] or math.nan)
        for total, loss in zip(totals, (*family.losses, *family.accuracies), strict=True)
    ]
    by_loss = {loss.key: value for loss, value in zip(family.losses, means, strict=False)}
    names = [loss.accuracy_key for loss in family.accuracies]
    return Validation(by_loss, wanted, dict(zip(names, means[kinds:], strict=True)))


def _losses(
    parallel: ParallelModel,
    batches: BatchLoader,
    mean: TokenMean,
    runtime: Runtime,
    stop: Callable[[], bool],
) -> tuple[list[list[float]], bool]:
    """Return the numbers of each micro-batch, and True if all ranks stopped before the last one."""
    found: list[list[float]] = []
    for batch in batches:
        # All ranks decide together before each batch: ranks that share a model would otherwise
        # wait for a rank that has stopped.
        bad = bool(found) and not all(map(math.isfinite, found[-1]))
        if all_reduce_scalars(runtime, float(bad or stop())) != [0.0]:
            return found, True
        with runtime.precision.context():
            loss = parallel.loss(**mean.batch(mean.count(batch)))
        runtime.device.step_boundary()
        found.append(loss.reshape(-1).tolist())
    return found, False


def _non_finite(losses: list[float], first: int, each: int) -> NonFiniteError:
    """Return the error, with the sample at fault if it is this rank's.

    Args:
        losses: Losses of this rank.
        first: Position of the first sample.
        each: Number of samples between two losses.
    """
    why = "the last steps moved the weights too far; they are not saved"
    if not losses or math.isfinite(losses[-1]):
        return NonFiniteError("the validation loss of another process is not finite", why=why)
    sample = first + (len(losses) - 1) * each
    what = f"the validation loss is {losses[-1]} at validation sample {sample}"
    return NonFiniteError(what, why=why, hint=HINT)


_TOKEN_LOSS = "lm_loss"
"""Name of the loss of predicted tokens, in every family."""
