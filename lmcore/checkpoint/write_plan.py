"""Who writes what of a checkpoint: each piece once, by one of the processes that hold it.

A process may hold parts of tensors, and several may hold the same.  Pieces are boxes of whole
tensors, none much larger than `_LARGEST_BYTES`: so that many processes and threads write at a
time, and a process that loads a part of a tensor reads little else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lmcore.checkpoint.chunks import Box, tile
from lmcore.checkpoint.manifest import TensorEntry
from lmcore.runtime.process.channel import Channel

if TYPE_CHECKING:
    from torch import Tensor

    from lmcore.parallel.tensor_layout import Chunk, TensorLayout
    from lmcore.runtime.process.store import Rendezvous

__all__ = ["Share", "Writers", "num_bytes"]

_LARGEST_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Share:
    """What a process writes of a checkpoint.

    Attributes:
        own: Name and box of each piece of this process, by a key of its own.
        tensors: All tensors of the checkpoint; on rank 0 only.
        pieces: Name and box of every process's pieces, in the order in which it has them; on
            rank 0 only.
    """

    own: Mapping[str, tuple[str, Chunk]]
    tensors: Mapping[str, TensorEntry]
    pieces: Sequence[Sequence[tuple[str, Box]]]

    def views(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return views of the pieces by key, from the process's tensors."""
        from lmcore.parallel.tensor_layout import box

        return {
            key: box(tensors[name].detach(), piece.start, piece.size)
            for key, (name, piece) in self.own.items()
        }


class Writers:
    """The processes that write checkpoints together, and what each of them writes.

    Attributes:
        saves: For the exchanges of a save, which may be in a thread.
        loads: For the exchanges of a load.
    """

    def __init__(self, rendezvous: Rendezvous | None = None) -> None:
        """Connect them; all processes must do it, in the same order.

        Args:
            rendezvous: The connection of the processes; None where this is the only one.
        """
        self.saves, self.loads = Channel(rendezvous), Channel(rendezvous)
        self._plans = Channel(rendezvous)
        self._known: tuple[dict[str, Any], Share] | None = None

    def share(self, tensors: Mapping[str, Tensor], layouts: Mapping[str, TensorLayout]) -> Share:
        """Return what this process writes; all processes must call it.

        Nothing is exchanged where all hold what they held before: names and layouts must change
        in all processes at a time.

        Args:
            tensors: What this process holds, by name; plain tensors with values.
            layouts: Which part of the whole each of them is; those that are not named are whole.

        Raises:
            ValueError: The processes' parts do not make whole tensors (a bug).
        """
        pieces: dict[str, list[Chunk]] = {}
        offer: dict[str, Any] = {}
        for name, tensor in tensors.items():
            layout = _layout(name, tensor, layouts)
            cut = [part for one in layout.chunks for part in _cut(one, tensor.element_size())]
            boxes = [[list(piece.offset), list(piece.size)] for piece in cut]
            dtype = str(tensor.dtype).removeprefix("torch.")
            pieces[name], offer[name] = cut, [dtype, list(layout.shape), boxes]
        if self._known is not None and self._known[0] == offer:
            return self._known[1]
        plan = _Plan()
        chosen = self._plans.exchange(lambda: offer, plan.divide, "the pieces of a checkpoint")
        own = {}
        for name, number in chosen:
            key = name if len(pieces[name]) == 1 else f"{name}#{number}"
            own[key] = (name, pieces[name][number])
        found = Share(own, plan.tensors, plan.pieces)
        self._known = (offer, found)
        return found


class _Plan:
    """Divides pieces among those that hold them; used on rank 0."""

    def __init__(self) -> None:
        self.tensors: dict[str, TensorEntry] = {}
        self.pieces: list[list[tuple[str, Box]]] = []

    def divide(self, offers: list[dict[str, Any]]) -> list[list[tuple[str, int]]]:
        """Return for each rank which of its pieces it writes: name, and number of the piece."""
        holders: dict[tuple[str, Box], list[tuple[int, int]]] = {}
        for rank, offer in enumerate(offers):
            for name, (dtype, shape, boxes) in offer.items():
                entry = TensorEntry(dtype, tuple(shape))
                if self.tensors.setdefault(name, entry) != entry:
                    raise ValueError(f"`{name}` differs between processes: {entry}")
                for number, (offset, size) in enumerate(boxes):
                    key = (name, Box(tuple(offset), tuple(size)))
                    holders.setdefault(key, []).append((rank, number))
        self.tensors = dict(sorted(self.tensors.items()))
        self._check(holders)
        chosen = self._spread(holders, len(offers))
        self.pieces = [[(name, box) for name, box, _ in own] for own in chosen]
        return [[(name, number) for name, _, number in own] for own in chosen]

    def _check(self, holders: Mapping[tuple[str, Box], Any]) -> None:
        boxes: dict[str, list[Box]] = {name: [] for name in self.tensors}
        for name, box in holders:
            boxes[name].append(box)
        for name, entry in self.tensors.items():
            if not tile(boxes[name], entry.shape):
                raise ValueError(f"the processes' parts of `{name}` do not make a whole tensor")

    def _spread(
        self, holders: Mapping[tuple[str, Box], list[tuple[int, int]]], count: int
    ) -> list[list[tuple[str, Box, int]]]:
        """Give each piece to the one of its holders that has least, the largest pieces first."""
        loads, chosen = [0] * count, [[] for _ in range(count)]  # type: ignore[var-annotated]
        sized = [
            (num_bytes(TensorEntry(self.tensors[name].dtype, box.size)), (name, box))
            for name, box in holders
        ]
        for size, key in sorted(sized, key=lambda one: -one[0]):
            rank, number = min(holders[key], key=lambda one: loads[one[0]])
            loads[rank] += size
            chosen[rank].append((*key, number))
        return [sorted(own) for own in chosen]


def _layout(name: str, tensor: Tensor, layouts: Mapping[str, TensorLayout]) -> TensorLayout:
    from lmcore.parallel.tensor_layout import TensorLayout

    return layouts.get(name) or TensorLayout.whole(tuple(tensor.shape))


def _cut(piece: Chunk, item_size: int) -> list[Chunk]:
    """Cut a large piece along its first dim."""
    size = math.prod(piece.size) * item_size
    if size <= _LARGEST_BYTES or not piece.size:
        return [piece]
    length, rest = piece.size[0], piece.size[1:]
    rows = max(1, _LARGEST_BYTES * length // size)
    return [
        replace(
            piece,
            start=(piece.start[0] + first, *piece.start[1:]),
            offset=(piece.offset[0] + first, *piece.offset[1:]),
            size=(min(rows, length - first), *rest),
        )
        for first in range(0, length, rows)
    ]


def num_bytes(entry: TensorEntry) -> int:
    """Return the bytes of a tensor."""
    import torch

    size: int = getattr(torch, entry.dtype).itemsize
    return math.prod(entry.shape) * size
