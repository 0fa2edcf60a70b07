"""Exchanges within an axis that gradients flow through.

Each comes in a pair: what one does forward the other does backward.  Shapes: B batch, S sequence
of this process, H hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as functional

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from lmcore.parallel.mesh import Axis

__all__ = ["copy_to_all", "gather_parts", "scatter_sum", "sum_over_all"]


def copy_to_all(x: Tensor, axis: Axis) -> Tensor:
    """Return x, which all processes of *axis* share; its gradient is the sum of theirs."""
    return cast("Tensor", _Copy.apply(x, axis.group))  # type: ignore[no-untyped-call]


def sum_over_all(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of x over *axis*; all get the gradient of the sum."""
    return cast("Tensor", _Sum.apply(x, axis.group))  # type: ignore[no-untyped-call]


def gather_parts(x_BSH: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """Return the parts of all processes of *axis*, in order, along *dim*.

    Each part's gradient is the sum of what all processes have for it.
    """
    return cast("Tensor", _Gather.apply(x_BSH, axis.group, dim))  # type: ignore[no-untyped-call]


def scatter_sum(x_BSH: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """Return this process's part along *dim* of the sum of x over *axis*."""
    return cast("Tensor", _Scatter.apply(x_BSH, axis.group, dim))  # type: ignore[no-untyped-call]


def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    return cast("Tensor", functional.wait_tensor(functional.all_reduce(x, "sum", group)))


def _all_gather(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    gathered = functional.all_gather_tensor(x.contiguous(), gather_dim=dim, group=group)
    return cast("Tensor", functional.wait_tensor(gathered))


def _reduce_scatter(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    part = functional.reduce_scatter_tensor(x.contiguous(), "sum", scatter_dim=dim, group=group)
    return cast("Tensor", functional.wait_tensor(part))


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grads[0].contiguous(), ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return _all_reduce(x.contiguous(), group)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(grads[0], ctx.group, ctx.dim), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(grads[0], ctx.group, ctx.dim), None, None
