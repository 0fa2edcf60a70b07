"""Archives of single tensors as `torch.save` writes them, in three writes.

torch writes an archive in about 40 small pieces, through Python, which takes 0.2 to 0.6 ms: most of
the time that Python takes in a save.  All bytes but the tensor's own depend on its dtype and shape
alone, if torch's checksums are left out, so that they are kept for the next tensor of this kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, NamedTuple, cast

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from lmcore.checkpoint.files.synced_file import SyncedFile

__all__ = ["torch_checksums", "write_archive"]

_MOST_KINDS = 4096


def write_archive(stream: SyncedFile, tensor: torch.Tensor) -> None:
    """Append the archive of a tensor, with torch's checksums if these are set (`torch_checksums`).

    Args:
        stream: File; a failed write is kept in it.
        tensor: Contiguous tensor on the host, whose storage is its own memory alone.
    """
    # A checksum depends on the elements.
    around = _bytes_around(tensor) if not get_crc32_options() and _is_plain(tensor) else None
    if around is None:
        torch.save(tensor, cast("IO[bytes]", stream))
        return
    stream.write(around.before)
    stream.write(tensor.view(-1).view(torch.uint8).numpy().data)
    stream.write(around.after)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return True if the archive records dtype, shape and elements only."""
    return (
        type(tensor) is torch.Tensor
        and tensor.numel() > 0
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
    )


class _Around(NamedTuple):
    """Bytes of an archive before and after the elements."""

    before: bytes
    after: bytes


_known: dict[tuple[torch.dtype, torch.Size], _Around] = {}
"""The bytes by dtype and shape, the first `_MOST_KINDS` of this process."""


def _bytes_around(tensor: torch.Tensor) -> _Around | None:
    """Return the bytes around the elements of such a tensor.

    None if torch does not write the elements in one piece.
    """
    kind = (tensor.dtype, tensor.shape)
    if (known := _known.get(kind)) is not None:
        return known
    like = torch.empty(tensor.shape, dtype=tensor.dtype)  # never filled: it takes no memory
    record = _Record(like)
    torch.save(like, cast("IO[bytes]", record))
    # Asked again: another thread may have changed a setting that is one for all.
    if get_crc32_options() or len(record.parts) != 2:
        return None
    found = _Around(*(b"".join(part) for part in record.parts))
    if len(_known) < _MOST_KINDS:
        _known[kind] = found
    return found


class _Record:
    """A file that keeps what is written, but for the elements of a tensor.

    Attributes:
        parts: Pieces before and after the elements.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.parts: list[list[bytes]] = [[]]
        self._address, self._size = tensor.data_ptr(), tensor.nbytes
        self._position = 0

    def write(self, content: bytes | memoryview) -> int:
        """Keep a piece."""
        piece = memoryview(content).cast("B")
        if len(piece) == self._size and _address(piece) == self._address:
            self.parts.append([])
        else:
            self.parts[-1].append(bytes(piece))
        self._position += len(piece)
        return len(piece)

    def tell(self) -> int:
        """Return the bytes written so far."""
        return self._position

    def flush(self) -> None:
        """Do nothing."""


def _address(piece: memoryview) -> int:
    import numpy as np

    return int(np.frombuffer(piece, np.uint8).ctypes.data)


@contextmanager
def torch_checksums(*, written: bool, before: bool) -> Iterator[None]:
    """Write, or leave out, the checksums that torch computes and never compares.

    They take most of the processor time of a save, which a training step may need; a checkpoint
    with a manifest has its own.

    Args:
        written: True to write them.
        before: Setting to restore; some versions of torch have one for all threads.
    """
    set_crc32_options(written)
    try:
        yield
    finally:
        set_crc32_options(before)
