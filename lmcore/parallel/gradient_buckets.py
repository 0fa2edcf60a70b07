"""`GradientBuckets`: copies of a model exchange gradients while backward still computes others.

Gradients lie in few large tensors, in about the order in which backward finishes them, and one
that is full is sent on its way at once.  What torch's `DistributedDataParallel` does, and bound by
the same rules, without its second of imports and its wrapper around the model.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from lmcore.errors import RunError
from lmcore.runtime.profiler_range import ProfilerRange, no_range

if TYPE_CHECKING:
    from lmcore.parallel.mesh import Axis

__all__ = ["GradientBuckets"]

_FIRST_BYTES = 2**20
"""Size of the first bucket, small so that the exchange begins early."""
_BYTES = 25 * 2**20


class _Bucket:
    """Gradients that travel together."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        first = parameters[0]
        size = sum(one.numel() for one in parameters)
        self.flat = torch.zeros(size, dtype=first.dtype, device=first.device)
        parts = self.flat.split([one.numel() for one in parameters])
        pairs = zip(parts, parameters, strict=True)
        self.views = [part.view_as(parameter) for part, parameter in pairs]
        self.missing = len(parameters)


class GradientBuckets:
    """Makes the gradients of a step means over an axis.

    Parameters keep their gradients in the buckets from the first micro-batch of a step on.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], axis: Axis) -> None:
        """Watch the gradients of parameters; all processes must name the same, in one order.

        Args:
            named: Parameters and their names, in the order of the forward pass.
            axis: The processes that hold copies.
        """
        self._group, self._share = axis.group, 1.0 / axis.size
        self._buckets: list[_Bucket] = []
        self._last = False
        self._next = 0  # all processes send buckets in the same order
        self._works: list[Any] = []
        trained = [(name, one) for name, one in named if one.requires_grad]
        for members in _divided(trained[::-1]):
            bucket = _Bucket([one for _, one in members])
            self._buckets.append(bucket)
            for (name, parameter), view in zip(members, bucket.views, strict=True):
                hook = functools.partial(self._take, name, bucket, view)
                parameter.register_post_accumulate_grad_hook(hook)

    @contextlib.contextmanager
    def backward(self, *, last: bool, profiler_range: ProfilerRange = no_range) -> Iterator[None]:
        """Wrap forward and backward of a micro-batch; after the last one gradients are means.

        Every parameter must get a gradient in the last one.

        Raises:
            RunError: A parameter got its gradient in two parts; see `_twice`.
        """
        self._last = last
        yield
        if not last:
            return
        assert self._next == len(self._buckets), "a parameter got no gradient"
        with profiler_range("reduce"):
            for work in self._works:
                work.wait()
        self._works.clear()
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.views)

    def hold(self) -> None:
        """Give parameters without a gradient their places in the buckets as one, of zeros."""
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is None:
                    parameter.grad = view.zero_()

    def exchange(self, profiler_range: ProfilerRange = no_range) -> None:
        """Make the gradients means now, after micro-batches none of which was the last one."""
        with profiler_range("reduce"):
            for bucket in self._buckets:
                bucket.flat.mul_(self._share)
                self._works.append(
                    distributed.all_reduce(bucket.flat, group=self._group, async_op=True)
                )
            for work in self._works:
                work.wait()
        self._works.clear()

    def _take(self, name: str, bucket: _Bucket, view: Tensor, parameter: Tensor) -> None:
        """Put a gradient, just computed or added to, into its bucket; send that when it is full."""
        grad = parameter.grad
        assert grad is not None
        if not self._last:
            if grad is not view:
                view.copy_(grad)
                parameter.grad = view
            return
        if bucket.missing == 0:
            raise _twice(name)
        torch.mul(grad, self._share, out=view)  # before the sum, which may be beyond the dtype
        parameter.grad = view
        bucket.missing -= 1
        if bucket.missing == 0:
            self._send()

    def _send(self) -> None:
        """Send what is full, in order."""
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            flat = self._buckets[self._next].flat
            self._works.append(distributed.all_reduce(flat, group=self._group, async_op=True))
            self._next += 1


def _divided(
    named: list[tuple[str, nn.Parameter]],
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Divide parameters into runs of one dtype and device, of about the size of a bucket."""
    members: list[tuple[str, nn.Parameter]] = []
    limit, size = _FIRST_BYTES, 0
    for name, one in named:
        kind = (one.dtype, one.device)
        if members and (size >= limit or (members[0][1].dtype, members[0][1].device) != kind):
            yield members
            members, limit, size = [], _BYTES, 0
        members.append((name, one))
        size += one.numel() * one.element_size()
    if members:
        yield members


def _twice(name: str) -> RunError:
    return RunError(
        f"a gradient of `{name}`, or of one beside it, came in two parts",
        why="the first part was on its way to the other processes already",
        hint="a recompute policy that runs backward passes of its own does so: try another one",
    )
