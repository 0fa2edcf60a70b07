"""Comparison of tensors that should be equal on several ranks, bit for bit, by checksums.

The checksums are computed on the device.  A change of one element always changes the checksum; any
other change, such as two swapped elements, is missed with a probability of about 2^-32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lmcore.base.crc32 import crc32
from lmcore.base.errors import counted
from lmcore.contract.dtype import dtype_name
from lmcore.parallel.scalar_collectives import all_gather_scalars
from lmcore.runtime.launch.rank import named_ranks

if TYPE_CHECKING:
    from lmcore.parallel.mesh import ReplicaClass
    from lmcore.runtime.runtime import Runtime

__all__ = [
    "DeviceChecksum",
    "ReplicaComparison",
    "ReplicaDrift",
    "bit_checksum",
    "bits",
    "host_checksum",
]

_CHUNK = 2**22
"""Elements that are compared at once after a difference was found."""
_BLOCK = 2**18
"""Elements that are multiplied at once; factors take 2 MB, and products too during a checksum."""
_SEED = 20_261_122
_INTEGERS = {1: torch.int8, 2: torch.int16}


class ReplicaDrift(NamedTuple):
    """Replicas that differ.

    Attributes:
        names: Names of their tensors, first the one that the lines describe.
        ranks: Ranks without the majority's values; all of them if there is no majority.
        lines: Lines for a message about the first tensor: ranks, and differences.
    """

    names: list[str]
    ranks: list[int]
    lines: list[str]

    @property
    def title(self) -> str:
        """Name of the first tensor, and the number of the others."""
        more = len(self.names) - 1
        return f"`{self.names[0]}`" + (f" and {counted(more, 'more parameter')}" if more else "")


class ReplicaComparison:
    """Comparison of the replicas of tensors.

    Each rank computes one checksum of its tensors, and all ranks exchange them.  Only if they
    differ, the tensors are compared one by one.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Compare nothing yet.

        Args:
            runtime: Device and processes.
        """
        self._runtime = runtime
        self._checksum: Callable[[Sequence[Tensor]], Tensor] | None = None

    def find_drift(self, classes: Sequence[ReplicaClass]) -> ReplicaDrift | None:
        """Return the replicas that differ, None if there are none; all ranks must call it.

        Args:
            classes: Tensors on the run's device, of as many classes on all ranks.
        """
        if self._checksum is None:
            self._checksum = bit_checksum(self._runtime.device.torch_device)
        checksums = [self._checksum(list(each.parameters.values())) for each in classes]
        of_ranks = _gather(self._runtime, torch.stack(checksums))
        differing = [
            replicas
            for index, replicas in enumerate(classes)
            if any(len({of_ranks[rank][index] for rank in group}) > 1 for group in replicas.groups)
        ]
        if not differing:
            return None
        drifted = self._drifted(differing)
        first = drifted[0]
        names = list(dict.fromkeys(each.name for each in drifted))
        wrong = sorted({rank for each in drifted for rank in each.minority or each.ranks})
        if first.minority:
            verdict = f"{named_ranks(first.majority)} agree, {named_ranks(first.minority)} not"
        else:
            verdict = f"{named_ranks(first.ranks)} differ, and none of them has a majority"
        lines = [f"`{first.name}`: {verdict}", *self._difference(differing, first)]
        return ReplicaDrift(names, wrong, lines)

    def _drifted(self, differing: Sequence[ReplicaClass]) -> list[_Drifted]:
        """Return the parameters that differ, in the order of ranks and of the model."""
        assert self._runtime.processes is not None
        assert self._checksum is not None
        own = [
            {name: int(self._checksum([tensor])) for name, tensor in each.parameters.items()}
            for each in differing
        ]
        of_ranks = self._runtime.processes.gather(own, "the checksums of parameters")
        found = []
        for index, replicas in enumerate(differing):
            for group in replicas.groups.tolist():
                for name in of_ranks[group[0]][index]:
                    values = {rank: of_ranks[rank][index][name] for rank in group}
                    if len(set(values.values())) > 1:
                        found.append(_Drifted.of(name, index, values))
        return sorted(found, key=lambda each: each.ranks)

    def _difference(self, differing: Sequence[ReplicaClass], drifted: _Drifted) -> list[str]:
        """Return lines about the difference in a parameter; all ranks must call it."""
        assert self._runtime.processes is not None
        rank, reference = self._runtime.rank.rank, drifted.reference
        own: Tensor | None = None
        if rank in drifted.ranks:
            own = differing[drifted.class_index].parameters[drifted.name].detach()
        sizes = self._runtime.processes.gather(
            None if own is None else [own.numel(), dtype_name(own.dtype)],
            "the size of a parameter",
        )
        numel, dtype = sizes[reference]
        found = _Difference(0, 0.0, "")
        for start in range(0, numel, _CHUNK):
            size = min(_CHUNK, numel - start)
            values = torch.zeros(
                size, dtype=getattr(torch, dtype), device=self._runtime.device.torch_device
            )
            mine = values if own is None else own.reshape(-1)[start : start + size]
            if rank == reference:
                values.copy_(mine)
            torch.distributed.all_reduce(values)  # the other ranks add zeros
            if own is not None:
                found = found.merged(_difference(mine, values, start, own.shape))
        lines = self._runtime.processes.gather(found, "the difference in a parameter")
        return [
            f"rank {other}: {_described(_Difference(*lines[other]), numel, reference)}"
            for other in drifted.minority or drifted.ranks
            if other != reference
        ]


class _Drifted(NamedTuple):
    """A parameter whose replicas differ.

    Attributes:
        name: Name of the parameter.
        class_index: Index of its class among the classes that differ.
        ranks: Ranks that hold replicas of the same part.
        majority: Ranks whose replicas are equal, if they are more than half.
        minority: The other ranks; empty without a majority.
    """

    name: str
    class_index: int
    ranks: tuple[int, ...]
    majority: tuple[int, ...]
    minority: tuple[int, ...]

    @classmethod
    def of(cls, name: str, class_index: int, checksums: dict[int, int]) -> _Drifted:
        """Return the parameter, from the checksum of each rank."""
        ((common, count),) = Counter(checksums.values()).most_common(1)
        ranks = tuple(sorted(checksums))
        if 2 * count <= len(ranks):
            return cls(name, class_index, ranks, (), ())
        majority = tuple(rank for rank in ranks if checksums[rank] == common)
        minority = tuple(rank for rank in ranks if checksums[rank] != common)
        return cls(name, class_index, ranks, majority, minority)

    @property
    def reference(self) -> int:
        """Rank that the other ranks are compared with."""
        return (self.majority or self.ranks)[0]


class _Difference(NamedTuple):
    """The difference of a rank's replica from the reference.

    Attributes:
        different: Number of elements that differ in value.
        largest: Largest absolute difference.
        example: First element that differs, with both values.
    """

    different: int
    largest: float
    example: str

    def merged(self, later: _Difference) -> _Difference:
        """Return the sum of two parts of a parameter."""
        largest = max(self.largest, later.largest)
        return _Difference(self.different + later.different, largest, self.example or later.example)


def _difference(own: Tensor, reference: Tensor, start: int, shape: Sequence[int]) -> _Difference:
    """Return the difference of some elements.

    Args:
        own: Elements of this rank, [n].
        reference: Elements of the reference, [n].
        start: Index of the first element in the flat parameter.
        shape: Shape of the parameter.
    """
    mine, other = (values.to("cpu", torch.float64) for values in (own, reference))
    differ = (mine != other) & ~(mine.isnan() & other.isnan())
    count = int(differ.sum())
    if not count:
        return _Difference(0, 0.0, "")
    first = int(differ.nonzero()[0])
    index = [int(i) for i in torch.unravel_index(torch.tensor(start + first), tuple(shape))]
    digits = 17 if own.dtype == torch.float64 else 9
    values = f"{mine[first]:.{digits}g} in place of {other[first]:.{digits}g}"
    example = f"element {index} is {values}"
    return _Difference(count, float((mine - other).abs()[differ].max()), example)


def _described(found: _Difference, numel: int, reference: int) -> str:
    """Return a difference in words."""
    if not found.different:
        return f"its {numel:,} elements differ only in signs of zeros or bits of NaN"
    return (
        f"{found.different:,} of {counted(numel, 'element')} differ from rank {reference}, "
        f"by at most {found.largest:.3g}; {found.example}"
    )


def _gather(runtime: Runtime, checksums: Tensor) -> list[list[int]]:
    """Return the checksums of every rank, exactly, by a collective of float32.

    Args:
        runtime: Device and processes.
        checksums: This rank's checksums, int64 [n].
    """
    shifts = torch.arange(0, 64, 16, device=checksums.device)
    pieces = (checksums[:, None] >> shifts) & 0xFFFF  # of 16 bits, which float32 holds exactly
    rows = all_gather_scalars(runtime, pieces.flatten().float()).tolist()
    return [list(_joined(row)) for row in rows]


def _joined(pieces: Sequence[float]) -> Iterator[int]:
    for start in range(0, len(pieces), 4):
        yield sum(int(piece) << (16 * index) for index, piece in enumerate(pieces[start:][:4]))


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
