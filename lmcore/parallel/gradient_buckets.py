"""`GradientBuckets`: all-reduces of gradients that overlap with the backward pass.

Gradients lie in a few large buffers, in about the order in which backward computes them, and a full
buffer is all-reduced at once.  The design is taken from torch's `DistributedDataParallel`, with the
same restrictions, but without its second of imports and its wrapper around the model.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from lmcore.base.errors import ConfigError, RunError
from lmcore.runtime.profiler_range import ProfilerRange, no_range

if TYPE_CHECKING:
    from lmcore.parallel.mesh import Axis

__all__ = ["GradientBuckets", "plain_backward", "sparse_gradient"]

_FIRST_BYTES = 2**20
"""Size of the first bucket, small so that communication begins early."""
_BYTES = 25 * 2**20


class _Bucket:
    """Gradients that are all-reduced in one buffer."""

    def __init__(self, parameters: list[nn.Parameter], *, counts: bool) -> None:
        self.parameters = parameters
        first = parameters[0]
        sizes = [parameter.numel() for parameter in parameters]
        sizes.append(len(parameters) if counts else 0)
        self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        *parts, self.counts = self.flat.split(sizes)  # counts: of ranks that have the gradient
        pairs = zip(parts, parameters, strict=True)
        self.views = [_view(part, parameter) for part, parameter in pairs]
        self.missing = set(range(len(parameters)))
        self.absent: list[int] = []  # missing ones that have no gradient of earlier passes either


class GradientBuckets:
    """Averages the gradients of each step over the replicas.

    From the first micro-batch of a step on, the gradients of parameters are views of the buckets.

    Attributes:
        filled: True if the last backward pass gave any parameter a gradient.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], axis: Axis, *, all_used: bool = True
    ) -> None:
        """Register gradient hooks; all replicas must give the same parameters, in the same order.

        Args:
            named: Parameters and their names, in the order of the forward pass.
            axis: Replicas.
            all_used: True if every parameter gets a gradient in each last micro-batch, and none is
                frozen or unfrozen.  Otherwise a gradient that is missing on a rank counts as 0 in
                the mean, and one that is missing on all ranks stays None.  If no parameter gets a
                gradient, which must be so on all ranks, nothing is reduced.  `requires_grad` must
                be equal on all ranks.
        """
        self.filled = False
        self._all_used = all_used
        self._group, self._scale, self._clock = axis.group, 1.0 / axis.size, axis.clock
        self._buckets: list[_Bucket] = []
        self._open = self._last = False
        self._pending = False  # gradients were computed since the last all-reduce
        self._next = 0  # all ranks reduce the buckets in the same order
        self._works: list[Any] = []
        self._frozen: list[tuple[str, nn.Parameter]] = []
        self._add(list(named))

    def _add(self, named: list[tuple[str, nn.Parameter]]) -> None:
        """Make buckets for the parameters that require gradients, after the existing buckets."""
        self._frozen = [pair for pair in named if not pair[1].requires_grad]
        trained = [pair for pair in named if pair[1].requires_grad]
        for members in _grouped(trained[::-1]):
            parameters = [parameter for _, parameter in members]
            bucket = _Bucket(parameters, counts=not self._all_used)
            self._buckets.append(bucket)
            for index, (name, parameter) in enumerate(members):
                hook = functools.partial(self._fill, name, bucket, index)
                parameter.register_post_accumulate_grad_hook(hook)

    @contextlib.contextmanager
    def backward(self, *, last: bool, profiler_range: ProfilerRange = no_range) -> Iterator[None]:
        """Wrap the backward pass of a micro-batch; after the last one gradients are means.

        Args:
            last: True for the last micro-batch of a step.
            profiler_range: Profiler range for the time spent waiting for the all-reduces.

        Raises:
            ConfigError: A gradient is sparse.
            RunError: A parameter got its gradient in two parts; see `_two_parts`.
        """
        if not self._all_used and any(parameter.requires_grad for _, parameter in self._frozen):
            self._add(self._frozen)
        self._last, self._open, self.filled = last, True, False
        try:
            yield
        finally:
            self._last = self._open = False
        self._pending = self._pending or self.filled
        if not last or not self._pending:
            return
        incomplete = self._buckets[self._next :]
        if incomplete:
            assert not self._all_used, "a parameter got no gradient"
            for bucket in incomplete:
                self._launch_incomplete(bucket)
        self._wait(profiler_range)
        self._next, self._pending = 0, False
        for bucket in incomplete:
            self._drop_unused(bucket)
        for bucket in self._buckets:
            bucket.missing = set(range(len(bucket.views)))

    def _launch_incomplete(self, bucket: _Bucket) -> None:
        """Launch an all-reduce with 0 for gradients that are missing on this rank."""
        bucket.absent = []
        for index in sorted(bucket.missing):
            parameter, view = bucket.parameters[index], bucket.views[index]
            if parameter.grad is None:
                view.zero_()
                bucket.absent.append(index)
            else:
                torch.mul(parameter.grad, self._scale, out=view)
            parameter.grad = view
        self._launch(bucket)

    def _drop_unused(self, bucket: _Bucket) -> None:
        """Drop the gradients of parameters that had none on any rank."""
        unknown = []
        for index in bucket.absent:
            if bucket.parameters[index].requires_grad:
                unknown.append(index)
            else:
                bucket.parameters[index].grad = None
        if unknown:  # the only wait for the device
            for index, count in zip(unknown, bucket.counts[unknown].tolist(), strict=True):
                if not count:
                    bucket.parameters[index].grad = None
        bucket.absent = []

    def allocate_gradients(self) -> None:
        """Make the gradients of parameters that have none views of the buckets, filled with 0."""
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is None:
                    parameter.grad = view.zero_()

    def all_reduce(self, profiler_range: ProfilerRange = no_range) -> None:
        """Average the gradients now, after micro-batches that all had *last* False.

        Args:
            profiler_range: Profiler range for the all-reduces.
        """
        with profiler_range("reduce"):
            for bucket in self._buckets:
                bucket.flat.mul_(self._scale)
                self._launch(bucket)
            self._wait()

    def _launch(self, bucket: _Bucket) -> None:
        if not self._all_used:
            bucket.counts.fill_(1.0)
            if bucket.absent:
                bucket.counts[bucket.absent] = 0.0
        work = distributed.all_reduce(bucket.flat, group=self._group, async_op=True)
        self._works.append(work)

    def _wait(self, profiler_range: ProfilerRange = no_range) -> None:
        with profiler_range("reduce"), self._clock:
            for work in self._works:
                work.wait()
        self._works.clear()

    def _fill(self, name: str, bucket: _Bucket, index: int, parameter: Tensor) -> None:
        """Move a gradient, computed or accumulated just now, into its bucket; reduce a full one."""
        if not self._open and not self._all_used:
            raise plain_backward(name)
        grad, view = parameter.grad, bucket.views[index]
        assert grad is not None
        self.filled = True
        try:
            if not self._last:
                if grad is not view:
                    view.copy_(grad)
                    parameter.grad = view
                return
            if index not in bucket.missing:
                raise _two_parts(name)
            torch.mul(grad, self._scale, out=view)  # before the sum, which may overflow the dtype
        except RuntimeError as error:
            if grad.layout != torch.strided:
                raise sparse_gradient(name) from error
            raise
        parameter.grad = view
        bucket.missing.remove(index)
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._launch(self._buckets[self._next])
            self._next += 1


def _view(part: Tensor, parameter: Tensor) -> Tensor:
    """Return a part of a buffer with the shape and strides of a parameter.

    Fused optimizers take gradients with the strides of their parameters, as torch makes them; a
    parameter with gaps or overlaps in memory gets a contiguous gradient.
    """
    like = torch.empty_like(parameter, device="meta")
    return part.as_strided(like.shape, like.stride(), part.storage_offset())


def _grouped(
    named: list[tuple[str, nn.Parameter]],
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Yield consecutive parameters of one dtype and device, up to about the size of a bucket."""
    members: list[tuple[str, nn.Parameter]] = []
    limit, size = _FIRST_BYTES, 0
    for name, parameter in named:
        kind = (parameter.dtype, parameter.device)
        if members and (size >= limit or (members[0][1].dtype, members[0][1].device) != kind):
            yield members
            members, limit, size = [], _BYTES, 0
        members.append((name, parameter))
        size += parameter.numel() * parameter.element_size()
    if members:
        yield members


def plain_backward(name: str) -> ConfigError:
    """Return the error of a backward pass whose gradients would be of one rank only."""
    return ConfigError(
        f"`loss.backward()` computes the gradient of `{name}` on this rank only",
        why="the model is prepared for several ranks: its gradients would not be averaged, and the "
        "weights of the ranks would differ",
        hint="call `rt.backward(loss)`; `torch.autograd.grad` returns gradients of one rank",
    )


def sparse_gradient(name: str) -> ConfigError:
    """Return the error of a sparse gradient, which no all-reduce averages."""
    return ConfigError(
        f"the gradient of `{name}` is sparse",
        why="several ranks average dense gradients only",
        hint="make the module with `sparse=False`, and use an optimizer for dense gradients",
    )


def _two_parts(name: str) -> RunError:
    return RunError(
        f"the gradient of `{name}`, or of a parameter in the same bucket, came in two parts",
        why="the first part was already being all-reduced",
        hint="a recompute policy that runs its own backward passes does so: try another one; so "
        "does a backward pass after one that raised an error",
    )
