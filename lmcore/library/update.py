"""Backward passes and updates of a user's loop: loss scale, gradient accumulation, clipping."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lmcore.base.errors import ConfigError, RunError
from lmcore.library.forward import ForwardPrecision
from lmcore.library.losses import FiniteCheck, LossWeights
from lmcore.optim.clip import clip_as_torch, clip_by_norm
from lmcore.optim.loss_scale import loss_scale_of

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from lmcore.config.section import AcceleratorSection
    from lmcore.library.placement import ModelPlacement
    from lmcore.runtime.runtime import Runtime

__all__ = ["Updates"]

logger = logging.getLogger(__name__)


class Updates:
    """Gradient accumulation and loss scale of a session.

    Attributes:
        count: Number of updates of weights, by `step` or a prepared optimizer's own `step`.
        updated: True if the last `step` updated weights: it was the last micro-batch of an
            accumulation, and no gradient overflowed.
        loss_scale: Loss scale of the precision policy.
        finite: Check of losses and gradient norms.
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
        self._norm: Callable[[list[Tensor]], Tensor] = runtime.bind_for_weights("grad_norm")
        self._steps = 1  # micro-batches of an update
        self._done = 0  # micro-batches so far
        self._skipped = False  # True after an overflow
        self._last = True
        self._accumulating = False
        self._scale = self.loss_scale.value  # of the gradients
        self._complete = True  # False if the last `backward` was not that of a last micro-batch
        self._missing = 1.0  # micro-batches of the update / micro-batches until its data ended
        self._weights = LossWeights(runtime)
        self._backwards = 0
        self._in_block: list[Optimizer] = []  # optimizers that made a step in this `accumulate`
        self._stepping = False
        self._device = torch.empty(0, device=runtime.device.torch_device).device  # with its index
        self.finite = FiniteCheck(runtime.device)
        self._hooks: list[RemovableHandle] = []
        self._stepped: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._forward = ForwardPrecision(runtime.precision, warns=runtime.rank.rank == 0)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass, in which the precision policy is in force."""
        return self._forward.context()

    @contextlib.contextmanager
    def accumulate(self, steps: Any, *, last: bool = False) -> Iterator[None]:
        """Wrap one of *steps* micro-batches that make an update; see `Session.accumulate`.

        Args:
            steps: Number of micro-batches of an update.
            last: True to update after this micro-batch in any case.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigError(f"`accumulate({steps!r})`: expected a number of micro-batches, 1 up")
        if self._accumulating:
            raise ConfigError("`accumulate` within `accumulate`")
        self._accumulating = True
        self._in_block.clear()
        self._weights.begin_micro_batch()
        self._steps = steps
        self._done += 1
        self._last = last or self._done >= steps
        try:
            yield
        finally:
            self._accumulating = False
            self._weights.begin_micro_batch()
            if self._last:
                self._done = 0
            self._last, self._steps = True, 1

    def backward(self, loss: Any, weight: Any = None, **options: Any) -> None:
        """Compute gradients; at the end of an update average them; see `Session.backward`."""
        self._check_loss(loss)
        begins = not self._done or (self._accumulating and self._done == 1)
        loss = self._weights.apply(loss, weight, begins=begins)
        if not self._runtime.precision.loss_scaling:
            self.finite.check_loss(loss)
        self._forward.check()
        self._backwards += 1
        self._complete = self._last
        self._missing = self._steps / self._done if self._accumulating else 1.0
        if begins:
            self._scale = self.loss_scale.value  # fixed within an update, which adds gradients
        if self._steps > 1:
            loss = loss / self._steps
        if self._scale != 1.0:
            loss = loss * self._scale
        models = self._placement.models
        if models and self._last and self._runtime.processes is not None:
            self._runtime.processes.rendezvous.watch.begin_call("`backward`")
        if len(models) == 1:
            with models[0].accumulation(last=self._last):
                loss.backward(**options)
        else:
            with contextlib.ExitStack() as stack:
                for model in models:
                    stack.enter_context(model.accumulation(last=self._last))
                loss.backward(**options)
        if self._runtime.rank.world_size > 1 and not any(model.filled for model in models):
            raise ConfigError(
                "`backward` of a loss that depends on no prepared model",
                why="its gradients are not averaged, and the weights of the ranks would differ",
                hint="prepare the model by `rt.prepare(model)`; call `loss.backward()` if you "
                "average gradients yourself",
            )
        self._runtime.device.step_boundary()
        if self._last:
            self._weights.complete(self._steps)

    def _check_loss(self, loss: Any) -> None:
        """Refuse a loss that is no scalar of this device with a gradient."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(
                f"`backward` of {shape}",
                why="a loss is a tensor of one element",
                hint=_loss_hint(loss),
            )
        if not loss.requires_grad:
            raise ConfigError(
                "`backward` of a loss that depends on no trained parameter",
                hint="is the forward pass within `torch.no_grad`, or the loss detached?",
            )
        if loss.device != self._device:
            raise ConfigError(
                f"`backward` of a loss on {loss.device}",
                why=f"the session computes on {self._device}",
                hint="prepare the model by `rt.prepare(model)`, and take batches of `rt.loader`",
            )

    def step(self, optimizer: Optimizer, *, clip: Any = None) -> Tensor | None:
        """Update weights after the last micro-batch of an update; see `Session.step`.

        With a loss scale, an update whose gradients overflow is skipped, and the scale is lowered.
        """
        self._check_optimizer(optimizer)
        is_number = isinstance(clip, (int, float)) and not isinstance(clip, bool)
        if clip is not None and not (is_number and clip > 0):
            raise ConfigError(f"`step(clip={clip!r})`: expected a positive norm, or None")
        self.updated = False
        if self._accumulating:
            self._check_first(optimizer)
        else:
            self._weights.begin_micro_batch()
        if not self._last:
            return None
        gradients = self._gradients(optimizer)
        every = [tensor for tensors in gradients.values() for tensor in tensors]
        if not every and not _trains(optimizer):
            return None
        self._check_gradients(optimizer, every)
        self._forward.is_used = False
        factor = self._factor()
        norm = None
        if self._runtime.precision.loss_scaling:
            scale = self._scale / float(factor)
            norm = self._total_norm(gradients, every, scale)
            if not self._unscale(every, float(norm), clip or 0.0, scale):
                optimizer.zero_grad()
                return None
        else:
            if not isinstance(factor, float) or factor != 1.0:
                torch._foreach_mul_(every, factor)
            if clip is not None:
                norm = self._total_norm(gradients, every)
                self.finite.check_norm(norm, self.count + 1)
                clip_as_torch(every, norm, clip)
        self._stepping = True
        try:
            optimizer.step()
        finally:
            self._stepping = False
        self._runtime.device.step_boundary()
        optimizer.zero_grad()
        self.count += 1
        self.updated = True
        return None if clip is None else norm

    def _check_optimizer(self, optimizer: Any) -> None:
        """Refuse what is no optimizer, and one whose step computes the loss again."""
        if not hasattr(optimizer, "param_groups"):
            raise ConfigError(
                f"`step` of {type(optimizer).__name__}",
                why="it is not a `torch.optim.Optimizer`",
                hint="call `rt.step(optimizer)`",
            )
        if optimizer not in self._stepped and _needs_closure(optimizer):
            raise ConfigError(
                f"`step` of {type(optimizer).__name__}",
                why="its step calls a closure, which computes the loss again",
                hint="call its own step, `optimizer.step(closure)`, with `rt.backward(loss)` in "
                "the closure",
            )

    def _factor(self) -> float | Tensor:
        """Return the factor of complete gradients, for the mean over the losses of an update."""
        factor, total = self._weights.factor(), self._weights.total
        if factor is None or total is None:
            return self._missing
        waits = self._runtime.precision.loss_scaling  # for the norm, too
        self.finite.check_weight(total, self.count + 1, waits=waits)
        return factor

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
        is_scaled = self._runtime.precision.loss_scaling or self._steps > 1
        if self._stepped.get(optimizer, 0) == self._backwards and (is_scaled or not is_alone):
            raise ConfigError(
                "`step`: the gradients were not computed by `rt.backward`",
                why="their loss was not scaled" if is_alone else "they are this rank's alone",
                hint="call `rt.backward(loss)` instead of `loss.backward()`",
            )
        self._require_complete("step")
        is_new = optimizer not in self._stepped and not is_alone
        if is_new and not self._placement.has_parameters(optimizer):
            logger.warning(
                "`step`: %s has parameters of no prepared model; their gradients are not averaged "
                "over the ranks",
                name,
            )
        self._stepped[optimizer] = self._backwards

    def watch(self, objects: Sequence[Any]) -> None:
        """Count the steps that a loop makes by `step` of the optimizers among *objects*."""
        for each in objects:
            if isinstance(each, torch.optim.Optimizer):
                self._hooks.append(each.register_step_pre_hook(self._before_own_step))

    def end(self) -> None:
        """Leave the optimizers alone, which may be prepared by a later session."""
        for hook in self._hooks:
            hook.remove()

    def _before_own_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Refuse an optimizer's own step with scaled or incomplete gradients, and count others."""
        if self._stepping or self._backwards == self._stepped.get(optimizer, 0):
            return
        name = type(optimizer).__name__
        if self._scale != 1.0:
            raise ConfigError(
                f"`{name}.step()` with gradients that are multiplied by the loss scale",
                why="`rt.backward` multiplies the loss by it in this precision",
                hint="call `rt.step(optimizer)`, which divides them by it",
            )
        if self._weights.total is not None:
            raise ConfigError(
                f"`{name}.step()` with gradients of losses that have weights",
                why="they are not divided by the sum of the weights yet",
                hint="call `rt.step(optimizer)`, which divides them",
            )
        self._require_complete(f"{name}.step()")
        self._weights.begin_micro_batch()
        if self._missing != 1.0:
            gradients = self._gradients(optimizer).values()
            torch._foreach_mul_([each for tensors in gradients for each in tensors], self._missing)
        self._stepped[optimizer] = self._backwards
        self.count += 1
        self.updated = True

    def _require_complete(self, call: str) -> None:
        """Raise unless the last `backward` completed the gradients of an update."""
        if not self._complete:
            raise ConfigError(
                f"`{call}` before the gradients of an update are complete",
                why="the last `rt.backward` was not in the last micro-batch of `rt.accumulate`",
                hint="call `rt.backward(loss)` and `rt.step(optimizer)` in the block of each "
                "micro-batch: `rt.step` updates after the last one only",
            )

    def _check_first(self, optimizer: Optimizer) -> None:
        """Refuse a second step of an optimizer in one micro-batch."""
        if any(other is optimizer for other in self._in_block):
            raise ConfigError(
                "a second `step` within one `accumulate`",
                why="the block is one micro-batch of an update",
                hint="open one for each micro-batch, in the loop: `with rt.accumulate(4):`",
            )
        self._in_block.append(optimizer)

    def _unscale(self, gradients: list[Tensor], norm: float, clip: float, scale: float) -> bool:
        """Divide gradients by *scale* and clip them; return False if they overflow."""
        finite = math.isfinite(norm)
        if not self.loss_scale.update(overflow=not finite):
            raise RunError(
                "gradients overflow, and the loss scale cannot be lowered",
                why=self.loss_scale.limit,
                hint='use `precision="bf16"`, or a lower learning rate',
            )
        if finite:
            clip_by_norm(gradients, norm, clip, loss_scale=scale)
        elif not self._skipped:
            self._skipped = True
            logger.info(
                "update %d is skipped, as its gradients overflow: the loss scale is now %g; later "
                "skips are not logged",
                self.count + 1,
                self.loss_scale.value,
            )
        return finite

    def _gradients(self, optimizer: Optimizer) -> dict[int, list[Tensor]]:
        """Return the local gradients of an optimizer by the number of ranks that hold the same.

        Complex gradients are viewed as real ones, which have the same norm.
        """
        from lmcore.parallel.tensor_layout import local_part

        found: dict[int, list[Tensor]] = {1: []}
        sharded, whole = found[1], found.setdefault(self._runtime.rank.world_size, [])
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (grad := parameter.grad) is not None:
                    if grad.is_conj():  # a view that is not of real numbers
                        parameter.grad = grad = grad.resolve_conj()
                    local = local_part(grad)
                    tensors = whole if local is grad else sharded
                    tensors.append(torch.view_as_real(local) if local.is_complex() else local)
        return found

    def _total_norm(
        self, gradients: dict[int, list[Tensor]], every: list[Tensor], scale: float = 1.0
    ) -> Tensor:
        """Return the norm over whole gradients, divided by *scale*; a scalar on the device."""
        if self._placement.mesh.layout.zero_stage:
            from lmcore.parallel.data_parallel import squared_norm
            from lmcore.parallel.scalar_collectives import all_reduce_scalars_on_device

            square = squared_norm(self._norm, gradients, scale=scale)
            return all_reduce_scalars_on_device(self._runtime, square)[0].sqrt()
        norm = self._norm(every)
        return norm if scale == 1.0 else norm / scale


def _loss_hint(found: Any) -> str:
    """Return what to give to `backward` instead of *found*, which is no loss."""
    if isinstance(found, Tensor):
        return "take its mean: `loss.mean()`"
    if isinstance(found, Mapping) and "loss" in found:
        by_attribute = hasattr(found, "loss")
        return "give its loss: " + ("`output.loss`" if by_attribute else '`output["loss"]`')
    if isinstance(getattr(found, "loss", None), Tensor):
        return "give its loss: `output.loss`"
    if isinstance(found, (int, float)):
        return "give the tensor that the model computed, without `.item()`"
    return "give the tensor that the loss function returned"


def _needs_closure(optimizer: Optimizer) -> bool:
    """Return True if the `step` of an optimizer has to be given a closure."""
    try:
        wanted = inspect.signature(optimizer.step).parameters.get("closure")
    except (TypeError, ValueError):  # not readable: torch says so if one is needed
        return False
    return wanted is not None and wanted.default is inspect.Parameter.empty


def _trains(optimizer: Optimizer) -> bool:
    """Return True if any parameter of an optimizer requires a gradient."""
    return any(each.requires_grad for group in optimizer.param_groups for each in group["params"])
