"""Checksums of the bits of tensors, computed on their device.

A change of one element always changes the checksum; any other change, such as two swapped elements,
is missed with a probability of about 2^-32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lmcore.crc32 import crc32

__all__ = ["DeviceChecksum", "bit_checksum", "bits", "host_checksum"]

_BLOCK = 2**18
"""Elements that are multiplied at once; factors take 2 MB, and products too during a checksum."""
_SEED = 20_261_122
_INTEGERS = {1: torch.int8, 2: torch.int16}


def bit_checksum(device: torch.device) -> Callable[[Sequence[Tensor]], Tensor]:
    """Return the checksum of tensors in their order, an int64 scalar, for the tensors of a device.

    Equal bits have equal checksums on all devices but the host, and on all hosts.

    Args:
        device: Device of the tensors.
    """
    return host_checksum if device.type == "cpu" else DeviceChecksum(device)


def host_checksum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the CRC-32 of *tensors* in their order, which takes as long as reading them.

    Args:
        tensors: Tensors on the host, of any shapes and dtypes; none have the checksum 0.
    """
    checksum = 0
    for tensor in tensors:
        content = tensor.detach().contiguous().view(-1).view(torch.uint8)
        checksum = crc32(content.numpy().data, checksum)
    return torch.tensor(checksum)


class DeviceChecksum:
    """Checksums on one device, by operations of torch; see `bit_checksum`.

    Each 32 bits, as an integer, are multiplied by a random odd number drawn for their position, and
    the products are summed modulo 2^64.

    Source: multilinear hashing, Carter and Wegman, 1979.
    """

    def __init__(self, device: torch.device) -> None:
        """Draw the factors, the same on every rank.

        Args:
            device: Device of the tensors.
        """
        generator = torch.Generator("cpu").manual_seed(_SEED)
        drawn = torch.randint(-(2**62), 2**62, (_BLOCK,), generator=generator, device="cpu")
        self._factors = (2 * drawn + 1).to(device)
        self._device = device

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the checksum of *tensors* in their order, an int64 scalar on the device.

        Args:
            tensors: Tensors on the device, of any shapes and dtypes; none have the checksum 0.
        """
        products = torch.empty(_BLOCK, dtype=torch.int64, device=self._device)
        sums = []
        for block in _blocks(tensors):
            values = block[0] if len(block) == 1 else torch.cat(block)
            size = values.numel()
            torch.mul(values, self._factors[:size], out=products[:size])
            sums.append(products[:size].sum())
        if not sums:
            return torch.zeros((), dtype=torch.int64, device=self._device)
        return (torch.stack(sums) * self._factors[-len(sums) :]).sum()


def bits(tensor: Tensor) -> Tensor:
    """Return the bits of *tensor* as a 1-D tensor of integers of at most 32 bits."""
    flat = tensor.detach().reshape(-1)
    return flat.view(_INTEGERS.get(flat.element_size(), torch.int32))


def _blocks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the bits of *tensors* in parts that together have `_BLOCK` elements or, last, fewer."""
    block: list[Tensor] = []
    free = _BLOCK
    for values in map(bits, tensors):
        start = 0
        while start < values.numel():
            part = values[start : start + free]
            block.append(part)
            start += part.numel()
            free -= part.numel()
            if not free:
                yield block
                block, free = [], _BLOCK
    if block:
        yield block
