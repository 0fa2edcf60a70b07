"""C++ versions of Python loops; `lmcore doctor` shows if they are installed.

`lmcore._native` is part of wheels, and is built at installation if there is a C++ compiler.
Without it the Python versions beside each caller give the same results, byte for byte.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

if TYPE_CHECKING:  # commands import this module before numpy
    import mmap

    import numpy as np
    import numpy.typing as npt

__all__ = [
    "Counter",
    "MappingGuard",
    "NativeBuilders",
    "NativeReader",
    "available",
    "builders",
    "mapping_guard",
    "reason",
    "threads",
]

Counter: TypeAlias = "npt.NDArray[np.int64]"
"""int64 [1], number of finished units of work, which a builder increases."""

_MOST_THREADS = 8
_INTERFACE = 5
"""Version of the signatures, also in `native/module.cpp`; raise both with every change."""

_INSTEAD = "data is prepared and indexed in Python, many times slower"


class NativeReader(Protocol):
    """`lmcore._native.SampleReader`, see `lmcore.data.dataset.gpt`."""

    def read(self, sample: int) -> npt.NDArray[np.int64]:
        """Return the tokens of a sample."""


class MappingGuard(Protocol):
    """Guard of mapped files in `lmcore._native`, see `lmcore.data.indexed.mapped_files`."""

    def guard_mapping(self, buffer: mmap.mmap) -> int:
        """Guard a mapping, and return its number; -1 if too many are guarded."""

    def forget_mapping(self, number: int) -> None:
        """End the guard of a mapping, which is closed."""

    def begin_read(self) -> None:
        """Begin a guarded read, in any thread."""

    def end_read(self) -> int:
        """End a guarded read; return the number of mappings whose reads have failed so far."""

    def is_lost(self, number: int) -> bool:
        """Return True if a read of the mapping failed."""


class NativeBuilders(Protocol):
    """Functions of `lmcore._native`; they read arrays in place and release the GIL."""

    def build_sample_index(
        self,
        sizes: npt.NDArray[np.int32],
        document_index: npt.NDArray[np.int32],
        sequence_length: int,
        num_samples: int,
        threads: int = 1,
        progress: Counter | None = None,
    ) -> npt.NDArray[np.int32]:
        """Build the array of `lmcore.data.dataset.gpt_index.build_sample_index`."""

    def build_blend_index(
        self, weights: npt.NDArray[np.float64], size: int
    ) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
        """Build the arrays of `lmcore.data.blend.index.build_blend_index`."""

    def shuffle(
        self,
        values: npt.NDArray[np.integer],
        key: npt.NDArray[np.uint32],
        position: int,
        progress: Counter | None = None,
    ) -> int:
        """Shuffle as `lmcore.data.dataset.shuffle.shuffle`; return the key's new position."""

    def build_segment_mapping(
        self,
        documents: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int32],
        num_epochs: int,
        num_samples: int,
        longest: int,
        short_ratio: int,
        seed: int,
        least_sentences: int,
        progress: Counter | None = None,
    ) -> npt.NDArray[np.unsignedinteger]:
        """Build the rows of `lmcore.data.dataset.sentence_index.build_segment_mapping`."""

    def build_block_mapping(
        self,
        documents: npt.NDArray[np.int64],
        sizes: npt.NDArray[np.int32],
        title_sizes: npt.NDArray[np.int32],
        num_epochs: int,
        num_samples: int,
        longest: int,
        seed: int,
        one_sentence: bool,  # noqa: FBT001  # the signature is C++'s
        progress: Counter | None = None,
    ) -> npt.NDArray[np.unsignedinteger]:
        """Build the rows of `lmcore.data.dataset.sentence_index.build_block_mapping`."""

    def minhash_signatures(
        self,
        characters: npt.NDArray[np.uint32],
        ends: npt.NDArray[np.int64],
        weights: npt.NDArray[np.uint32],
        factors: npt.NDArray[np.uint32],
        terms: npt.NDArray[np.uint32],
    ) -> npt.NDArray[np.uint32]:
        """Return MinHash signatures of texts, as lmcore-data-tools computes them in Python."""

    def SampleReader(  # noqa: N802  # a class there
        self,
        tokens: npt.NDArray[np.integer],
        starts: npt.NDArray[np.int64],
        unit: int,
        sizes: npt.NDArray[np.int32],
        document_index: npt.NDArray[np.int32],
        sample_index: npt.NDArray[np.int32],
        sequence_length: int,
    ) -> NativeReader:
        """Make the reader of `lmcore.data.dataset.gpt`."""


def _load() -> tuple[NativeBuilders | None, str]:
    try:
        module = importlib.import_module("lmcore._native")
    except ModuleNotFoundError:
        return None, f"lmcore was installed without a C++ compiler; {_INSTEAD}"
    except ImportError as error:
        return None, f"`lmcore._native` does not load ({error}); {_INSTEAD}"
    if getattr(module, "INTERFACE", None) != _INTERFACE:
        return None, f"`{module.__file__}` is of another version of lmcore; {_INSTEAD}"
    return cast("NativeBuilders", module), f"`{module.__file__}`"


def threads() -> int:
    """Return the number of threads that a builder may use: this process's CPUs, up to 8."""
    return min(len(os.sched_getaffinity(0)), _MOST_THREADS)


builders, reason = _load()
available: bool = builders is not None
mapping_guard: MappingGuard | None = (
    cast("MappingGuard", builders) if hasattr(builders, "guard_mapping") else None
)
"""The guard of mapped files; None without compiled code, or with code that was built before it."""
