"""Messages from rank 0 to all ranks: commands as whole numbers, broadcast before they are run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum

import torch
from torch import distributed
from torch.distributed import ProcessGroup

__all__ = ["Command", "Kind", "MessageChannel", "commands_in", "encoded"]

_HEADER = 512
"""Numbers of a message that are sent at once; longer messages need a second broadcast."""


class Kind(IntEnum):
    """Kind of a command, with its arguments.

    The caches of rank 0 have numbers.  A pass has the tokens [B, S] after its own arguments.
    """

    CLOSE = 0
    """End of the process."""
    IDLE = 1
    """Nothing, so that waiting ranks do not reach the time limit of a collective."""
    NEW_CACHE = 2
    """Cache, dtype."""
    DROP_CACHE = 3
    """Cache."""
    RESERVE = 4
    """Cache, slots, capacity."""
    RELEASE = 5
    """Cache."""
    MOVE = 6
    """Cache, source, target, length."""
    CLEAR = 7
    """Cache, slot."""
    SELECT = 8
    """Cache, length, slots."""
    WHOLE_PASS = 9
    """B, S: a pass without a cache."""
    FIRST_PASS = 10
    """B, S, cache, slots [B]."""
    FURTHER_PASS = 11
    """B, S, cache, slot, start."""
    NEXT_PASS = 12
    """B, S, cache, lengths [B]."""
    LOGITS = 13
    """Rows of hidden states that rank 0 broadcasts next."""


Command = tuple[Kind, Sequence[int]]


def encoded(commands: Sequence[Command]) -> list[int]:
    """Return commands as one list: kind, number of arguments, arguments, and so on."""
    return [one for kind, given in commands for one in (kind, len(given), *given)]


def commands_in(message: Sequence[int]) -> Iterator[Command]:
    """Yield the commands of a message."""
    at = 0
    while at < len(message):
        kind, count = message[at : at + 2]
        yield Kind(kind), message[at + 2 : at + 2 + count]
        at += 2 + count


class MessageChannel:
    """Broadcast of messages from rank 0 to all ranks of a run."""

    def __init__(self, device: torch.device, group: ProcessGroup | None = None) -> None:
        """Take the device of the collectives.

        Args:
            device: Device of this rank.
            group: Group of all ranks; None: the default group.
        """
        self._device, self._group = device, group

    def send(self, message: Sequence[int]) -> None:
        """Send a message; called by rank 0 only."""
        header = [len(message), *message[: _HEADER - 1]]
        header += [0] * (_HEADER - len(header))
        self._broadcast(torch.tensor(header, device=self._device))
        rest = message[_HEADER - 1 :]
        if rest:
            self._broadcast(torch.tensor(rest, device=self._device))

    def receive(self) -> list[int]:
        """Return the next message; called by the other ranks."""
        header = torch.empty(_HEADER, dtype=torch.int64, device=self._device)
        self._broadcast(header)
        size, *message = header.tolist()
        if size < len(message):
            return message[:size]
        rest = torch.empty(size - len(message), dtype=torch.int64, device=self._device)
        if len(rest):
            self._broadcast(rest)
        return message + rest.tolist()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        distributed.broadcast(tensor, 0, group=self._group)
