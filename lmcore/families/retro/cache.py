"""`RetroCache`: keys and values of the tokens so far, and of the neighbours of complete chunks.

A chunk's neighbours are encoded when a token first reads them; then their keys and values are kept
until the next chunk is complete.  The encoder attends to the chunk, whose states are kept.

Shapes: I slots, B sequences of a pass, S new tokens, L chunks of a text, M tokens of a chunk,
K neighbours, R tokens of a neighbour, T = K * R, C chunks that are encoded together, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmcore.families.layers.cache import KeyValueCache, SlotCache
from lmcore.families.retro.block import Memory, Readers, ReadingBlock
from lmcore.families.retro.family import retrieved_length

if TYPE_CHECKING:
    from lmcore.model.shape import ModelShape

__all__ = ["RetroCache", "RetroView"]

_NOTHING = -1
"""Number of no chunk; also the id of padding in neighbours."""

_nothing = torch.zeros_like
Encode = Callable[[Tensor, Tensor | None, Tensor], Memory]


@dataclass(frozen=True)
class RetroView(KeyValueCache):
    """View of a cache for one pass.

    Attributes:
        read: Function of a block and its normalized hidden states that returns what is read from
            neighbours, [B, S, H]; called with the blocks that read, in order.
    """

    read: Callable[[ReadingBlock, Tensor], Tensor] = lambda _, normal_BSH: _nothing(normal_BSH)


class RetroCache(SlotCache):
    """Cache with the neighbours of each slot's text."""

    def __init__(
        self,
        shape: ModelShape,
        encode: Encode,
        blocks: Sequence[ReadingBlock],
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Create an empty cache without memory.

        Args:
            shape: Sizes of the model.
            encode: Function that encodes neighbours; see `Retro.encode`.
            blocks: Blocks that read neighbours, in order.
            device: Device of the cache.
            dtype: Dtype of keys and values.
        """
        super().__init__(
            num_layers=shape.num_layers,
            num_heads=shape.num_query_groups,
            head_dim=shape.head_dim,
            device=device,
            dtype=dtype,
        )
        self._encode, self._blocks = encode, list(blocks)
        self._chunk: int = shape.own["retro_chunk_length"]
        self._each = (shape.own["retro_num_neighbors"], retrieved_length(shape))
        self._hidden_size = shape.hidden_size
        self._neighbors: list[Tensor | None] = []
        self._encoded: list[int] = []
        self._states: Tensor | None = None
        self._keys: list[tuple[Tensor, Tensor]] = []
        self._padding = torch.ones(0, 0)

    def set_source(self, slot: int, tokens: Sequence[int]) -> None:
        """Take the neighbours of a sequence's text, before any pass over its slot.

        Args:
            slot: Slot of the sequence.
            tokens: Token ids of the neighbours of each chunk, one after another; negative: padding.
                Chunks after the last have none.

        Raises:
            RuntimeError: There is not enough memory.
        """
        self._encoded[slot], self._neighbors[slot] = _NOTHING, None
        if not len(tokens):
            return
        self._grow()
        found = torch.tensor(tokens, device=self._device)
        self._neighbors[slot] = found.view(-1, *self._each)

    def reserve(self, num_slots: int, capacity: int) -> None:
        """Provide memory for that many sequences and positions; the content stays."""
        super().reserve(num_slots, capacity)
        more = self.num_slots - len(self._encoded)
        self._encoded += [_NOTHING] * more
        self._neighbors += [None] * more
        if self._states is not None:
            self._grow()

    def release(self) -> None:
        """Free all memory; the content is lost."""
        super().release()
        self._neighbors, self._encoded, self._states, self._keys = [], [], None, []

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first *length* positions of a slot, and its neighbours, to another one."""
        super().move(source, target, length)
        self._encoded[target] = self._encoded[source]
        self._neighbors[target] = self._neighbors[source]
        for part in self._parts():
            part[target] = part[source]

    def clear(self, slot: int) -> None:
        """Set the content of a slot to zero, since other numbers may be NaN or infinite."""
        super().clear(slot)
        self._encoded[slot] = _NOTHING
        for part in self._parts():
            part[slot] = 0

    def select(self, slots: Sequence[int], length: int) -> None:
        """Replace slot i by the content of slot `slots[i]`, with its neighbours."""
        super().select(slots, length)
        self._encoded[: len(slots)] = [self._encoded[slot] for slot in slots]
        self._neighbors[: len(slots)] = [self._neighbors[slot] for slot in slots]
        index = torch.tensor(slots, device=self._device)
        for part in self._parts():
            part[: len(slots)] = part[index]

    def first_tokens(self, slots: Sequence[int], width: int) -> RetroView:
        """Return the view for the first tokens of some sequences; see `SlotCache`."""
        return self._span(super().first_tokens(slots, width), slots, 0, width)

    def further_tokens(self, slot: int, start: int, width: int) -> RetroView:
        """Return the view for tokens of one sequence after its first *start*."""
        return self._span(super().further_tokens(slot, start, width), [slot], start, width)

    def next_tokens(self, lengths: Sequence[int]) -> RetroView:
        """Return the view for one more token of each sequence of the first slots."""
        view = super().next_tokens(lengths)
        if self._states is None:
            return RetroView(view.layers, view.positions, view.mask_B11T)
        reading = [
            (length + 1) // self._chunk - 1 if self._neighbors[slot] is not None else _NOTHING
            for slot, length in enumerate(lengths)
        ]
        row_B = torch.arange(len(lengths), device=self._device)
        length_B = torch.tensor(lengths, device=self._device)
        active_B1 = torch.tensor(reading, device=self._device)[:, None] >= 0

        def read(block: ReadingBlock, normal_B1H: Tensor) -> Tensor:
            if block is self._blocks[0]:
                assert self._states is not None
                self._states[row_B, length_B] = normal_B1H[:, 0].to(self._dtype)
                self._encode_chunks(reading)
            if max(reading) < 0:
                return _nothing(normal_B1H)
            padding_BT = self._padding[: len(lengths)] | ~active_B1
            keys = self._keys[self._blocks.index(block)]
            attention = block.cross_attention
            own = (keys[0][: len(lengths)], keys[1][: len(lengths)])
            branch_B1H = attention.read(normal_B1H, own, padding_BT[:, None, None])
            return block.gated(branch_B1H, padding_BT)

        return RetroView(view.layers, view.positions, view.mask_B11T, read)

    def _span(self, view: KeyValueCache, slots: Sequence[int], start: int, width: int) -> RetroView:
        """Return the view for consecutive tokens of some sequences."""
        for slot in slots:
            self._encoded[slot] = _NOTHING  # another token may have been in the place of these
        if self._states is None:
            return RetroView(view.layers, view.positions, view.mask_B11T)
        readers = Readers(start, width, self._chunk)
        index = torch.tensor(slots, device=self._device)
        first, end = readers.first, readers.first + readers.groups
        read_by = any(self._neighbors[slot] is not None for slot in slots) and end > first
        found: list[Memory] = []

        def read(block: ReadingBlock, normal_BSH: Tensor) -> Tensor:
            assert self._states is not None
            if block is self._blocks[0]:
                self._states[index, start : start + width] = normal_BSH.to(self._dtype)
                if read_by:
                    chunks = [(slot, chunk) for slot in slots for chunk in range(first, end)]
                    found.append(self._memory(chunks))
            return block.read(normal_BSH, found[0], start) if read_by else _nothing(normal_BSH)

        return RetroView(view.layers, view.positions, view.mask_B11T, read)

    def _encode_chunks(self, reading: Sequence[int]) -> None:
        """Keep the keys and values of the chunk that the token of each first slot reads."""
        wanted = [
            (slot, chunk)
            for slot, chunk in enumerate(reading)
            if chunk >= 0 and self._encoded[slot] != chunk
        ]
        if not wanted:
            return
        memory = self._memory(wanted)
        index = torch.tensor([slot for slot, _ in wanted], device=self._device)
        for block, kept in zip(self._blocks, self._keys, strict=True):
            for new, held in zip(block.cross_attention.keys(memory.states_CTH), kept, strict=True):
                held[index] = new.to(self._dtype)
        assert memory.padding_CT is not None
        self._padding[index] = memory.padding_CT
        for slot, chunk in wanted:
            self._encoded[slot] = chunk

    def _memory(self, chunks: Sequence[tuple[int, int]]) -> Memory:
        """Return the encoded neighbours of chunks, given by slot and number."""
        assert self._states is not None
        tokens, states = [], []
        for slot, chunk in chunks:
            held = self._neighbors[slot]
            none = torch.full(self._each, _NOTHING, device=self._device)
            tokens.append(none if held is None or chunk >= len(held) else held[chunk])
            states.append(self._states[slot, chunk * self._chunk : (chunk + 1) * self._chunk])
        tokens_CKR = torch.stack(tokens)
        padding_CKR = tokens_CKR < 0
        return self._encode(tokens_CKR.clamp(min=0), padding_CKR, torch.stack(states))

    def _grow(self) -> None:
        """Provide memory for states, keys and values of every slot; the content stays."""
        slots, held = self.num_slots, self._states
        size = (slots, self.capacity, self._hidden_size)
        if held is not None and held.shape == size:
            return
        self._states = torch.zeros(size, device=self._device, dtype=self._dtype)
        length = self._each[0] * self._each[1]
        keys = [self._allocate(slots, length) for _ in self._blocks]
        padding = torch.ones(slots, length, dtype=torch.bool, device=self._device)
        if held is not None:
            self._states[: held.shape[0], : held.shape[1]] = held
            for old, new in zip(self._keys, keys, strict=True):
                for source, target in zip(old, new, strict=True):
                    target[: len(source)] = source
            padding[: len(self._padding)] = self._padding
        self._keys, self._padding = keys, padding

    def _parts(self) -> list[Tensor]:
        if self._states is None:
            return []
        return [self._states, self._padding, *(part for layer in self._keys for part in layer)]
