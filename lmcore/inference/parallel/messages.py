"""Messages from rank 0 to all ranks: calls of methods, broadcast before they are made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.distributed import ProcessGroup

__all__ = ["Call", "MessageChannel"]

_HEADER = 4096
"""Bytes of a message that are sent at once; longer messages need a second broadcast."""
_WORD = 8
"""Bytes of a number of int64, which every backend broadcasts."""


class Call(NamedTuple):
    """Call of a method that every rank makes.

    Attributes:
        cache: Number of the cache that has the method; None: `PartRunner` has it.
        method: Name of the method.
        arguments: Its arguments, which JSON can have.
    """

    cache: int | None
    method: str
    arguments: Sequence[Any] = ()


class MessageChannel:
    """Broadcast of messages from the first rank of a model to all of its ranks.

    A message is a list of calls; None says that the model is closed.
    """

    def __init__(
        self, device: torch.device, group: ProcessGroup | None = None, first: int = 0
    ) -> None:
        """Take the device of the collectives.

        Args:
            device: Device of this rank.
            group: Group of the model's ranks; None: the default group.
            first: First of them.
        """
        self._device, self._group, self._first = device, group, first

    def send(self, message: Sequence[Call] | None) -> None:
        """Send a message; called by the first rank only."""
        text = json.dumps(message, separators=(",", ":")).encode()
        text = len(text).to_bytes(_WORD, "little") + text
        self._broadcast(self._words(text[:_HEADER].ljust(_HEADER)))
        if rest := text[_HEADER:]:
            self._broadcast(self._words(rest.ljust(-(-len(rest) // _WORD) * _WORD)))

    def receive(self) -> list[Call] | None:
        """Return the next message; called by the other ranks."""
        text = self._received(_HEADER)
        size = int.from_bytes(text[:_WORD], "little")
        text = text[_WORD:]
        if size > len(text):
            text += self._received(size - len(text))
        message = json.loads(text[:size])
        return None if message is None else [Call(*call) for call in message]

    def _words(self, text: bytes) -> torch.Tensor:
        """Return bytes, a multiple of the size of a number, as numbers on the device."""
        return torch.frombuffer(bytearray(text), dtype=torch.int64).to(self._device)

    def _received(self, size: int) -> bytes:
        """Return the bytes of the next broadcast, at least *size*."""
        words = torch.empty(-(-size // _WORD), dtype=torch.int64, device=self._device)
        self._broadcast(words)
        return words.cpu().numpy().tobytes()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        distributed.broadcast(tensor, self._first, group=self._group)
