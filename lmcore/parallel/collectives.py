"""Exchanges within an axis that gradients flow through.

Each comes in a pair: what one does forward the other does backward.  Shapes: B batch, S sequence
of this process, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, distributed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from lmcore.parallel.mesh import Axis

__all__ = ["copy_to_all", "gather_parts", "scatter_sum", "sum_over_all", "sum_together"]


_COPIED_BYTES = 64 * 2**20
"""After so much an exchange is full, so that gradients are never all held twice."""

# Newer torch deprecates the longer names.
_gather_into = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
_scatter_into = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)


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


def sum_together(tensors: list[Tensor], axis: Axis, *, share: float = 1.0) -> None:
    """Replace each tensor by *share* times its sum over *axis*, in few exchanges; no gradients."""
    if axis.size == 1:
        return
    for some in _batches(tensors):
        flat = torch.cat([tensor.flatten() for tensor in some]).mul_(share)
        distributed.all_reduce(flat, group=axis.group)
        parts = flat.split([tensor.numel() for tensor in some])
        for tensor, part in zip(some, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def _batches(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield *tensors* in their order, as many at a time as may be copied at once."""
    found: list[Tensor] = []
    size = 0
    for tensor in tensors:
        size += tensor.numel() * tensor.element_size()
        found.append(tensor)
        if size >= _COPIED_BYTES:
            yield found
            found, size = [], 0
    if found:
        yield found


def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total, group=group)
    return total


def _all_gather(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    size = group.size()
    gathered = x.new_empty((size * x.shape[0], *x.shape[1:]))
    _gather_into(gathered, x.contiguous(), group=group)
    return gathered if dim == 0 else torch.cat(gathered.chunk(size), dim=dim)


def _reduce_scatter(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    size = group.size()
    whole = x.contiguous() if dim == 0 else torch.cat(x.chunk(size, dim=dim))
    part = whole.new_empty((whole.shape[0] // size, *whole.shape[1:]))
    _scatter_into(part, whole, group=group)
    return part


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grads[0], ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

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
