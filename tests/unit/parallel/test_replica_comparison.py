"""Checksums of bits: equal for equal bits however they are stored, other for any other bits."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lmcore.parallel import replica_comparison
from lmcore.parallel.replica_comparison import DeviceChecksum, bit_checksum, bits, host_checksum

CPU = torch.device("cpu")
DEVICE = DeviceChecksum(CPU)
CHECKSUMS = [pytest.param(host_checksum, id="host"), pytest.param(DEVICE, id="device")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8]


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return some tensors of several shapes, whose elements are all different."""
    numbers = torch.arange(1, 201)
    return [part.to(dtype) for part in (numbers[:7], numbers[7:107].view(4, 25), numbers[107])]


def test_choice() -> None:
    """Tensors on the host have the checksum that is fast there."""
    assert bit_checksum(CPU) is host_checksum
    assert isinstance(bit_checksum(torch.device("meta")), DeviceChecksum)


def test_on_the_host() -> None:
    """It is the CRC-32 of all bytes, of any dtype and layout."""
    found = [
        *tensors(),
        torch.arange(6).view(2, 3).T,
        torch.zeros(0),
        torch.ones(3, dtype=torch.bool),
    ]
    content = b"".join(bytes(one.contiguous().view(-1).view(torch.uint8).tolist()) for one in found)
    assert int(host_checksum(found)) == zlib.crc32(content)
    assert host_checksum(found).dtype == DEVICE(tensors()).dtype == torch.int64


@pytest.mark.parametrize("of", CHECKSUMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [(0, 0), (1, 99), (2, 0)])
def test_one_ulp(of: Any, dtype: torch.dtype, place: tuple[int, int]) -> None:
    """The last bit of any element changes the checksum."""
    before = of(tensors(dtype))
    assert before == of(tensors(dtype))
    assert DEVICE(tensors(dtype)) == DeviceChecksum(CPU)(tensors(dtype))
    changed = tensors(dtype)
    bits(changed[place[0]])[place[1]] ^= 1
    assert of(changed) != before


@pytest.mark.parametrize("of", CHECKSUMS)
@given(one=st.integers(0, 106), other=st.integers(0, 106))
def test_swapped_elements(of: Any, one: int, other: int) -> None:
    """Two elements that change places change it."""
    flat = torch.arange(1.0, 108.0)
    swapped = flat.clone()
    swapped[one], swapped[other] = flat[other], flat[one]
    assert (of([flat]) == of([swapped])) == (one == other)


@pytest.mark.parametrize("of", CHECKSUMS)
@given(flipped=st.sets(st.integers(0, 199), min_size=1))
def test_signs(of: Any, flipped: set[int]) -> None:
    """Elements that change their sign, the highest bit, change it, however many they are."""
    before = torch.ones(200)
    after = before.clone()
    after[list(flipped)] = -1.0
    assert of([before]) != of([after])


@pytest.mark.parametrize("of", CHECKSUMS)
def test_zeros(of: Any) -> None:
    """The sign of a zero counts, and so do the bits of a NaN; no tensors have the checksum 0."""
    assert of([]) == 0
    assert of([-torch.zeros(3)]) != of([torch.zeros(3)])
    quiet = torch.full((3,), torch.nan)
    other = quiet.clone()
    bits(other)[1] ^= 1
    assert of([quiet]) != of([other])


def test_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are one sequence: neither their shapes nor the borders between them count."""
    monkeypatch.setattr(replica_comparison, "_BLOCK", 16)
    small = DeviceChecksum(CPU)
    whole = torch.cat([tensor.flatten() for tensor in tensors()[:2]])
    assert int(small(tensors()[:2])) == int(small([whole])) == int(small([whole.view(-1, 1)]))
    for i in range(len(whole)):
        changed = whole.clone()
        bits(changed)[i] ^= 1
        assert int(small([changed])) != int(small([whole]))
    turned = whole.view(1, -1).expand(2, -1).T  # not contiguous
    assert int(small([turned])) == int(small([turned.contiguous()]))
