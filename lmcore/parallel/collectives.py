"""Differentiable collectives over one axis of the mesh, and an all-reduce of many tensors.

`copy_to_group` is the identity forward and an all-reduce backward; `all_reduce` is the reverse.
`all_gather` and `reduce_scatter` are each other's backward.  Shapes: B batch, S sequence of this
rank, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, distributed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from lmcore.parallel.mesh import Axis
    from lmcore.parallel.wait_clock import WaitClock

__all__ = [
    "all_gather",
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast_coalesced",
    "copy_to_group",
    "gather_into",
    "reduce_scatter",
    "scale_gradient",
    "scatter_into",
]

_COALESCED_BYTES = 64 * 2**20
"""Size at which a flat buffer is sent, so that never all gradients are held twice."""

# Newer torch deprecates the longer names.
gather_into = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
scatter_into = getattr(distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor)


def copy_to_group(x: Tensor, axis: Axis) -> Tensor:
    """Return x, which is replicated over *axis*; backward all-reduces its gradient.

    Args:
        x: Tensor of any shape, the same on all ranks of *axis*.
        axis: Axis of the mesh.
    """
    return cast("Tensor", _CopyToGroup.apply(x, axis.group, axis.clock))  # type: ignore[no-untyped-call]


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of x over *axis*; backward passes the gradient on unchanged.

    Args:
        x: Tensor of any shape, of the same shape on all ranks of *axis*.
        axis: Axis of the mesh.
    """
    return cast("Tensor", _AllReduce.apply(x, axis.group, axis.clock))  # type: ignore[no-untyped-call]


def all_gather(x_BSH: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """Return the tensors of all ranks of *axis*, concatenated along *dim* in the order of ranks.

    Backward reduce-scatters the gradient.

    Args:
        x_BSH: This rank's tensor; other shapes are allowed.
        axis: Axis of the mesh.
        dim: Dim to concatenate along.
    """
    return cast("Tensor", _AllGather.apply(x_BSH, axis.group, dim, axis.clock))  # type: ignore[no-untyped-call]


def reduce_scatter(x_BSH: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """Return this rank's slice along *dim* of the sum of x over *axis*; backward all-gathers.

    Args:
        x_BSH: Tensor to sum; other shapes are allowed.
        axis: Axis of the mesh.
        dim: Dim to slice, divisible by the size of *axis*.
    """
    return cast("Tensor", _ReduceScatter.apply(x_BSH, axis.group, dim, axis.clock))  # type: ignore[no-untyped-call]


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return *x*, whose gradient is multiplied by *factor*."""
    return x.detach() + (x - x.detach()) * factor if x.requires_grad else x


def all_reduce_coalesced(tensors: list[Tensor], axis: Axis, *, scale: float = 1.0) -> None:
    """Replace each tensor in place by *scale* times its sum over *axis*; not differentiable.

    Tensors are copied into flat buffers, so that there are few all-reduces.

    Args:
        tensors: Tensors of one dtype and device; the same shapes on all ranks of *axis*.
        axis: Axis of the mesh.
        scale: Factor that is applied before the sum.
    """
    if axis.size == 1:
        return
    for flat in _flat_buffers(tensors):
        axis.clock.wait(distributed.all_reduce, flat.mul_(scale), group=axis.group)


def broadcast_coalesced(tensors: list[Tensor], axis: Axis) -> None:
    """Replace each tensor in place by the one of the first rank of *axis*; not differentiable.

    Args:
        tensors: Tensors on one device, which may be expanded; the same shapes, strides and dtypes
            on all ranks of *axis*.
        axis: Axis of the mesh.
    """
    if axis.size == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(_once(tensor))
    for same in by_dtype.values():
        for flat in _flat_buffers(same):
            axis.clock.wait(distributed.broadcast, flat, src=axis.ranks[0], group=axis.group)


def _once(tensor: Tensor) -> Tensor:
    """Return a view of *tensor* that has each element of an expanded dimension once."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _flat_buffers(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Yield copies of *tensors* in buffers of about `_COALESCED_BYTES`, then copy them back."""
    size, start = 0, 0
    for end, tensor in enumerate(tensors, start=1):
        size += tensor.numel() * tensor.element_size()
        if size >= _COALESCED_BYTES or end == len(tensors):
            members = tensors[start:end]
            flat = torch.cat([member.flatten() for member in members])
            yield flat
            parts = flat.split([member.numel() for member in members])
            for member, part in zip(members, parts, strict=True):
                member.copy_(part.view_as(member))
            size, start = 0, end


def _all_reduce(x: Tensor, group: ProcessGroup, clock: WaitClock) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    clock.wait(distributed.all_reduce, total, group=group)
    return total


def _all_gather(x: Tensor, group: ProcessGroup, dim: int, clock: WaitClock) -> Tensor:
    size = group.size()
    gathered = x.new_empty((size * x.shape[0], *x.shape[1:]))
    clock.wait(gather_into, gathered, x.contiguous(), group=group)
    return gathered if dim == 0 else torch.cat(gathered.chunk(size), dim=dim)


def _reduce_scatter(x: Tensor, group: ProcessGroup, dim: int, clock: WaitClock) -> Tensor:
    size = group.size()
    whole = x.contiguous() if dim == 0 else torch.cat(x.chunk(size, dim=dim))
    part = whole.new_empty((whole.shape[0] // size, *whole.shape[1:]))
    clock.wait(scatter_into, part, whole, group=group)
    return part


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, clock: WaitClock) -> Tensor:
        ctx.group, ctx.clock = group, clock
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _all_reduce(grads[0], ctx.group, ctx.clock), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor, group: ProcessGroup, clock: WaitClock) -> Tensor:
        return _all_reduce(x, group, clock)

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int, clock: WaitClock) -> Tensor:
        ctx.group, ctx.dim, ctx.clock = group, dim, clock
        return _all_gather(x, group, dim, clock)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _reduce_scatter(grads[0], ctx.group, ctx.dim, ctx.clock), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int, clock: WaitClock) -> Tensor:
        ctx.group, ctx.dim, ctx.clock = group, dim, clock
        return _reduce_scatter(x, group, dim, clock)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_gather(grads[0], ctx.group, ctx.dim, ctx.clock), None, None, None
