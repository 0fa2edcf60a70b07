"""The C++ twins of what loops in Python; `lmcore doctor` shows whether they are here.

`lmcore._native` exists in wheels and wherever a C++ compiler was at hand when lmcore was
installed.  Without it the Python versions beside each caller do the same, byte for byte.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

if TYPE_CHECKING:  # a command can ask for the C++ before it has loaded numpy
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "Counter",
    "NativeBuilders",
    "NativeReader",
    "available",
    "builders",
    "reason",
    "threads",
]

Counter: TypeAlias = "npt.NDArray[np.int64]"
"""One number, of finished units of work, that a builder raises while it works."""

_MOST_THREADS = 8
_INTERFACE = 3
"""What `native/module.cpp` says: it goes up there and here with every change of a signature."""

_INSTEAD = "data is prepared and indexed in Python, many times slower"


class NativeReader(Protocol):
    """`lmcore._native.SampleReader`, see `lmcore.data.dataset.gpt_reader`."""

    def read(self, sample: int) -> npt.NDArray[np.int64]:
        """Return the tokens of a sample."""


class NativeBuilders(Protocol):
    """What `native/` offers; arrays are read in place and the interpreter runs on meanwhile."""

    def build_sample_index(
        self,
        sizes: npt.NDArray[np.int32],
        document_index: npt.NDArray[np.int32],
        sequence_length: int,
        num_samples: int,
        threads: int = 1,
        progress: Counter | None = None,
    ) -> npt.NDArray[np.int32]:
        """See `lmcore.data.dataset.gpt_index.build_sample_index`."""

    def build_blend_index(
        self, weights: npt.NDArray[np.float64], size: int
    ) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
        """See `lmcore.data.blend.index.build_blend_index`."""

    def shuffle(
        self,
        values: npt.NDArray[np.integer],
        key: npt.NDArray[np.uint32],
        position: int,
        progress: Counter | None = None,
    ) -> int:
        """See `lmcore.data.dataset.shuffle.shuffle`."""

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
        """See `lmcore.data.dataset.sentence_index.build_segment_mapping`."""

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
        """See `lmcore.data.dataset.sentence_index.build_block_mapping`."""

    def minhash_signatures(
        self,
        characters: npt.NDArray[np.uint32],
        ends: npt.NDArray[np.int64],
        weights: npt.NDArray[np.uint32],
        factors: npt.NDArray[np.uint32],
        terms: npt.NDArray[np.uint32],
    ) -> npt.NDArray[np.uint32]:
        """See `lmcore.data.clean.minhash.MinHash.signatures`."""

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
        """See `lmcore.data.dataset.gpt_reader`."""


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
    """Return how many threads a builder may use: the processors of this process, up to 8."""
    return min(len(os.sched_getaffinity(0)), _MOST_THREADS)


builders, reason = _load()
available: bool = builders is not None
