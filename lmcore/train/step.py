"""One optimizer step: forward and backward of each micro-batch, clipping, update.

Loss is the mean over micro-batches of each one's mean over its counted tokens, as Megatron
reports it.  Nothing is updated when loss or gradient norm is not finite: the step is skipped where
the precision has a loss scale that can still give way, else it is an error.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmcore.accelerator.op import OpContext
from lmcore.errors import RunError
from lmcore.optim.clip import clip_by_norm
from lmcore.parallel.world import sum_of_all
from lmcore.train.curvature import curvature_is_due, estimate_curvature

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.data.loader import Batch
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.state import TrainState

__all__ = ["HINT", "NotFiniteError", "StepResult", "TrainStep", "check_weights", "mean_loss"]

HINT = "lower `--lr`, lengthen the warm-up or set `--clip-grad`; continue from the last save"
"""What to do where numbers are not finite."""


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


class NotFiniteError(RunError):
    """Loss or gradients became NaN or infinite; the weights are those of the step before."""


def loss_arguments(
    batch: Batch, device: torch.device, *, share: float = 1.0
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return what `GPT.loss` takes, by place and by name.

    It then is *share* times the mean loss over the batch's counted tokens.

    Args:
        batch: Tokens, targets and their weights, on the host.
        device: Where to compute.
        share: Factor, such as 1 / number of micro-batches.
    """
    mask_BS = batch.loss_mask_BS
    weight_BS = mask_BS * (share / mask_BS.sum().clamp(min=1.0))
    of_documents = {
        name: tensor.to(device, non_blocking=True)
        for name, tensor in (
            ("positions_BS", batch.positions_BS),
            ("documents_BS", batch.documents_BS),
        )
        if tensor is not None
    }
    plain = (batch.tokens_BS, batch.targets_BS, weight_BS)
    return tuple(tensor.to(device, non_blocking=True) for tensor in plain), of_documents


def mean_loss(loss: Callable[..., Tensor], batch: Batch, device: torch.device) -> Tensor:
    """Return the mean loss over a batch's counted tokens.

    Args:
        loss: `GPT.loss` of a model on *device*, or another that takes its arguments.
        batch: See `loss_arguments`.
        device: See there.
    """
    arguments, options = loss_arguments(batch, device)
    return loss(*arguments, **options)


def check_weights(state: TrainState) -> None:
    """Refuse weights that an update has made NaN or infinite, before they are saved.

    Raises:
        NotFiniteError: Names some of them.
    """
    bad = _not_finite_weights(state)
    if bad:
        raise NotFiniteError(
            f"weights are not finite after step {state.iteration}: {_some(bad)}",
            why="the last update moved them too far; they are not saved",
            hint=HINT,
        )


class TrainStep:
    """The step of a run; its kernels are bound when it is made."""

    def __init__(self, plan: RunPlan, runtime: Runtime) -> None:
        """Bind the gradient norm, and keep what every step needs."""
        self.batch_sizes = plan.batch_sizes
        self.samples_at_once = plan.global_batch_size // plan.num_micro_batches
        self.seq_length = plan.config.model.seq_length
        self.clip = plan.config.optimizer.clip_grad
        self.device = runtime.device.torch_device
        self.context = runtime.precision.context
        self.runtime = runtime
        self.norm: Callable[[list[Tensor]], Tensor] = runtime.ops.bind(
            "grad_norm", OpContext(runtime.device.type, runtime.precision.keep)
        )

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
            NotFiniteError: Loss or gradient norm is NaN or infinite, and no loss scale can give
                way; nothing was updated.
        """
        parallel, scale = state.parallel, state.loss_scale.value
        samples = self.batch_sizes.at(state.consumed_samples)
        count = samples // self.samples_at_once
        if curvature_is_due(state):
            first = next(batches)
            arguments_of_one = loss_arguments(first, self.device, share=scale)
            estimate_curvature(state, arguments_of_one, self.context, self.norm, self.runtime)
            batches = itertools.chain([first], batches)
        parallel.zero_grad()
        arguments = (
            loss_arguments(next(batches), self.device, share=scale / count) for _ in range(count)
        )
        losses = parallel.run(arguments, count, self.context)
        gradients = parallel.gradients()
        own, share = sum(losses) / scale, parallel.square(self.norm, scale=scale)
        # One process's overflow is every one's: all skip, and all scales stay equal.
        total, square, *asked = sum_of_all(self.runtime, own, share, *requests())
        loss, norm = parallel.total_loss(total), math.sqrt(square) if square >= 0 else math.nan
        skipped = not (math.isfinite(loss) and math.isfinite(norm))
        if not state.loss_scale.update(overflow=skipped):
            raise _not_finite(state, [float(x) for x in losses], loss, norm, samples)
        if skipped:
            state.skipped_iterations += 1
        else:
            state.scheduled_samples += samples
            clip_by_norm(gradients, norm, self.clip, loss_scale=scale)
        rate = state.schedule(state.scheduled_samples)
        if not skipped:
            state.optimizer.step(rate)
        state.iteration += 1
        state.consumed_samples += samples
        state.consumed_tokens += samples * self.seq_length
        return StepResult(
            loss,
            None if skipped else norm,
            rate,
            samples,
            loss_scale=state.loss_scale.value,
            requests=tuple(asked),
        )


def _not_finite(
    state: TrainState, losses: list[float], loss: float, norm: float, samples: int
) -> NotFiniteError:
    first = state.consumed_samples
    where = f"step {state.iteration + 1}, samples {first} to {first + samples - 1}"
    bad_losses = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
    if bad_losses:
        what = f"the loss is {losses[bad_losses[0]]} at {where}"
        why = f"micro-batch {bad_losses[0] + 1} of {len(losses)} is the first such"
    elif not math.isfinite(loss):
        what = f"the loss is {loss} at {where}"
        why = "that of another process is not finite, this one's is"
    else:
        what = f"the gradient norm is {norm} at {where}"
        why = "the loss is finite, its gradients are not"
    bad = [
        name
        for name, parameter in state.parallel.named_parameters()
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
    ]
    weights = _not_finite_weights(state)
    if not bad and math.isfinite(loss):
        what = f"the gradient norm of another process is not finite at {where}"
        why = "this one's is"
    if weights:
        why += f"; weights that are not finite: {_some(weights)}"
    elif bad:
        why += f"; gradients that are not finite: {_some(bad)}"
    if state.loss_scale.limit:
        why += f"; {state.loss_scale.limit}"
    return NotFiniteError(what, why=f"{why}; nothing was updated in this step", hint=HINT)


def _not_finite_weights(state: TrainState) -> list[str]:
    named = state.parallel.named_parameters()
    return [name for name, weight in named if not bool(torch.isfinite(weight).all())]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(f"`{name}`" for name in names[:4]) + more
