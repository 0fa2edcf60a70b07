"""The C++ index builders, where they were built; `lmcore doctor` shows what is here.

`lmcore._native` exists in wheels and wherever a C++ compiler was at hand when lmcore was
installed.  Without it the numpy versions beside each caller do the same, byte for byte.
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

__all__ = ["NativeBuilders", "available", "builders", "reason"]


class NativeBuilders(Protocol):
    """What `native/` offers; arrays are read in place and the interpreter runs on meanwhile."""

    def build_sample_index(
        self,
        sizes: npt.NDArray[np.int32],
        document_index: npt.NDArray[np.int32],
        sequence_length: int,
        num_samples: int,
    ) -> npt.NDArray[np.int32]:
        """See `lmcore.data.gpt_index.build_sample_index`."""

    def build_blend_index(
        self, weights: npt.NDArray[np.float64], size: int
    ) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
        """See `lmcore.data.blending.build_blend_index`."""


def _load() -> tuple[NativeBuilders | None, str]:
    try:
        module = importlib.import_module("lmcore._native")
    except ModuleNotFoundError:
        return None, "lmcore was installed without a C++ compiler; numpy builds the indices"
    except ImportError as error:
        return None, f"`lmcore._native` does not load ({error}); numpy builds the indices"
    return cast("NativeBuilders", module), f"`{module.__file__}`"


builders, reason = _load()
available: bool = builders is not None
