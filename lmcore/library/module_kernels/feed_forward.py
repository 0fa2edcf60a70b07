"""Replacement of feed-forward layers: GELU with its bias, and SwiGLU on one packed projection.

A layer is found by its parts and verified by its results.  Shapes: T tokens, I inputs, F
feed-forward width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lmcore.library.module_kernels.attention import is_attention
from lmcore.library.module_kernels.choice import Choice, differs, group, has_hooks, not_comparable
from lmcore.library.module_kernels.report import KernelReport
from lmcore.library.op_calls import OpCalls

__all__ = ["is_transposed_linear", "replace_feed_forwards"]

_Forward = Callable[[Any, Tensor], Tensor]


def is_transposed_linear(module: nn.Module) -> bool:
    """Return True for a projection whose weight is stored as [inputs, outputs], as in GPT-2."""
    parameters = dict(module.named_parameters(recurse=False))
    return (
        type(module).__name__ == "Conv1D"
        and parameters.keys() == {"weight", "bias"}
        and parameters["weight"].dim() == 2
        and parameters["weight"].shape[1:] == parameters["bias"].shape
    )


def _is_linear(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward and not has_hooks(module)


def _sizes(module: nn.Module) -> tuple[int, int]:
    """Return inputs and outputs of a projection."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    first, second = weight.shape
    return (second, first) if _is_linear(module) else (first, second)


def replace_feed_forwards(
    modules: Sequence[nn.Module], calls: OpCalls, report: KernelReport
) -> None:
    """Replace the forward pass of feed-forward layers that the device has better kernels for."""
    found = [module for module in modules if _op_of(module) is not None]
    for alike in group(found):
        part, op = type(alike[0]).__name__, _op_of(alike[0])
        assert op is not None
        _replace(part, op, alike, calls, report)


def _op_of(module: nn.Module) -> str | None:
    """Return the op that a module with two or three projections and an activation may use."""
    if next(module.parameters(recurse=False), None) is not None or is_attention(module):
        return None
    children = list(module.children())
    projections = [each for each in children if _is_linear(each) or is_transposed_linear(each)]
    others = [each for each in children if each not in projections]
    if not others or any(next(each.parameters(), None) is not None for each in others):
        return None
    sizes = [_sizes(each) for each in projections]
    if len(sizes) == 2 and sizes[0] == sizes[1][::-1]:
        return "bias_gelu"
    gated = len(sizes) == 3 and sizes[0] == sizes[1] == sizes[2][::-1]
    return "swiglu" if gated and all(_is_linear(each) for each in projections) else None


def _replace(
    part: str, op: str, modules: list[nn.Module], calls: OpCalls, report: KernelReport
) -> None:
    first, count = modules[0], len(modules)
    names = [
        name for name, child in first.named_children() if next(child.parameters(), None) is not None
    ]
    weight: Tensor = getattr(first, names[0]).weight
    inputs, width = _sizes(getattr(first, names[0]))
    choice = Choice(calls, op, weight.dtype, ffn_hidden_size=width)
    if (reason := choice.reason or not_comparable(weight)) is not None:
        report.add_kept(part, count, reason)
        return
    if (reason := _activation_difference(first, names, choice, weight)) is not None:
        report.add_kept(part, count, reason)
        return
    x = torch.randn(2, 3, inputs, generator=torch.Generator().manual_seed(2)).to(weight)
    own = type(first).forward
    reasons = []
    for make, order in _candidates(op, first, names):
        forward = make(choice, own, *order)

        def new(x_BSI: Tensor, _forward: _Forward = forward) -> Tensor:
            return _forward(first, x_BSI)

        reason = differs(choice.spec, lambda x_BSI: own(first, x_BSI), new, x)
        if reason is None:
            for module in modules:
                report.changes.set_forward(module, forward)
            report.add_replaced(part, count, choice.resolution)
            return
        reasons.append(reason)
    report.add_kept(part, count, reasons[0] if reasons else "its first projection has no bias")


def _activation_difference(
    module: nn.Module, names: list[str], choice: Choice, weight: Tensor
) -> str | None:
    """Return why no other child of the module computes what the op does between projections."""
    others = [
        child
        for name, child in module.named_children()
        if name not in names and not isinstance(child, nn.Dropout)
    ]
    x_F = torch.linspace(-8, 8, 64).to(weight)

    def op(x_F: Tensor) -> Tensor:
        if choice.op == "bias_gelu":
            return choice.call(x_F, torch.zeros_like(x_F))  # type: ignore[no-any-return]
        return choice.call(torch.cat([x_F, torch.ones_like(x_F)]))  # type: ignore[no-any-return]

    if any(differs(choice.spec, child, op, x_F) is None for child in others):
        return None
    wanted = "GELU in its tanh form" if choice.op == "bias_gelu" else "SiLU"
    return f"its activation is not {wanted}"


def _candidates(
    op: str, module: nn.Module, names: list[str]
) -> list[tuple[Callable[..., _Forward], tuple[str, ...]]]:
    """Return the forward passes that may be the module's, with the names of its children."""
    if op == "swiglu":
        return [(_swiglu, (*pair, names[2])) for pair in itertools.permutations(names[:2])]
    if getattr(module, names[0]).bias is None:
        return []
    dropouts = [name for name, child in module.named_children() if isinstance(child, nn.Dropout)]
    return [(_bias_gelu, (*names, *dropouts))]


def _bias_gelu(
    choice: Choice, own: _Forward, up_name: str, down_name: str, *dropouts: str
) -> _Forward:
    call, takes = choice.call, choice.takes

    def forward(self: Any, x_BSI: Tensor) -> Tensor:
        modules = self._modules
        up = modules[up_name]
        weight = up.weight
        if not takes(x_BSI, weight) or has_hooks(up):
            return own(self, x_BSI)
        if isinstance(up, nn.Linear):
            y_BSF = functional.linear(x_BSI, weight)
        else:
            y_BSF = torch.matmul(x_BSI, weight)
        out: Tensor = modules[down_name](call(y_BSF, up.bias))
        for name in dropouts:
            out = modules[name](out)
        return out

    return forward


class _PackedProjection(torch.autograd.Function):
    """Two projections of one input, written side by side: [x @ gate.T, x @ up.T]."""

    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, gate_FI: Tensor, up_FI: Tensor, *biases: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x_TI, gate_FI, up_FI)
        width = gate_FI.shape[0]
        out_T2F = x_TI.new_empty(x_TI.shape[0], 2 * width)
        for weight_FI, bias_F, part_TF in zip(
            (gate_FI, up_FI), biases, out_T2F.split(width, dim=1), strict=True
        ):
            torch.mm(x_TI, weight_FI.t(), out=part_TF)
            if bias_F is not None:
                part_TF.add_(bias_F)
        return out_T2F

    @staticmethod
    def backward(ctx: Any, grad_T2F: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, gate_FI, up_FI = ctx.saved_tensors
        wants_x, *wants = ctx.needs_input_grad
        gate_TF, up_TF = grad_T2F.chunk(2, dim=1)
        grad_x_TI = torch.mm(gate_TF, gate_FI).addmm_(up_TF, up_FI) if wants_x else None
        weights = [
            part_TF.t() @ x_TI if wanted else None
            for part_TF, wanted in zip((gate_TF, up_TF), wants[:2], strict=True)
        ]
        biases = [
            part_TF.sum(0) if wanted else None
            for part_TF, wanted in zip((gate_TF, up_TF), wants[2:], strict=True)
        ]
        return (grad_x_TI, *weights, *biases)


def _swiglu(
    choice: Choice, own: _Forward, gate_name: str, up_name: str, down_name: str
) -> _Forward:
    call, takes = choice.call, choice.takes

    def forward(self: Any, x_BSI: Tensor) -> Tensor:
        modules = self._modules
        gate, up = modules[gate_name], modules[up_name]
        if not takes(x_BSI, gate.weight) or has_hooks(gate) or has_hooks(up):
            return own(self, x_BSI)
        if torch.is_autocast_enabled(x_BSI.device.type):
            packed_BS2F = torch.cat([gate(x_BSI), up(x_BSI)], dim=-1)
        else:
            packed_T2F: Tensor = _PackedProjection.apply(  # type: ignore[no-untyped-call]
                x_BSI.reshape(-1, x_BSI.shape[-1]), gate.weight, up.weight, gate.bias, up.bias
            )
            packed_BS2F = packed_T2F.view(*x_BSI.shape[:-1], -1)
        out: Tensor = modules[down_name](call(packed_BS2F))
        return out

    return forward
