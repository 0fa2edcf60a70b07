"""Activations that a forward pass keeps for backward: computed again, or moved to the host.

Both work through autograd's hooks on saved tensors.  torch's own checkpoint function does too, but
it restores random numbers only on torch's built-in device types, supports no precision
context but autocast, and imports torch's compiler; here all that surrounds the computation is
restored by the context manager that the caller passes as `remember`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lmcore.base.errors import RunError

__all__ = ["HostMemory", "recompute"]

Remember = Callable[[], Callable[[], AbstractContextManager[Any]]]

_SMALLEST_MOVED = 64 * 1024
"""Bytes below which the call of a copy costs more than the memory is worth."""


def recompute(call: Callable[..., Any], *tensors: Tensor, remember: Remember) -> Any:
    """Return ``call(*tensors)``, keeping only *tensors*; backward calls it again.

    The second call ends as soon as everything that the first one kept is there.  Calls may be
    nested.  Gradients of gradients are not supported.

    Args:
        call: Draws random numbers and reads the precision's context only from what *remember*
            restores.
        *tensors: Its arguments.
        remember: Called before the first call; returns a function that makes, for the second, the
            context of the first again.

    Raises:
        RunError: In backward: the second call kept other tensors than the first.
    """
    if not torch.is_grad_enabled():
        return call(*tensors)
    again = remember()
    # What a surrounding hook makes of the arguments is theirs: recomputed or offloaded in turn.
    kept = _Kept.apply(torch.empty(0, requires_grad=True), *tensors)  # type: ignore[no-untyped-call]
    frame = _Frame(call, kept, again)
    with saved_tensors_hooks(frame.pack, frame.unpack):
        return call(*tensors)


class _Kept(torch.autograd.Function):
    """A node whose saved tensors are the arguments; no gradient flows through it.

    It lives as long as its output: torch 2.11 frees the saved tensors with it, even if the node
    itself is held.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty_like(anchor)


class _Enough(BaseException):
    """Ends the second call; not an `Exception`, so that no block takes it for an error."""


class _Frame:
    """One call: its kept tensors, by number, and the function that repeats it."""

    def __init__(
        self,
        call: Callable[..., Any],
        inputs: Tensor,
        again: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.call = call
        self.inputs = inputs
        self.again = again
        self.kept: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self.values: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> int:
        """Keep a number in place of a tensor."""
        self.kept.append((tensor.shape, tensor.dtype, tensor.device))
        return len(self.kept) - 1

    def unpack(self, number: int) -> Tensor:
        """Return the tensor of a number; the first request computes all of them again."""
        if number not in self.values:
            self._call_again()
        return self.values.pop(number)

    def _call_again(self) -> None:
        node: Any = self.inputs.grad_fn
        arguments = [
            tensor.detach().requires_grad_(tensor.requires_grad) for tensor in node.saved_tensors
        ]
        found = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal found
            value = tensor.detach()
            if (value.shape, value.dtype, value.device) != self.kept[found]:
                raise _differs(found, self.kept[found], value)
            self.values[found] = value
            found += 1
            if found == len(self.kept):
                raise _Enough
            return value

        try:
            with torch.enable_grad(), self.again(), saved_tensors_hooks(pack, _itself):
                self.call(*arguments)
        except _Enough:
            return
        raise _differs(found, self.kept[found], None)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _differs(number: int, kept: object, found: Tensor | None) -> RunError:
    shown = "nothing" if found is None else f"{found.dtype} {tuple(found.shape)} on {found.device}"
    return RunError(
        "a part of the model did something else when it was computed again",
        why=f"tensor {number} of those it keeps for backward was {kept}, then {shown}",
        hint="use `--recompute none`; a part that is recomputed depends on its inputs and random "
        "numbers alone",
    )


class HostMemory:
    """Keeps on the host what a forward pass saves, in pinned buffers that are used again.

    Copies are queued on the stream of the computation, in order with it, so that a buffer is never
    read before it is written nor written before it is read; they do not overlap with it.
    """

    def __init__(self, device: torch.device, pin: Callable[[Tensor], Tensor]) -> None:
        """Keep tensors of *device* in memory that *pin* pins."""
        self.device = device
        self.pin = pin
        self.free: dict[int, list[Tensor]] = {}

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep on the host what is saved within the context, parameters and small tensors apart."""
        with saved_tensors_hooks(self._pack, _unpack):
            yield

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.nbytes < _SMALLEST_MOVED or tensor.device != self.device or _is_weight(tensor):
            return tensor.detach()
        buffers = self.free.setdefault(tensor.nbytes, [])
        buffer = buffers.pop() if buffers else self._new_buffer(tensor.nbytes)
        return _OnHost(tensor, buffer, buffers)

    def _new_buffer(self, num_bytes: int) -> Tensor:
        return self.pin(torch.empty(num_bytes, dtype=torch.uint8, device="cpu"))


class _OnHost:
    """A tensor in a buffer, which is free again when nothing needs the tensor any more."""

    def __init__(self, tensor: Tensor, buffer: Tensor, free: list[Tensor]) -> None:
        order = torch.empty_like(tensor, device="meta").stride()
        self.host = buffer.view(tensor.dtype).as_strided(tensor.shape, order)
        self.host.copy_(tensor.detach(), non_blocking=True)
        self.device = tensor.device
        weakref.finalize(self, free.append, buffer)


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, _OnHost):
        return packed.host.to(packed.device, non_blocking=True, copy=True)
    assert isinstance(packed, Tensor)
    return packed


def _is_weight(tensor: Tensor) -> bool:
    base = tensor if tensor._base is None else tensor._base  # noqa: SLF001 - no public name
    return base.is_leaf and base.requires_grad
