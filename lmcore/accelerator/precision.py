"""`PrecisionPolicy`: what a run computes, keeps and reduces in, and the proof that it does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcore.errors import DeviceError

if TYPE_CHECKING:
    from lmcore.accelerator.device import Device

__all__ = ["PrecisionPolicy", "autocast_policy", "full_precision_policy"]


@dataclass(frozen=True)
class PrecisionPolicy:
    """How numbers are held during training; dtypes are torch's names ("bfloat16").

    Attributes:
        name: What `--precision` calls it.
        compute: Dtype of matrix products.
        keep: Dtype of parameters and optimizer state.
        reduce: Dtype in which gradients are summed.
        context: Returns the context in which a forward pass runs.
        verify: Runs a small case on the device; raises when the policy is not in force.
        loss_scaling: Whether gradients need a dynamic loss scale.
        priority: The device's highest is the default.
    """

    name: str
    compute: str
    keep: str
    reduce: str
    context: Callable[[], AbstractContextManager[Any]]
    verify: Callable[[], None]
    loss_scaling: bool = False
    priority: int = 0


def _verify_product(
    name: str, device: Device, context: Callable[[], AbstractContextManager[Any]], compute: str
) -> None:
    import torch

    weight = torch.ones(8, 8, device=device.torch_device)
    with context():
        found = torch.nn.functional.linear(weight, weight)
    if found.dtype != getattr(torch, compute):
        raise DeviceError(
            f"precision `{name}` is not in force on device `{device.type}`",
            why=f"a matrix product under it gave {found.dtype}, not torch.{compute}",
            hint="use `--precision fp32`, or mend the device's autocast support",
        )
    if not torch.allclose(found.float(), torch.full_like(found, 8.0, dtype=torch.float32)):
        raise DeviceError(
            f"precision `{name}` computes wrong products on device `{device.type}`",
            why=f"ones(8, 8) @ ones(8, 8) gave {found.flatten()[0].item()}, not 8",
        )


def full_precision_policy(device: Device, *, priority: int = 100) -> PrecisionPolicy:
    """Return `fp32`: everything in float32."""

    def verify() -> None:
        _verify_product("fp32", device, nullcontext, "float32")

    return PrecisionPolicy(
        "fp32", "float32", "float32", "float32", nullcontext, verify, priority=priority
    )


def autocast_policy(
    device: Device, *, name: str, compute: str, loss_scaling: bool = False, priority: int = 0
) -> PrecisionPolicy:
    """Return a policy that keeps and reduces in float32 and computes products by torch's autocast.

    Args:
        device: The device that runs it.
        name: What `--precision` calls it, such as "bf16".
        compute: torch's name of the dtype, such as "bfloat16".
        loss_scaling: Whether gradients would underflow without a loss scale.
        priority: The device's highest is the default.
    """

    def context() -> AbstractContextManager[Any]:
        import torch

        return torch.autocast(device.type, dtype=getattr(torch, compute))

    def verify() -> None:
        _verify_product(name, device, context, compute)

    return PrecisionPolicy(
        name, compute, "float32", "float32", context, verify, loss_scaling, priority
    )
