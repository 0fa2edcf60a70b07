"""Kernels of the device in the modules of a model that is not lmcore's own, and its optimizer."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from lmcore.base.errors import ConfigError, LmcoreError
from lmcore.library.module_kernels.attention import replace_attention, replace_rotary
from lmcore.library.module_kernels.choice import group
from lmcore.library.module_kernels.feed_forward import replace_feed_forwards
from lmcore.library.module_kernels.layers import replace_linears, replace_norms
from lmcore.library.module_kernels.optimizer import is_changed, replace_update
from lmcore.library.module_kernels.report import KernelReport
from lmcore.library.module_kernels.vocabulary_loss import replace_loss
from lmcore.library.op_calls import OpCalls

if TYPE_CHECKING:
    from lmcore.runtime.runtime import Runtime

__all__ = ["KernelReport", "use_kernels"]


def use_kernels(
    model: nn.Module,
    runtime: Runtime,
    optimizer: Optimizer | None = None,
    *,
    fused_loss: bool = True,
    linear: bool = False,
) -> KernelReport:
    """Run the kernels of the device in the modules of *model*, and report which.

    Replaced are, if the device has a kernel that torch's own function is not: RMS norms, layer
    norms, feed-forward layers with GELU or SwiGLU, and of a model of `transformers` attention,
    rotary position embedding, and the loss of the vocabulary head.  Modules are found by what they
    compute, which is compared on random numbers.  Parameters, their names and `state_dict` stay.

    With the fused loss the logits of a forward pass with labels are computed when they are first
    read; they must be read before the weights change.

    For arguments and errors see `Session.use_kernels`.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"`use_kernels`: `{type(model).__name__}` is no `torch.nn.Module`")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise LmcoreError(
            f"`use_kernels(model, optimizer)`: `{type(optimizer).__name__}` is no `Optimizer`",
            hint="give `fused_loss=` and `linear=` by name",
        )
    if optimizer is not None and is_changed(optimizer):
        raise LmcoreError(
            "the kernels are in this optimizer already",
            hint="call `undo()` of the report of the first call before",
        )
    if any(_is_changed(module) for module in model.modules()):
        raise LmcoreError(
            "the kernels are in this model already",
            hint="call `undo()` of the report of the first call before",
        )
    places = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    if places and runtime.device.type not in places:
        raise LmcoreError(
            f"the model is on {', '.join(sorted(places))}, and the device of the session is "
            f"{runtime.device.type}",
            why="modules are compared with kernels on the device",
            hint="move all of it to the host or the device first",
        )
    calls, report = OpCalls(runtime), KernelReport()
    modules = [module for module in model.modules() if "forward" not in vars(module)]
    for alike in group(module for module in model.modules() if "forward" in vars(module)):
        reason = "its forward pass is replaced by other code"
        report.add_kept(type(alike[0]).__name__, len(alike), reason)
    try:
        replace_feed_forwards(modules, calls, report)
        replace_norms(modules, calls, report)
        replace_rotary(model, modules, calls, report)
        replace_attention(model, modules, calls, report)
        replace_linears(modules, calls, report, wanted=linear)
        replace_loss(modules, calls, report, wanted=fused_loss)
        if optimizer is not None:
            replace_update(optimizer, calls, report)
    except BaseException:
        report.undo()
        raise
    return report


def _is_changed(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    home = getattr(getattr(forward, "__func__", None), "__module__", "")
    return isinstance(forward, MethodType) and home.startswith(__package__ or "lmcore")
