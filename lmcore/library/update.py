"""Backward passes and updates of a user's loop: loss scale, gradient accumulation, clipping."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lmcore.accelerator.op.records import OpContext
from lmcore.errors import ConfigError, RunError
from lmcore.library.forward_precision import ForwardPrecision
from lmcore.optim.clip import clip_as_torch, clip_by_norm
from lmcore.optim.loss_scale import loss_scale_of
from lmcore.parallel.tensor_layout import local_part

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from lmcore.config.section import AcceleratorSection
    from lmcore.library.placement import ModelPlacement
    from lmcore.runtime.runtime import Runtime

__all__ = ["Updates"]

logger = logging.getLogger(__name__)


class Updates:
    """Gradient accumulation and loss scale of a session.

    Attributes:
        count: Number of updates of weights.
        updated: True if the last `step` updated weights: it was the last micro-batch of an
            accumulation, and no gradient overflowed.
        loss_scale: Loss scale of the precision policy.
    """

    def __init__(
        self, runtime: Runtime, placement: ModelPlacement, section: AcceleratorSection
    ) -> None:
        """Bind the kernel of the gradient norm.

        Args:
            runtime: Device, kernels and precision.
            placement: Prepared models.
            section: Options of the loss scale.
        """
        self.count = 0
        self.updated = False
        self.loss_scale = loss_scale_of(section, runtime.precision)
        self._runtime, self._placement = runtime, placement
        self._norm: Callable[[list[Tensor]], Tensor] = runtime.ops.bind(
            "grad_norm", OpContext(runtime.device.type, runtime.precision.keep)
        )
        self._steps = 1  # micro-batches of an update
        self._done = 0  # micro-batches so far
        self._last = True
        self._accumulating = False
        self._backwards = 0
        self._stepped: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._forward = ForwardPrecision(runtime.precision, warns=runtime.rank.rank == 0)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass, in which the precision policy is in force."""
        return self._forward.context()

    @contextlib.contextmanager
    def accumulate(self, steps: Any, *, last: bool = False) -> Iterator[None]:
        """Wrap one of *steps* micro-batches that make an update.

        Args:
            steps: Number of micro-batches of an update.
            last: True to update after this micro-batch in any case.

        Raises:
            ConfigError: The number is no positive integer, or contexts are nested.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigError(f"`accumulate({steps!r})`: expected a number of micro-batches, 1 up")
        if self._accumulating:
            raise ConfigError("`accumulate` within `accumulate`")
        self._accumulating = True
        self._steps = steps
        self._done += 1
        self._last = last or self._done >= steps
        try:
            yield
        finally:
            self._accumulating = False
            if self._last:
                self._done = 0
            self._last, self._steps = True, 1

    def backward(self, loss: Any, **options: Any) -> None:
        """Compute gradients; after the last micro-batch of an update average them over all ranks.

        Args:
            loss: Scalar loss of this rank's micro-batch.
            options: Options of `torch.Tensor.backward`.

        Raises:
            ConfigError: The loss is no scalar tensor, or depends on no parameter.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(
                f"`backward` of {shape}",
                why="a loss is a tensor of one element",
                hint="take its mean: `loss.mean()`",
            )
        if not loss.requires_grad:
            raise ConfigError(
                "`backward` of a loss that depends on no trained parameter",
                hint="is the forward pass within `torch.no_grad`, or the loss detached?",
            )
        self._forward.check()
        self._backwards += 1
        if self._steps > 1:
            loss = loss / self._steps
        if self.loss_scale.value != 1.0:
            loss = loss * self.loss_scale.value
        models = self._placement.models
        if models and self._last and self._runtime.processes is not None:
            self._runtime.processes.rendezvous.watch.begin_call("`backward`")
        if len(models) == 1:
            with models[0].backward(last=self._last):
                loss.backward(**options)
            return
        with contextlib.ExitStack() as stack:
            for model in models:
                stack.enter_context(model.backward(last=self._last))
            loss.backward(**options)

    def step(self, optimizer: Optimizer, *, clip: Any = None) -> Tensor | None:
        """Update weights after the last micro-batch of an update, and drop the gradients.

        All ranks must call it.  With a loss scale, an update whose gradients overflow is skipped,
        and the scale is lowered.

        Args:
            optimizer: Optimizer of prepared models, or of any parameters.
            clip: Largest norm of all its gradients; None: they are not clipped.

        Returns:
            Norm of the gradients before clipping, a scalar on the device, if *clip* is given and
            weights were updated; else None.

        Raises:
            ConfigError: *clip* is not positive, or there are no gradients of `backward`.
            RunError: Gradients overflow at the smallest loss scale.
        """
        is_number = isinstance(clip, (int, float)) and not isinstance(clip, bool)
        if clip is not None and not (is_number and clip > 0):
            raise ConfigError(f"`step(clip={clip!r})`: expected a positive norm, or None")
        self.updated = False
        if not self._last:
            return None
        norm = None
        gradients = self._gradients(optimizer)
        self._check_gradients(optimizer, gradients)
        self._forward.is_used = False
        if self._runtime.precision.loss_scaling:
            norm = self._unscale(optimizer, gradients, clip or 0.0)
            if norm is None:
                optimizer.zero_grad()
                return None
            norm = norm if clip is not None else None
        else:
            if self._steps > 1 and self._done < self._steps:  # the data ended before
                torch._foreach_mul_(gradients, self._steps / self._done)
            if clip is not None:
                norm = self._total_norm(optimizer, gradients)
                clip_as_torch(gradients, norm, clip)
        optimizer.step()
        optimizer.zero_grad()
        self.count += 1
        self.updated = True
        return norm

    def _check_gradients(self, optimizer: Optimizer, gradients: list[Tensor]) -> None:
        """Raise unless there are gradients, and `backward` computed them."""
        name = type(optimizer).__name__
        if not gradients:
            raise ConfigError(
                f"`step`: no parameter of {name} has a gradient",
                why="`backward` was not called since its last step, or its parameters are not the "
                "model's: it was made from a copy, or before they were moved or sharded",
                hint="make the optimizer from `model.parameters()`, and prepare both together",
            )
        is_alone = self._runtime.rank.world_size == 1
        if is_alone and not self._runtime.precision.loss_scaling:
            return
        if self._stepped.get(optimizer, 0) == self._backwards:
            raise ConfigError(
                "`step`: the gradients were not computed by `rt.backward`",
                why="their loss was not scaled" if is_alone else "they are this rank's alone",
                hint="call `rt.backward(loss)` instead of `loss.backward()`",
            )
        if optimizer not in self._stepped and not self._placement.has_parameters(optimizer):
            logger.warning(
                "`step`: %s has parameters of no prepared model; their gradients are not averaged "
                "over the ranks",
                name,
            )
        self._stepped[optimizer] = self._backwards

    def _unscale(self, optimizer: Optimizer, gradients: list[Tensor], clip: float) -> Tensor | None:
        """Divide gradients by the loss scale and clip them; return None if they overflow."""
        scale = self.loss_scale.value
        if self._steps > 1 and self._done < self._steps:
            scale *= self._done / self._steps
        norm = self._total_norm(optimizer, gradients) / scale
        value = float(norm)
        if not self.loss_scale.update(overflow=not math.isfinite(value)):
            raise RunError(
                "gradients overflow, and the loss scale cannot be lowered",
                why=self.loss_scale.limit,
                hint='use `precision="bf16"`, or a lower learning rate',
            )
        if not math.isfinite(value):
            return None
        clip_by_norm(gradients, value, clip, loss_scale=scale)
        return norm

    def _gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the local gradients of an optimizer."""
        return [
            local_part(parameter.grad)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]

    def _total_norm(self, optimizer: Optimizer, gradients: list[Tensor]) -> Tensor:
        """Return the norm over whole gradients, a scalar on the device."""
        device = self._runtime.device.torch_device
        total = self._norm(gradients) if gradients else torch.zeros((), device=device)
        if self._placement.mesh.layout.zero_stage:
            from torch import distributed

            sharded = self._sharded(optimizer)
            parts = [self._norm(part).square() if part else total.new_zeros(()) for part in sharded]
            distributed.all_reduce(parts[0])
            total = (parts[0] + parts[1]).sqrt()
        return total

    def _sharded(self, optimizer: Optimizer) -> tuple[list[Tensor], list[Tensor]]:
        """Return the local gradients of sharded parameters, and other ones."""
        sharded, whole = list[Tensor](), list[Tensor]()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    local = local_part(parameter.grad)
                    (whole if local is parameter.grad else sharded).append(local)
        return sharded, whole
