"""Key-value caches of the tokens so far, for generation.

A `SlotCache` has a slot of memory for each sequence.  The sequences have different lengths; the
views that a forward pass takes are for the first tokens of several sequences, for further tokens of
one, and for one token of each.

Shapes: L slots, B sequences of a pass, K heads of keys, S new tokens, C positions of a slot, T all
tokens so far, D head channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lmcore.contract.generation_kernels import NextTokenAttention

__all__ = ["KeyValueCache", "LayerCache", "SlotCache"]


class LayerCache(Protocol):
    """Keys and values of one layer, as a forward pass sees them."""

    def extend(self, k_BKSD: Tensor, v_BKSD: Tensor) -> tuple[Tensor, Tensor]:
        """Append S positions and return all keys and values so far, [B, K, T, D] each."""
        ...

    def attend(
        self, attention: NextTokenAttention, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor
    ) -> Tensor | None:
        """Append one position and return the attention to all so far, [B, N, 1, D].

        None, and nothing is appended, if the view is not for one token of each of the first slots,
        or is of another dtype than the queries.
        """
        ...


@dataclass(frozen=True)
class KeyValueCache:
    """View of a cache for one forward pass of some sequences.

    Attributes:
        layers: Cache of each layer.
        positions: Position of each new token: [S] if it is the same in all sequences, or [B, S].
        mask_B11T: Mask, True for keys that a sequence does not have; None: it has all.
        key_positions_BT: Position of each key; None: its index, of all keys that a sequence has.
    """

    layers: Sequence[LayerCache]
    positions: Tensor
    mask_B11T: Tensor | None = None
    key_positions_BT: Tensor | None = field(default=None, kw_only=True)


class SlotCache:
    """Keys and values of every layer of a model, for sequences of different lengths.

    Attributes:
        num_slots: Number of sequences that have memory.
        capacity: Number of positions that each has.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Create an empty cache without memory.

        Args:
            num_layers: Number of layers.
            num_heads: Number of heads of keys and values.
            head_dim: Channels of a head.
            device: Device of the cache.
            dtype: Dtype of keys and values.
        """
        self.num_slots = self.capacity = 0
        self._heads, self._head_dim = num_heads, head_dim
        self._device, self._dtype = device, dtype
        self._layers = [self._allocate(0, 0) for _ in range(num_layers)]

    def reserve(self, num_slots: int, capacity: int) -> None:
        """Provide memory for that many sequences and positions; the content stays.

        Raises:
            RuntimeError: There is not enough memory; the cache is as before.
        """
        slots, positions = max(num_slots, self.num_slots), max(capacity, self.capacity)
        if (slots, positions) == (self.num_slots, self.capacity):
            return
        for number, old in enumerate(self._layers):
            new = self._allocate(slots, positions)
            for source, target in zip(old, new, strict=True):
                # A reservation that failed has left some layers larger.
                kept = source[: self.num_slots, :, : self.capacity]
                target[: self.num_slots, :, : self.capacity] = kept
            self._layers[number] = new
        self.num_slots, self.capacity = slots, positions

    def release(self) -> None:
        """Free all memory; the content is lost."""
        self.num_slots = self.capacity = 0
        self._layers = [self._allocate(0, 0) for _ in self._layers]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first *length* positions of a slot to another one."""
        for layer in self._layers:
            for part in layer:
                part[target, :, :length] = part[source, :, :length]

    def clear(self, slot: int) -> None:
        """Set the content of a slot to zero, since other numbers may be NaN or infinite."""
        for layer in self._layers:
            for part in layer:
                part[slot] = 0

    def select(self, slots: Sequence[int], length: int) -> None:
        """Replace slot i by the content of slot `slots[i]`, *length* positions each."""
        index = torch.tensor(slots, device=self._device)
        for layer in self._layers:
            for part in layer:
                part[: len(slots), :, :length] = part[index, :, :length]

    def first_tokens(self, slots: Sequence[int], width: int) -> KeyValueCache:
        """Return the view for the first tokens of some sequences, *width* each.

        Shorter sequences are padded at the end: causal attention hides these positions from the
        others, and further tokens overwrite them.

        Args:
            slots: Slot of each sequence.
            width: Number of tokens of the longest.
        """
        index = torch.tensor(slots, device=self._device)
        layers = [_FirstTokens(*layer, index) for layer in self._layers]
        return KeyValueCache(layers, torch.arange(width, device=self._device))

    def further_tokens(self, slot: int, start: int, width: int) -> KeyValueCache:
        """Return the view for tokens of one sequence after its first *start*.

        Args:
            slot: Slot of the sequence.
            start: Number of tokens before.
            width: Number of new tokens.
        """
        layers = [_Range(k[slot : slot + 1], v[slot : slot + 1], start) for k, v in self._layers]
        return KeyValueCache(layers, torch.arange(start, start + width, device=self._device))

    def next_tokens(self, lengths: Sequence[int]) -> KeyValueCache:
        """Return the view for one more token of each sequence of the first slots.

        Args:
            lengths: Number of tokens before, of the sequence of each slot.
        """
        count, shortest, longest = len(lengths), min(lengths), max(lengths)
        length_B = torch.tensor(lengths, device=self._device)
        if shortest == longest:
            layers: list[LayerCache] = [
                _Range(k[:count], v[:count], longest, length_B) for k, v in self._layers
            ]
            return KeyValueCache(layers, length_B[:1])
        row_B = torch.arange(count, device=self._device)
        layers = [
            _OneToken(k[:count], v[:count], row_B, length_B, longest + 1) for k, v in self._layers
        ]
        mask_BT = torch.arange(longest + 1, device=self._device) > length_B[:, None]
        return KeyValueCache(layers, length_B[:, None], mask_BT[:, None, None])

    def branches(self, slots: Sequence[int], lengths: Sequence[int], width: int) -> KeyValueCache:
        """Return the view for several continuations of sequences, which are not extended by them.

        A sequence may have any number of continuations.  Shorter ones are padded at the end.

        Args:
            slots: Slot of the sequence of each continuation.
            lengths: Number of tokens of that sequence.
            width: Number of tokens of the longest continuation.
        """
        index, longest = torch.tensor(slots, device=self._device), max(lengths)
        layers = [_Branches(k[index, :, :longest], v[index, :, :longest]) for k, v in self._layers]
        length_B1 = torch.tensor(lengths, device=self._device)[:, None]
        places_BS = length_B1 + torch.arange(width, device=self._device)
        if min(lengths) == longest:
            return KeyValueCache(layers, places_BS)
        key_T = torch.arange(longest + width, device=self._device)
        mask_BT = (key_T >= length_B1) & (key_T < longest)
        mask_BST = mask_BT[:, None].expand(-1, width, -1)
        key_BT = torch.where(key_T < longest, key_T, key_T - longest + length_B1)
        return KeyValueCache(layers, places_BS, mask_BST[:, None], key_positions_BT=key_BT)

    def _allocate(self, slots: int, positions: int) -> tuple[Tensor, Tensor]:
        shape = (slots, self._heads, positions, self._head_dim)
        # Zeros: attention multiplies masked values by zero, and zero times NaN is NaN.
        k_LKCD = torch.zeros(shape, device=self._device, dtype=self._dtype)
        return k_LKCD, torch.zeros_like(k_LKCD)


@dataclass(frozen=True)
class _Range:
    """Sequences of the same length."""

    k_BKCD: Tensor
    v_BKCD: Tensor
    start: int
    length_B: Tensor | None = None
    """The start of each sequence, for one new token; None: for any number of them."""

    def extend(self, k_BKSD: Tensor, v_BKSD: Tensor) -> tuple[Tensor, Tensor]:
        end = self.start + k_BKSD.shape[2]
        self.k_BKCD[:, :, self.start : end] = k_BKSD
        self.v_BKCD[:, :, self.start : end] = v_BKSD
        return self.k_BKCD[:, :, :end], self.v_BKCD[:, :, :end]

    def attend(
        self, attention: NextTokenAttention, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor
    ) -> Tensor | None:
        if self.length_B is None:
            return None
        slots = (self.k_BKCD, self.v_BKCD, self.length_B, self.start)
        return _attend(attention, q_BNSD, k_BKSD, v_BKSD, *slots)


@dataclass(frozen=True)
class _FirstTokens:
    """First tokens of sequences in any slots."""

    k_LKCD: Tensor
    v_LKCD: Tensor
    slot_B: Tensor

    def extend(self, k_BKSD: Tensor, v_BKSD: Tensor) -> tuple[Tensor, Tensor]:
        width = k_BKSD.shape[2]
        self.k_LKCD[self.slot_B, :, :width] = k_BKSD.to(self.k_LKCD.dtype)
        self.v_LKCD[self.slot_B, :, :width] = v_BKSD.to(self.v_LKCD.dtype)
        return k_BKSD, v_BKSD

    def attend(self, *_arguments: object) -> None:
        """Return None: these are not the next tokens."""


@dataclass(frozen=True)
class _Branches:
    """Sequences that stay as they are, each before one continuation."""

    k_BKCD: Tensor
    v_BKCD: Tensor

    def extend(self, k_BKSD: Tensor, v_BKSD: Tensor) -> tuple[Tensor, Tensor]:
        held, new = (self.k_BKCD, self.v_BKCD), (k_BKSD, v_BKSD)
        k_BKTD, v_BKTD = (
            torch.cat((a.to(b.dtype), b), dim=2) for a, b in zip(held, new, strict=True)
        )
        return k_BKTD, v_BKTD

    def attend(self, *_arguments: object) -> None:
        """Return None: these are not the next tokens of slots."""


@dataclass(frozen=True)
class _OneToken:
    """One token each of sequences of different lengths."""

    k_BKCD: Tensor
    v_BKCD: Tensor
    row_B: Tensor
    length_B: Tensor
    end: int

    def extend(self, k_BK1D: Tensor, v_BK1D: Tensor) -> tuple[Tensor, Tensor]:
        self.k_BKCD[self.row_B, :, self.length_B] = k_BK1D[:, :, 0].to(self.k_BKCD.dtype)
        self.v_BKCD[self.row_B, :, self.length_B] = v_BK1D[:, :, 0].to(self.v_BKCD.dtype)
        return self.k_BKCD[:, :, : self.end], self.v_BKCD[:, :, : self.end]

    def attend(
        self, attention: NextTokenAttention, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor
    ) -> Tensor | None:
        slots = (self.k_BKCD, self.v_BKCD, self.length_B, self.end - 1)
        return _attend(attention, q_BNSD, k_BKSD, v_BKSD, *slots)


def _attend(
    attention: NextTokenAttention,
    q_BN1D: Tensor,
    k_BK1D: Tensor,
    v_BK1D: Tensor,
    k_BKCD: Tensor,
    v_BKCD: Tensor,
    length_B: Tensor,
    longest: int,
) -> Tensor | None:
    """Return the attention of one token of each sequence, [B, N, 1, D]; None for other dtypes."""
    if any(one.dtype != k_BKCD.dtype for one in (q_BN1D, k_BK1D, v_BK1D)):
        return None
    q_BND, k_BKD, v_BKD = q_BN1D.squeeze(2), k_BK1D.squeeze(2), v_BK1D.squeeze(2)
    return attention(q_BND, k_BKD, v_BKD, k_BKCD, v_BKCD, length_B, longest).unsqueeze(2)
