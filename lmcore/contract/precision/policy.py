"""`PrecisionPolicy`: the dtypes of computation, weights and reductions.

`lmcore.contract.precision.check` verifies that a policy is in force.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import PluginError

if TYPE_CHECKING:
    from torch import nn

    from lmcore.contract.device import Device

__all__ = [
    "PrecisionPolicy",
    "autocast_policy",
    "double_precision_policy",
    "full_precision_policy",
    "standard_precision_policies",
]

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class PrecisionPolicy:
    """Dtypes of the numbers in training; dtypes are torch's names ("bfloat16").

    `context` and `prepare` bring these dtypes about, and are checked: by `verify` at the start of
    every run, by `verify_model` on the built model and by `check_products` on its layers.

    Attributes:
        name: value of `--precision`.
        compute: Dtype of the factors of matrix products.
        keep: Dtype of parameters and optimizer state.
        reduce: Dtype in which gradients are summed.
        context: Returns the context in which a forward pass runs.
        prepare: Called once with the built model, to exchange modules or change parameters in
            place; names, shapes and values of the parameters stay.  None: nothing to do.
        check: raises if something specific to the policy is not applied; None: nothing.
        output: dtype of the results of products, if it is not `compute` (scaled 8-bit formats).
        loss_scaling: True if gradients need a dynamic loss scale.
        summary: the method, for messages: "autocast".
        priority: The device's highest is the default.
        available: Returns None, or the reason why it cannot be used here.
        plugin: Name of the plugin, "lmcore" for the core's own; filled in by the core.
    """

    name: str
    compute: str
    keep: str
    reduce: str
    context: Callable[[], AbstractContextManager[Any]]
    prepare: Callable[[nn.Module], None] | None = None
    check: Callable[[], None] | None = None
    output: str = ""
    loss_scaling: bool = False
    summary: str = ""
    priority: int = 0
    available: Callable[[], str | None] = lambda: None
    plugin: str = ""

    @property
    def activations(self) -> str:
        """Dtype of the results of products."""
        return self.output or self.compute

    @property
    def words(self) -> str:
        """The policy in words, for messages."""
        suffix = f" ({self.summary})" if self.summary else ""
        if {self.compute, self.keep, self.reduce, self.activations} == {self.compute}:
            return f"{self.name}: everything in {self.compute}{suffix}"
        out = f" to {self.output}" if self.output else ""
        scale = ", dynamic loss scale" if self.loss_scaling else ""
        return (
            f"{self.name}: products in {self.compute}{out}{suffix}, weights in {self.keep}, "
            f"gradients summed in {self.reduce}{scale}"
        )

    def describe(self) -> dict[str, Any]:
        """Return the policy as JSON values."""
        return {
            "name": self.name,
            "compute": self.compute,
            "output": self.activations,
            "keep": self.keep,
            "reduce": self.reduce,
            "loss_scaling": self.loss_scaling,
            "prepares_model": self.prepare is not None,
            "words": self.words,
            "plugin": self.plugin,
        }

    def verify(self, device: Device) -> None:
        """Prove on small layers that it is in force in forward and backward, and computes right.

        The layers are projections with and without bias, and attention between them.  The states of
        the random number generators are restored.

        Raises:
            DeviceError: Products, weights or gradients have another dtype, or wrong numbers.
        """
        from lmcore.contract.precision.check import check_device

        with device.rng_tracker().preserved():
            check_device(self, device)
            if self.check is not None:
                self.check()

    def apply(self, model: nn.Module) -> None:
        """Prepare a built model and prove that it is as promised.

        Raises:
            PluginError: `prepare` lost, renamed or reshaped a parameter.
            DeviceError: A parameter is not of the dtype that is kept, or a projection does not
                give the dtype that is computed in.
        """
        if self.prepare is not None:
            before, state = _shapes(model), self._state(model)
            self.prepare(model)
            after = _shapes(model)
            if state and state == self._state(model):
                logger.warning(
                    "precision `%s`: its `prepare` changed nothing: it found no module and no "
                    "weight of this model to change",
                    self.name,
                )
            if before != after:
                odd = sorted({name for name, _ in before.items() ^ after.items()})
                raise PluginError(
                    f"precision `{self.name}` changed parameters of the model: "
                    f"{', '.join(f'`{name}`' for name in odd[:4])}",
                    why="checkpoints and the optimizer identify parameters by name and shape",
                    hint="report this to the authors of the plugin that offers it",
                )
        self.verify_model(model)

    def _state(self, model: nn.Module) -> list[tuple[object, ...]]:
        """Return what `prepare` may change; nothing if the weights are right as they are."""
        from lmcore.contract.precision.check import model_state, weight_dtypes

        if self.compute == self.keep and weight_dtypes(model) == {self.keep}:
            return []
        return model_state(model)

    def verify_model(self, model: nn.Module) -> None:
        """Prove that a prepared model is kept and computed in as promised (see `apply`)."""
        from lmcore.contract.precision.check import check_model

        check_model(self, model)


def full_precision_policy(*, priority: int = 100) -> PrecisionPolicy:
    """Return `fp32`: everything in float32."""
    names = ("fp32", "float32", "float32", "float32")
    return PrecisionPolicy(*names, nullcontext, priority=priority)


def double_precision_policy(*, priority: int = -100) -> PrecisionPolicy:
    """Return `fp64`: everything in float64, the measure of what another precision loses."""

    def prepare(model: nn.Module) -> None:
        model.double()

    names = ("fp64", "float64", "float64", "float64")
    return PrecisionPolicy(*names, nullcontext, prepare=prepare, priority=priority)


def standard_precision_policies(
    device: Device, *, default: str | None = None
) -> list[PrecisionPolicy]:
    """Return the core's policies: `fp32`, `fp64`, and `bf16` and `fp16` by autocast.

    The core refuses one whose dtype is not among `Device.dtypes`, with that as the reason.

    Args:
        device: Device that trains.
        default: Name of the policy for runs that name none, if the device computes in its dtype;
            None: `fp32`.
    """
    policies = [
        full_precision_policy(),
        autocast_policy(device, name="bf16", compute="bfloat16"),
        autocast_policy(device, name="fp16", compute="float16", loss_scaling=True),
        double_precision_policy(),
    ]
    return [
        dataclasses.replace(policy, priority=200) if policy.name == default else policy
        for policy in policies
    ]


def autocast_policy(
    device: Device, *, name: str, compute: str, loss_scaling: bool = False, priority: int = 0
) -> PrecisionPolicy:
    """Return a policy that keeps and reduces in float32 and computes products by torch's autocast.

    Args:
        device: The device that runs it.
        name: value of `--precision`, such as "bf16".
        compute: torch's name of the dtype, such as "bfloat16".
        loss_scaling: True if gradients would underflow without a loss scale.
        priority: The device's highest is the default.
    """

    def context() -> AbstractContextManager[Any]:
        import torch

        return torch.autocast(device.type, dtype=getattr(torch, compute))

    return PrecisionPolicy(
        *(name, compute, "float32", "float32", context),
        loss_scaling=loss_scaling,
        summary="autocast",
        priority=priority,
    )


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
