"""`GraphedMicroBatch`: forward and backward of a micro-batch, captured as a graph and replayed.

A step of a small model consists of many short kernels, and the host takes longer to launch one than
the device to run it.  A replay launches all of them at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lmcore.base.errors import DeviceError
from lmcore.contract.device_errors import first_line

if TYPE_CHECKING:
    from lmcore.contract.device import Device
    from lmcore.data.loading.batch import Batch

__all__ = ["GraphedMicroBatch", "allocate_gradients", "require_graphs"]

_WARM_UP = 3
"""Micro-batches before the capture: they compile, choose kernels and fill caches."""


class GraphedMicroBatch:
    """Loss and gradients of a micro-batch; gradients accumulate in the parameters, in place.

    The captured kernels read and write fixed memory: parameters and their gradients must not move.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        parameters: Sequence[nn.Parameter],
        device: Device,
        *,
        allocate: Callable[[], None],
    ) -> None:
        """Set up; the capture follows after the warm-up micro-batches.

        Args:
            loss: Function that takes a micro-batch's tensors by name and returns the loss, on the
                device.
            parameters: Parameters that get gradients.
            device: Device that captures.
            allocate: Function that gives parameters without a gradient one of zeros, in the memory
                where it will stay.

        Raises:
            DeviceError: The device cannot capture graphs.
        """
        self._loss, self._parameters, self._allocate = loss, parameters, allocate
        self._device = device
        self._new_graph = device.require("new_graph")
        self._new_stream = device.require("new_stream")
        self._warm_ups = 0
        self._graph: Any = None
        self._static_inputs: Batch = {}
        self._static_loss = torch.empty(0)

    @property
    def captured(self) -> bool:
        """True once the graph is captured; from then on gradients must keep their memory."""
        return self._graph is not None

    def zero_grad(self) -> None:
        """Set the gradients to zero in place."""
        grads = [param.grad for param in self._parameters if param.grad is not None]
        torch._foreach_zero_(grads)

    def __call__(self, batch: Batch, context: Callable[[], AbstractContextManager[Any]]) -> Tensor:
        """Run forward and backward of a micro-batch and return its loss.

        Args:
            batch: Micro-batch, of the same shapes in every call.
            context: Context of the forward pass, which sets the precision.

        Raises:
            DeviceError: The capture failed.
        """
        if self._graph is None and self._warm_ups < _WARM_UP:
            self._warm_ups += 1
            return self._forward_backward(batch, context)
        if self._graph is None:
            self._capture(batch, context)
        else:
            self._copy_inputs(batch)
        self._graph.replay()
        return self._static_loss.clone()

    def _forward_backward(
        self, batch: Batch, context: Callable[[], AbstractContextManager[Any]]
    ) -> Tensor:
        with context():
            loss = self._loss(**batch)
        (loss.sum() if loss.dim() else loss).backward()
        return loss.detach()

    def _copy_inputs(self, batch: Batch) -> None:
        """Copy a micro-batch into the memory that the graph reads."""
        assert batch.keys() == self._static_inputs.keys(), "a micro-batch with other tensors"
        for name, target in self._static_inputs.items():
            assert target.shape == batch[name].shape, "a micro-batch of another shape"
            target.copy_(batch[name])

    def _capture(self, batch: Batch, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self._static_inputs = {name: tensor.clone() for name, tensor in batch.items()}
        self._allocate()
        graph, stream = self._new_graph(), self._new_stream()
        self._device.synchronize()
        if self._device.empty_cache is not None:
            self._device.empty_cache()  # the graph has a separate memory pool
        before = torch.accelerator.current_stream()
        stream.wait_stream(before)
        try:
            with stream, _capturing(graph):
                self._static_loss = self._forward_backward(self._static_inputs, context)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as cause:
            raise DeviceError(
                "forward and backward of a micro-batch cannot be captured as a graph",
                why=first_line(cause),
                hint="leave `--step-graph` out",
            ) from cause
        before.wait_stream(stream)
        self._graph = graph


def require_graphs(device: Device) -> None:
    """Raise unless the device can capture graphs.

    Args:
        device: Device of the run.

    Raises:
        DeviceError: The device cannot; the message says why.
    """
    for ability in ("new_graph", "new_stream"):
        if ability in device.missing:
            raise DeviceError(
                f"device `{device.type}` cannot capture graphs, which `--step-graph` needs",
                why=device.missing[ability],
                hint="leave `--step-graph` out",
            )


def allocate_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Give parameters that have no gradient one of zeros."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


@contextlib.contextmanager
def _capturing(graph: Any) -> Iterator[None]:
    """Capture the kernels launched within the context; re-raise its first error."""
    graph.capture_begin()
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):  # ending a failed capture fails too
            graph.capture_end()
        raise
    graph.capture_end()
