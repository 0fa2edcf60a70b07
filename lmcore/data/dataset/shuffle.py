"""`numpy.random.RandomState.shuffle`, an order of magnitude faster for large arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lmcore.data import native
from lmcore.data.native import Counter

__all__ = ["shuffle"]

_TYPES = (np.dtype(np.int32), np.dtype(np.uint32), np.dtype(np.int64))
_LEAST = 4096
"""Values below which numpy is faster than copying the state out and in."""
_MOST = 2**32
"""Values beyond which numpy draws 64-bit numbers, which it does itself here too."""


def shuffle(
    rng: np.random.RandomState, values: npt.NDArray[np.integer], progress: Counter | None = None
) -> None:
    """Shuffle *values* in place as `rng.shuffle(values)` does, and leave *rng* as that does.

    Args:
        rng: The generator; MT19937, as every `RandomState(seed)` is.
        values: One dimension.
        progress: Raised by the number of values.
    """
    fits = values.dtype in _TYPES and values.ndim == 1 and _LEAST <= len(values) <= _MOST
    fits = fits and values.flags.carray  # contiguous, aligned, writable
    state = rng.get_state(legacy=False) if fits else {}
    if native.builders is None or state.get("bit_generator") != "MT19937":
        rng.shuffle(values)
        if progress is not None:
            progress += len(values)
        return
    twister = state["state"]  # a copy: numpy's own changes with `set_state`
    twister["pos"] = native.builders.shuffle(values, twister["key"], twister["pos"], progress)
    rng.set_state(state)
