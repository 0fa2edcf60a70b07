"""Replacement of projections, if the user asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lmcore.library.module_kernels.choice import (
    Choice,
    differs,
    group,
    not_comparable,
    own_function,
)
from lmcore.library.module_kernels.feed_forward import is_transposed_linear
from lmcore.library.module_kernels.report import KernelReport
from lmcore.library.op_calls import OpCalls

__all__ = ["replace_linears"]


def replace_linears(
    modules: Sequence[nn.Module], calls: OpCalls, report: KernelReport, *, wanted: bool
) -> None:
    """Replace the forward pass of `nn.Linear`; report other projections as kept.

    Args:
        modules: The modules of a model.
        calls: Ops of the session.
        report: The report.
        wanted: False to report why they are kept.
    """
    transposed = [module for module in modules if is_transposed_linear(module)]
    if transposed:
        reason = "weights are stored [inputs, outputs], and the op takes [outputs, inputs]"
        report.add_kept(type(transposed[0]).__name__, len(transposed), reason)
    found = [module for module in modules if type(module).forward is nn.Linear.forward]
    if found and not wanted:
        reason = "whether a kernel is faster depends on the host: measure it with `linear=True`"
        report.add_kept("Linear", len(found), reason)
        return
    for alike in group(found):
        _replace(alike, calls, report)


def _replace(modules: list[nn.Module], calls: OpCalls, report: KernelReport) -> None:
    first, count = modules[0], len(modules)
    assert isinstance(first, nn.Linear)
    weight = first.weight
    choice = Choice(
        calls,
        "linear",
        weight.dtype,
        own=own_function("linear"),
        in_features=weight.shape[1],
        out_features=weight.shape[0],
        bias=first.bias is not None,
    )
    part = f"{type(first).__name__} {weight.shape[1]} -> {weight.shape[0]}"
    reason = choice.reason or not_comparable(weight)
    if reason is None:
        x = torch.randn(64, weight.shape[1], generator=torch.Generator().manual_seed(3)).to(weight)
        reason = differs(
            choice.spec,
            lambda x_TI: nn.Linear.forward(first, x_TI),
            lambda x_TI: choice.call(x_TI, first.weight, first.bias),
            x,
        )
    if reason is not None:
        report.add_kept(part, count, reason)
        return
    for module in modules:
        report.changes.set_forward(module, _linear(choice))
    report.add_replaced(part, count, choice.resolution)


def _linear(choice: Choice) -> Callable[..., Any]:
    call, takes = choice.call, choice.takes

    def forward(self: Any, x_BSI: Tensor) -> Any:
        weight = self.weight
        if takes(x_BSI, weight):
            return call(x_BSI, weight, self.bias)
        return nn.Linear.forward(self, x_BSI)

    return forward
