"""Checksums of bits: equal for equal bits however they are stored, other for any other bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lmcore.parallel import bit_checksum
from lmcore.parallel.bit_checksum import BitChecksum, bits

CPU = torch.device("cpu")
CHECKSUM = BitChecksum(CPU)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8]


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return some tensors of several shapes, whose elements are all different."""
    numbers = torch.arange(1, 201)
    return [part.to(dtype) for part in (numbers[:7], numbers[7:107].view(4, 25), numbers[107])]


def of(found: list[Tensor]) -> int:
    return int(CHECKSUM(found))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [(0, 0), (1, 99), (2, 0)])
def test_one_ulp(dtype: torch.dtype, place: tuple[int, int]) -> None:
    """The last bit of any element changes the checksum."""
    before = of(tensors(dtype))
    assert before == of(tensors(dtype)) == int(BitChecksum(CPU)(tensors(dtype)))
    changed = tensors(dtype)
    bits(changed[place[0]])[place[1]] ^= 1
    assert of(changed) != before


@given(st.integers(0, 106), st.integers(0, 106))
def test_swapped_elements(one: int, other: int) -> None:
    """Two elements that change places change it."""
    flat = torch.arange(1.0, 108.0)
    swapped = flat.clone()
    swapped[one], swapped[other] = flat[other], flat[one]
    assert (of([flat]) == of([swapped])) == (one == other)


@given(st.sets(st.integers(0, 199), min_size=1))
def test_signs(flipped: set[int]) -> None:
    """Elements that change their sign, the highest bit, change it, however many they are."""
    before = torch.ones(200)
    after = before.clone()
    after[list(flipped)] = -1.0
    assert of([before]) != of([after])


def test_zeros() -> None:
    """The sign of a zero counts, and so do the bits of a NaN."""
    assert of([torch.zeros(3)]) == 0 == of([])
    assert of([-torch.zeros(3)]) != 0
    quiet = torch.full((3,), torch.nan)
    other = quiet.clone()
    bits(other)[1] ^= 1
    assert of([quiet]) != of([other])


def test_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are one sequence: neither their shapes nor the borders between them count."""
    monkeypatch.setattr(bit_checksum, "_BLOCK", 16)
    small = BitChecksum(CPU)
    whole = torch.cat([tensor.flatten() for tensor in tensors()[:2]])
    assert int(small(tensors()[:2])) == int(small([whole])) == int(small([whole.view(-1, 1)]))
    for i in range(len(whole)):
        changed = whole.clone()
        bits(changed)[i] ^= 1
        assert int(small([changed])) != int(small([whole]))
    turned = whole.view(1, -1).expand(2, -1).T  # not contiguous
    assert int(small([turned])) == int(small([turned.contiguous()]))
