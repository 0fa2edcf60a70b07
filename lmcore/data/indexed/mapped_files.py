"""Guarded reads of memory-mapped files, which another program may cut short at any time.

Reading a mapped page beyond the end of its file ends the process with a bus error, and the rest of
the last page reads as zeros.  The compiled code catches the bus errors of guarded reads and puts
zeros there, too; the sizes of the files are compared after the read.  Without the compiled code
the sizes are compared before the read, and a file that is cut during a read ends the process.
"""

from __future__ import annotations

import mmap
import weakref
from types import TracebackType
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from lmcore.base.errors import DataError, counted
from lmcore.data.native import mapping_guard

__all__ = ["MappedFiles"]

_numbers: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()
"""Number of each mapping that the compiled code guards."""


class MappedFiles:
    """Files behind arrays.

    Args:
        arrays: Arrays; arrays in memory are ignored.
    """

    def __init__(self, *arrays: npt.NDArray[Any]) -> None:
        maps: dict[str, mmap.mmap] = {}
        for array in arrays:
            base: Any = array
            while base is not None and not isinstance(base, np.memmap):
                base = getattr(base, "base", None)
            if base is not None:
                maps[str(base.filename)] = cast("mmap.mmap", vars(base)["_mmap"])
        self._files = [
            (opened.size, len(opened), path, _guard(opened)) for path, opened in maps.items()
        ]

    def reading(self, part: int | str) -> _Reading:
        """Return a context manager for a block that reads the arrays.

        Its end raises a `DataError` if a file was cut short or could not be read: then what the
        block read is not valid.  Views of the arrays are not guarded after the block.

        Args:
            part: Number of the sample to be read, or a name of what is to be read, for the message.
        """
        return _Reading(self, part)

    def check(self, part: int | str, *, faults: int = 0) -> None:
        """Raise an error if a file became shorter, or a guarded read of it failed.

        Args:
            part: Number of the sample, or a name of what is read, for the message.
            faults: Number of mappings of this process whose reads failed.

        Raises:
            DataError: A file is shorter than when it was mapped, or could not be read.
        """
        for size, mapped, path, number in self._files:
            found = size()
            lost = faults and mapping_guard is not None and mapping_guard.is_lost(number)
            if found >= mapped and not lost:
                continue
            sample = isinstance(part, int)
            what, why = (
                f"`{path}` was cut short while it was in use",
                "cannot be read: the file had ",
            )
            why += f"{counted(mapped, 'byte')} when it was opened and has {found:,} now"
            if found >= mapped:
                what = f"`{path}` could not be read"
                why = "was not read: the disk failed, or the file was cut short for a moment"
            raise DataError(
                what,
                why=f"{f'sample {part}' if sample else part} {why}",
                hint="another program writes to it; restore the file, and "
                + (
                    "continue the run from its last checkpoint with `--load`"
                    if sample
                    else "start again"
                ),
            )


class _Reading:
    """Block that reads the arrays of `MappedFiles`."""

    __slots__ = ("_files", "_part")

    def __init__(self, files: MappedFiles, part: int | str) -> None:
        self._files, self._part = files, part

    def __enter__(self) -> None:
        if mapping_guard is None:
            self._files.check(self._part)
        else:
            mapping_guard.begin_read()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if mapping_guard is not None:
            self._files.check(self._part, faults=mapping_guard.end_read())


def _guard(opened: mmap.mmap) -> int:
    """Return the number of a mapping that the compiled code guards from now on; -1 for none."""
    if mapping_guard is None:
        return -1
    number = _numbers.get(opened)
    if number is None:
        _numbers[opened] = number = mapping_guard.guard_mapping(opened)
        if number >= 0:
            weakref.finalize(opened, mapping_guard.forget_mapping, number).atexit = False
    return number
