"""Level 5: `Device.next_token_attention`, attention of new tokens over a key-value cache.

Shapes: B sequences, N query heads, K heads of keys and values, D channels of a head, L slots, C
positions of a slot, P heads of queries, keys and values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmcore.base.errors import counted
from lmcore_conformance.case_findings import CaseFindings
from lmcore_conformance.op.call import SPECS, difference, dtypes_of
from lmcore_conformance.registry import check

if TYPE_CHECKING:
    from lmcore.contract import NextTokenAttention
    from lmcore_conformance.bench import Bench

_check = partial(check, level="L5", group="device", requires=["next_token_attention"])

_HEADS = ((4, 4), (6, 2), (5, 1))
"""Heads of queries, and of keys and values."""
_CHANNELS = (8, 64, 80)
_MORE_CHANNELS = (1, 3, 24, 128, 256, 264, 512)
_LENGTHS = (0, 9, 15, 3)
"""Tokens of each sequence before the new one."""
_LONG_LENGTHS = (300, 0, 127, 128)
_LONGEST_LENGTHS = (1_500, 5_000)
_EARLY = 4.0
"""Added to the values of a long sequence's first tokens: without them the attention is another."""
_DTYPES = tuple(SPECS["attention"].tolerances)
_FREE_SLOTS = 2
_NAN = float("nan")


@dataclass(frozen=True)
class _Case:
    """Numbers of a call, in float64 on the host.

    Attributes:
        dtype: Name of the dtype, which has all the numbers.
        packed_BPD: Queries, keys and values of the new tokens.
        heads: Heads of queries, and of keys and values.
        k_LKCD, v_LKCD: Slots.  NaN beyond the tokens of a sequence, and in slots without one.
        lengths: Tokens of each sequence before the new one.
    """

    dtype: str
    packed_BPD: Tensor
    heads: tuple[int, int]
    k_LKCD: Tensor
    v_LKCD: Tensor
    lengths: tuple[int, ...]

    @property
    def label(self) -> str:
        """The case, in words."""
        queries, keys = self.heads
        channels, longest = self.packed_BPD.shape[2], max(self.lengths)
        heads = counted(queries, "head")
        return f"{self.dtype}, {heads} on {keys} of {channels}, up to {longest} tokens"

    @property
    def new(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, N, D], keys and values [B, K, D] of the new tokens."""
        queries, keys = self.heads
        q_BND, k_BKD, v_BKD = self.packed_BPD.split([queries, keys, keys], dim=1)
        return q_BND, k_BKD, v_BKD

    @property
    def expected(self) -> Tensor:
        """Attention of each new token, [B, N, D]."""
        q_BND, k_BKD, v_BKD = self.new
        repeats = self.heads[0] // self.heads[1]
        rows = []
        for row, length in enumerate(self.lengths):
            k_KTD = torch.cat([self.k_LKCD[row, :, :length], k_BKD[row].unsqueeze(1)], 1)
            v_KTD = torch.cat([self.v_LKCD[row, :, :length], v_BKD[row].unsqueeze(1)], 1)
            k_NTD, v_NTD = (one.repeat_interleave(repeats, 0) for one in (k_KTD, v_KTD))
            score_NT = (k_NTD @ q_BND[row].unsqueeze(2)).squeeze(2) * k_NTD.shape[2] ** -0.5
            rows.append((score_NT.softmax(1).unsqueeze(1) @ v_NTD).squeeze(1))
        return torch.stack(rows)

    def slots_after(self) -> tuple[Tensor, Tensor]:
        """Return the slots with the new keys and values."""
        k_LKCD, v_LKCD = self.k_LKCD.clone(), self.v_LKCD.clone()
        _, k_BKD, v_BKD = self.new
        for row, length in enumerate(self.lengths):
            k_LKCD[row, :, length], v_LKCD[row, :, length] = k_BKD[row], v_BKD[row]
        return k_LKCD, v_LKCD

    def call(self, bench: Bench, attend: NextTokenAttention) -> tuple[Tensor, Tensor, Tensor]:
        """Return attention and slots of the device, on the host."""
        dtype = getattr(torch, self.dtype)
        queries, keys = self.heads
        packed_BPD, k_LKCD, v_LKCD = (
            one.to(bench.torch_device, dtype) for one in (self.packed_BPD, self.k_LKCD, self.v_LKCD)
        )
        length_B = torch.tensor(self.lengths, device=bench.torch_device)
        q_BND, k_BKD, v_BKD = packed_BPD.split([queries, keys, keys], dim=1)
        longest = max(self.lengths)
        out_BND = attend(q_BND, k_BKD, v_BKD, k_LKCD, v_LKCD, length_B, longest)
        if out_BND.dtype != dtype:
            raise TypeError(f"the attention is {out_BND.dtype}, not {dtype}")
        return bench.host(out_BND), bench.host(k_LKCD), bench.host(v_LKCD)


def _case(
    bench: Bench,
    dtype: str,
    heads: tuple[int, int],
    channels: int,
    lengths: tuple[int, ...] = _LENGTHS,
) -> _Case:
    def rounded(*shape: int, seed: int) -> Tensor:
        return bench.values(*shape, seed=seed).to(getattr(torch, dtype)).double()

    queries, keys = heads
    slots = (len(lengths) + _FREE_SLOTS, keys, max(lengths) + 1, channels)
    k_LKCD, v_LKCD = rounded(*slots, seed=21), rounded(*slots, seed=22)
    for row, length in enumerate(lengths):
        if length > 1_000:
            early = v_LKCD[row, :, : length // 8] + _EARLY
            v_LKCD[row, :, : length // 8] = early.to(getattr(torch, dtype)).double()
    for row in range(slots[0]):
        length = lengths[row] if row < len(lengths) else 0
        k_LKCD[row, :, length:] = v_LKCD[row, :, length:] = _NAN
    packed_BPD = rounded(len(lengths), queries + 2 * keys, channels, seed=23)
    return _Case(dtype, packed_BPD, heads, k_LKCD, v_LKCD, lengths)


def _cases(bench: Bench) -> Iterator[_Case]:
    """Yield cases in each dtype of the device."""
    for dtype in dtypes_of(bench):
        for heads, channels in itertools.product(_HEADS, _CHANNELS):
            yield _case(bench, dtype, heads, channels)
        yield _case(bench, dtype, (4, 2), 64, _LONG_LENGTHS)
        yield _case(bench, dtype, (1, 1), 16, _LONGEST_LENGTHS)


def _each(bench: Bench, cases: Iterator[_Case], fault: Callable[..., str | None]) -> str:
    """Call *fault* with the device's function for each case; return a line on the cases."""
    make = bench.device.next_token_attention
    assert make is not None
    found = CaseFindings()
    with torch.no_grad():
        for case in cases:
            with found.case(case.label):
                attend = make(getattr(torch, case.dtype), case.packed_BPD.shape[2])
                if attend is None:
                    found.refused += 1
                    continue
                found.tried += 1
                found.add(case.label, fault(bench, case, attend))
    return found.conclude()


def _value_fault(bench: Bench, case: _Case, attend: NextTokenAttention) -> str | None:
    out_BND, _, _ = case.call(bench, attend)
    wrong = difference(out_BND, case.expected, "attention", case.dtype)
    return f"the attention {wrong}" if wrong else None


@_check(
    "extras.next-token-attention",
    "`next_token_attention` computes the attention of each new token to the tokens of its slot and"
    " to itself; positions beyond are not read, whatever they hold.",
    reason="Generation calls it for each token of each layer.",
    seconds=120,
)
def next_token_attention(bench: Bench) -> str:
    """Compare with float64, in every dtype of the device, with NaN beyond the tokens."""
    return _each(bench, _cases(bench), _value_fault)


@_check(
    "extras.next-token-slots",
    "`next_token_attention` writes the new key and value behind the tokens of each slot, and"
    " nothing else.",
    reason="The next call reads them, and free slots get other sequences.",
    seconds=120,
)
def next_token_slots(bench: Bench) -> str:
    """Compare every position of all slots, bit by bit."""
    return _each(bench, _cases(bench), _slot_fault)


def _slot_fault(bench: Bench, case: _Case, attend: NextTokenAttention) -> str | None:
    _, *found = case.call(bench, attend)
    for name, slots, wanted in zip(("key", "value"), found, case.slots_after(), strict=True):
        same = (slots == wanted) | (slots.isnan() & wanted.isnan())
        if bool(same.all()):
            continue
        slot, _, position, _ = (int(place) for place in (~same).nonzero()[0])
        if slot >= len(case.lengths):
            return f"a {name} is written into slot {slot}, which has no sequence"
        length = case.lengths[slot]
        if position == length:
            return f"the new {name} is not in slot {slot} at position {position}"
        return f"a {name} of slot {slot} at position {position} was changed; it has {length} tokens"
    return None


@_check(
    "extras.next-token-rows",
    "A sequence of `next_token_attention` does not depend on the sequences beside it, whatever they"
    " hold.",
    reason="Sequences that are decoded together must not change each other.",
    seconds=120,
)
def next_token_rows(bench: Bench) -> str:
    """Put NaN into every second sequence, and compare the others with float64."""
    return _each(bench, _cases(bench), _row_fault)


def _row_fault(bench: Bench, case: _Case, attend: NextTokenAttention) -> str | None:
    wanted_BND = case.expected[1::2]
    sequences = len(case.lengths)
    case.packed_BPD[::2] = _NAN
    case.k_LKCD[:sequences:2] = case.v_LKCD[:sequences:2] = _NAN
    out_BND, _, _ = case.call(bench, attend)
    wrong = difference(out_BND[1::2], wanted_BND, "attention", case.dtype)
    return f"beside a sequence of NaN the attention {wrong}" if wrong else None


@_check(
    "extras.next-token-refusals",
    "`next_token_attention` returns None for dtypes and head sizes that it has no kernel for; its"
    " functions for all others are right.",
    reason="If there is no kernel, the core computes attention by its op.",
    seconds=120,
)
def next_token_refusals(bench: Bench) -> str:
    """Ask for unusual sizes, in dtypes of the device and others; compare what is offered."""
    cases = (
        _case(bench, dtype, (2, 1), channels)
        for dtype, channels in itertools.product(_DTYPES, _MORE_CHANNELS)
    )
    return _each(bench, cases, _value_fault)
