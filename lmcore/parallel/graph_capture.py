"""`RecordedPass`: forward and backward of a micro-batch, recorded once and played again.

A small model's step consists of many small pieces of work, each of which the host takes longer to
ask for than the device to do.  Played from a record, all of them are asked for at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lmcore.accelerator.device_errors import first_line
from lmcore.errors import DeviceError

if TYPE_CHECKING:
    from lmcore.accelerator.device import Device
    from lmcore.parallel.pipeline import Arguments

__all__ = ["RecordedPass", "hold_gradients", "require_graphs"]

_FIRST = 3
"""Micro-batches that run as always: they compile, choose kernels and fill caches."""


class RecordedPass:
    """Computes what *run* computes; gradients are added to the parameters' own, in place.

    What the recorded work reads and writes are the tensors that it was recorded with: parameters
    and their gradients must stay where they are.
    """

    def __init__(
        self,
        run: Callable[..., Tensor],
        parameters: Sequence[nn.Parameter],
        device: Device,
        *,
        hold: Callable[[], None],
    ) -> None:
        """Record nothing yet.

        Args:
            run: Takes what `GPT.loss` takes, returns the loss, which lies on the device.
            parameters: Those whose gradients it computes.
            device: Where.
            hold: Gives parameters that have no gradient one of zeros, which stays theirs.

        Raises:
            DeviceError: The device cannot record work.
        """
        self._run, self._parameters, self._hold = run, parameters, hold
        self._device = device
        self._new_graph = device.require("new_graph")
        self._new_stream = device.require("new_stream")
        self._taken = 0
        self._graph: Any = None
        self._given: Arguments = ((), {})
        self._loss = torch.empty(0)

    @property
    def recorded(self) -> bool:
        """Whether the work is recorded; until then gradients may be dropped and made anew."""
        return self._graph is not None

    def zero_grad(self) -> None:
        """Make the gradients zero where they are."""
        grads = [one.grad for one in self._parameters if one.grad is not None]
        torch._foreach_zero_(grads)

    def __call__(
        self, arguments: Arguments, context: Callable[[], AbstractContextManager[Any]]
    ) -> Tensor:
        """Run forward and backward of a micro-batch and return its loss.

        Args:
            arguments: Of *run*, by place and by name; of the same shapes in every call.
            context: The precision's, in which a forward pass runs.

        Raises:
            DeviceError: The work cannot be recorded.
        """
        if self._graph is None and self._taken < _FIRST:
            self._taken += 1
            return self._run_and_backward(arguments, context)
        if self._graph is None:
            self._record(arguments, context)
        else:
            self._give(arguments)
        self._graph.replay()
        return self._loss.clone()

    def _run_and_backward(
        self, arguments: Arguments, context: Callable[[], AbstractContextManager[Any]]
    ) -> Tensor:
        tensors, options = arguments
        with context():
            loss = self._run(*tensors, **options)
        loss.backward()
        return loss.detach()

    def _give(self, arguments: Arguments) -> None:
        """Put the numbers of a micro-batch where the record reads them."""
        (tensors, options), (own, own_options) = arguments, self._given
        assert options.keys() == own_options.keys(), "a micro-batch with other arguments"
        pairs = [*zip(own, tensors, strict=True)]
        pairs += [(own_options[name], tensor) for name, tensor in options.items()]
        for here, tensor in pairs:
            assert here.shape == tensor.shape, "a micro-batch of another shape"
            here.copy_(tensor)

    def _record(
        self, arguments: Arguments, context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        tensors, options = arguments
        self._given = (
            tuple(tensor.clone() for tensor in tensors),
            {name: tensor.clone() for name, tensor in options.items()},
        )
        self._hold()
        graph, stream = self._new_graph(), self._new_stream()
        self._device.synchronize()
        if self._device.empty_cache is not None:
            self._device.empty_cache()  # a record has memory of its own
        before = torch.accelerator.current_stream()
        stream.wait_stream(before)
        try:
            with stream, _capturing(graph):
                self._loss = self._run_and_backward(self._given, context)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as cause:
            raise DeviceError(
                "forward and backward of a micro-batch cannot be recorded",
                why=first_line(cause),
                hint="leave `--step-graph` out",
            ) from cause
        before.wait_stream(stream)
        self._graph = graph


def require_graphs(device: Device) -> None:
    """See that a device can record work.

    Raises:
        DeviceError: It cannot.
    """
    for ability in ("new_graph", "new_stream"):
        if ability in device.missing:
            raise DeviceError(
                f"device `{device.type}` cannot record a step, as `--step-graph` asks",
                why=device.missing[ability],
                hint="leave `--step-graph` out",
            )


def hold_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Give parameters that have no gradient one of zeros."""
    for one in parameters:
        if one.grad is None:
            one.grad = torch.zeros_like(one)


@contextlib.contextmanager
def _capturing(graph: Any) -> Iterator[None]:
    """Record what is queued within the context; a failure there is told, not what follows it."""
    graph.capture_begin()
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the record is of no use, as it says
            graph.capture_end()
        raise
    graph.capture_end()
