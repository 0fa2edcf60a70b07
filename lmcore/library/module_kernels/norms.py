"""Replacement of RMS norms and layer norms, found by what they compute."""

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
