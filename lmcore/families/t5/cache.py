"""`T5Cache`: keys and values of a decoder's tokens and of the encoder's states, for generation.

Each sequence has a source, which is encoded once; the keys and values of cross-attention are kept.
Shapes: L slots, B sequences of a pass, K heads of keys, T tokens of the longest source, D head
channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmcore.families.layers.cache import KeyValueCache, SlotCache

if TYPE_CHECKING:
    from lmcore.families.t5.block import DecoderBlock
    from lmcore.model.shape import ModelShape

__all__ = ["DecoderView", "T5Cache"]


@dataclass(frozen=True)
class DecoderView(KeyValueCache):
    """View of a cache for one pass of the decoder.

    Attributes:
        num_keys: Number of the decoder's tokens that the longest sequence has after the pass.
        memory: Keys and values of the encoder's states in each layer, [B, K, T, D].
        memory_mask_B11T: True beyond the end of a sequence's source; None: all are as long.
    """

    num_keys: int = 0
    memory: Sequence[tuple[Tensor, Tensor]] = ()
    memory_mask_B11T: Tensor | None = None


class T5Cache(SlotCache):
    """Cache of a decoder with the encoder's output for each slot."""

    def __init__(
        self,
        shape: ModelShape,
        encode: Callable[[Tensor], Tensor],
        blocks: Sequence[DecoderBlock],
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Create an empty cache without memory.

        Args:
            shape: Sizes of the model.
            encode: Function that returns the encoder's states of token ids.
            blocks: Blocks of the decoder.
            device: Device of the cache.
            dtype: Dtype of keys and values.
        """
        self._encode, self._blocks = encode, blocks
        super().__init__(
            num_layers=len(blocks),
            num_heads=shape.num_query_groups,
            head_dim=shape.head_dim,
            device=device,
            dtype=dtype,
        )
        self._memory = [self._allocate(0, 0) for _ in blocks]
        self._sources: list[int] = []

    def reserve(self, num_slots: int, capacity: int) -> None:
        """Provide memory for that many sequences and positions; the content stays."""
        super().reserve(num_slots, capacity)
        self._sources += [0] * (self.num_slots - len(self._sources))

    def release(self) -> None:
        """Free all memory; the content is lost."""
        super().release()
        self._memory = [self._allocate(0, 0) for _ in self._memory]
        self._sources = []

    def set_source(self, slot: int, tokens: Sequence[int]) -> None:
        """Encode the input of a sequence, before any pass over its slot.

        Args:
            slot: Slot of the sequence.
            tokens: Token ids, at least one.

        Raises:
            RuntimeError: There is not enough memory.
        """
        states_1TH = self._encode(torch.tensor([list(tokens)], device=self._device))
        self._grow(len(tokens))
        for (k_LKTD, v_LKTD), block in zip(self._memory, self._blocks, strict=True):
            k_1KTD, v_1KTD = block.cross_attention.keys(states_1TH)
            k_LKTD[slot, :, : len(tokens)] = k_1KTD[0].to(self._dtype)
            v_LKTD[slot, :, : len(tokens)] = v_1KTD[0].to(self._dtype)
        self._sources[slot] = len(tokens)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first *length* positions of a slot, and its source, to another one."""
        super().move(source, target, length)
        for part in self._parts():
            part[target] = part[source]
        self._sources[target] = self._sources[source]

    def clear(self, slot: int) -> None:
        """Set the content of a slot to zero, since other numbers may be NaN or infinite."""
        super().clear(slot)
        for part in self._parts():
            part[slot : slot + 1] = 0

    def select(self, slots: Sequence[int], length: int) -> None:
        """Replace slot i by the content of slot `slots[i]`, with its source."""
        super().select(slots, length)
        index = torch.tensor(slots, device=self._device)
        for part in self._parts():
            part[: len(slots)] = part[index]
        self._sources[: len(slots)] = [self._sources[slot] for slot in slots]

    def first_tokens(self, slots: Sequence[int], width: int) -> DecoderView:
        """Return the view for the first tokens of some sequences; see `SlotCache`."""
        return self._view(super().first_tokens(slots, width), width, slots)

    def further_tokens(self, slot: int, start: int, width: int) -> DecoderView:
        """Return the view for tokens of one sequence after its first *start*."""
        return self._view(super().further_tokens(slot, start, width), start + width, [slot])

    def next_tokens(self, lengths: Sequence[int]) -> DecoderView:
        """Return the view for one more token of each sequence of the first slots."""
        view = super().next_tokens(lengths)
        return self._view(view, max(lengths) + 1, range(len(lengths)))

    def _view(self, view: KeyValueCache, num_keys: int, slots: Sequence[int]) -> DecoderView:
        lengths = [self._sources[slot] for slot in slots]
        longest = max(lengths)
        rows: slice | Tensor = (
            slice(slots.start, slots.stop)
            if isinstance(slots, range)
            else (torch.tensor(slots, device=self._device))
        )
        memory = [(k[rows, :, :longest], v[rows, :, :longest]) for k, v in self._memory]
        mask = None
        if min(lengths) < longest:
            end_B1 = torch.tensor(lengths, device=self._device)[:, None]
            mask = (torch.arange(longest, device=self._device) >= end_B1)[:, None, None]
        return DecoderView(view.layers, view.positions, view.mask_B11T, num_keys, memory, mask)

    def _grow(self, length: int) -> None:
        """Provide memory for a source of that length in every slot; the content stays."""
        slots, held = self.num_slots, self._memory[0][0].shape
        if held[0] >= slots and held[2] >= length:
            return
        grown = []
        for old in self._memory:
            new = self._allocate(slots, max(length, held[2]))
            for source, target in zip(old, new, strict=True):
                target[: held[0], :, : held[2]] = source
            grown.append(new)
        self._memory = grown

    def _parts(self) -> list[Tensor]:
        return [part for layer in self._memory for part in layer]
