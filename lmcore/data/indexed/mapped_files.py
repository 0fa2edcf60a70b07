"""Check that files behind memory-mapped arrays were not cut short since they were mapped.

Reading a mapped page beyond the end of its file ends the process with a bus error, and the rest of
the last page reads as zeros.  So the size of each file is compared before a sample is read, which
takes a fraction of a microsecond.
"""

from __future__ import annotations

import mmap
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from lmcore.errors import DataError

__all__ = ["MappedFiles"]


class MappedFiles:
    """Files behind arrays.

    Args:
        arrays: Arrays; those in memory are ignored.
    """

    def __init__(self, *arrays: npt.NDArray[Any]) -> None:
        maps: dict[str, mmap.mmap] = {}
        for array in arrays:
            base: Any = array
            while base is not None and not isinstance(base, np.memmap):
                base = getattr(base, "base", None)
            if base is not None:
                maps[str(base.filename)] = cast("mmap.mmap", vars(base)["_mmap"])
        self._files = [(opened.size, len(opened), path) for path, opened in maps.items()]

    def check(self, part: int | str) -> None:
        """Raise an error if a file became shorter.

        Args:
            part: Number of the sample to be read, or a name of what is to be read, for the message.

        Raises:
            DataError: A file is shorter than when it was mapped.
        """
        for size, mapped, path in self._files:
            found = size()
            if found < mapped:
                sample = isinstance(part, int)
                raise DataError(
                    f"`{path}` was cut short while it was in use",
                    why=f"{f'sample {part}' if sample else part} cannot be read: the file had "
                    f"{mapped} bytes when it was opened and has {found} now",
                    hint="another program writes to it; restore the file, and "
                    + (
                        "continue the run from its last checkpoint with `--load`"
                        if sample
                        else "start again"
                    ),
                )
