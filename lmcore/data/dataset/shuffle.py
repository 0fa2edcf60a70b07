"""`numpy.random.RandomState.shuffle`, an order of magnitude faster for large arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lmcore.data import native
from lmcore.data.native import Counter

__all__ = ["shuffle"]

_TYPES = (np.dtype(np.int32), np.dtype(np.uint32), np.dtype(np.int64))
_LEAST = 4096
"""Length below which numpy is faster than copying the generator's state out and in."""
_MOST = 2**32
"""Length above which numpy draws 64-bit numbers; such arrays are left to numpy."""


def shuffle(
    rng: np.random.RandomState, values: npt.NDArray[np.integer], progress: Counter | None = None
) -> None:
    """Shuffle *values* in place, with the same result and generator state as `rng.shuffle`.

    Args:
        rng: The generator; in C++ only MT19937, the generator of every `RandomState(seed)`.
        values: [n], shuffled in place.
        progress: Counter of finished units of work, raised by n.
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
