"""Replacement of norms, found by what they compute, and of projections, if the user asks for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

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

__all__ = ["replace_norms"]

_SCALES = (1.0, 1e-2, 1e-3)
"""Sizes of the random rows: the small ones show the epsilon."""


def replace_norms(modules: Sequence[nn.Module], calls: OpCalls, report: KernelReport) -> None:
    """Replace the forward pass of norms that the device has a better kernel for."""
    found = [module for module in modules if _op_of(module) is not None]
    for alike in group(found):
        first, count = alike[0], len(alike)
        part, op, epsilon = type(first).__name__, _op_of(first), _epsilon(first)
        assert op is not None
        assert epsilon is not None
        weight: Tensor = first.weight  # type: ignore[assignment]
        own = own_function(op) if isinstance(first, nn.LayerNorm | nn.RMSNorm) else None
        choice = Choice(calls, op, weight.dtype, own=own, hidden_size=weight.shape[0])
        reason = choice.reason or not_comparable(weight) or _difference(first, choice, epsilon)
        if reason is not None:
            report.add_kept(part, count, reason)
            continue
        forward = _layer_norm if op == "layer_norm" else _rms_norm
        for module in alike:
            report.changes.set_forward(module, forward(choice, epsilon, type(module).forward))
        report.add_replaced(part, count, choice.resolution)


def _op_of(module: nn.Module) -> str | None:
    """Return the op that a module may be: a leaf with a gain, and an offset for a layer norm."""
    if next(module.children(), None) is not None or next(module.buffers(), None) is not None:
        return None
    parameters = dict(module.named_parameters(recurse=False))
    if any(parameter.dim() != 1 for parameter in parameters.values()):
        return None
    if _epsilon(module) is None:
        return None
    return {frozenset({"weight"}): "rms_norm", frozenset({"weight", "bias"}): "layer_norm"}.get(
        frozenset(parameters)
    )


def _epsilon(module: nn.Module) -> float | None:
    """Return the only small positive number among the module's settings; None if there is none."""
    if isinstance(module, nn.RMSNorm) and module.eps is None:
        return float(torch.finfo(module.weight.dtype).eps)
    numbers = [value for value in vars(module).values() if isinstance(value, float)]
    small = [number for number in numbers if 0 < number < 0.1]
    return small[0] if len(small) == 1 else None


def _difference(module: nn.Module, choice: Choice, epsilon: float) -> str | None:
    """Return why the op is not what the module computes, with random gains; None if it is."""
    names = [name for name, _ in module.named_parameters()]
    weight: Tensor = module.weight  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(1)
    width = weight.shape[0]
    numbers = [torch.randn(width, generator=generator).to(weight) for _ in names]
    rows = torch.tensor(_SCALES).view(-1, 1, 1) * torch.randn(3, 2, width, generator=generator)
    x = rows.to(weight)

    def own(x_BSH: Tensor) -> Any:
        return functional_call(module, dict(zip(names, numbers, strict=True)), (x_BSH,))

    def new(x_BSH: Tensor) -> Any:
        return choice.call(x_BSH, *numbers, epsilon)

    return next(filter(None, (differs(choice.spec, own, new, row) for row in x)), None)


def _rms_norm(choice: Choice, epsilon: float, own: Callable[..., Any]) -> Callable[..., Any]:
    call, takes = choice.call, choice.takes

    def forward(self: Any, x_BSH: Tensor) -> Any:
        weight = self.weight
        return call(x_BSH, weight, epsilon) if takes(x_BSH, weight) else own(self, x_BSH)

    return forward


def _layer_norm(choice: Choice, epsilon: float, own: Callable[..., Any]) -> Callable[..., Any]:
    call, takes = choice.call, choice.takes

    def forward(self: Any, x_BSH: Tensor) -> Any:
        weight = self.weight
        return call(x_BSH, weight, self.bias, epsilon) if takes(x_BSH, weight) else own(self, x_BSH)

    return forward


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
