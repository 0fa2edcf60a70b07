"""Hints for errors of Intel GPUs, by words of their messages; torch-free.

Level Zero's errors reach Python as "level_zero backend failed with error: 20
(UR_RESULT_ERROR_DEVICE_LOST)", or as "UR error" if the number has no name.
"""

from __future__ import annotations

import re

from lmcore.contract import hint_by_words

__all__ = ["hint_for", "is_out_of_memory"]

_HINTS: tuple[tuple[str, str], ...] = (
    (
        r"not compiled with xpu",
        "install a torch for Intel GPUs: `lmcore plugins` has the command",
    ),
    (
        r"no xpu devices are available",
        "`ONEAPI_DEVICE_SELECTOR` counts what `ZE_AFFINITY_MASK` leaves: set one; `lmcore doctor`",
    ),
    (
        r"device_lost",
        "look for a reset of the GPU in `dmesg`; `lmcore doctor` has what leads to one",
    ),
    (
        r"uninitialized|ur error|symbol lookup|undefined symbol|version `LIBUR",
        "start without oneAPI's `setvars.sh`: its libraries go before those that torch brought",
    ),
    (
        r"fp64",
        "this GPU has no float64: report this, with the message, to the authors of this plugin",
    ),
    (r"forked subprocess", "start processes by `lmcore train`, which does not fork them"),
    (r"ipc|pidfd", "set `CCL_ZE_IPC_EXCHANGE=sockets` before the start"),
)


def hint_for(message: str) -> str:
    """Return the hint for an error, from its message."""
    return hint_by_words(message, _HINTS)


def is_out_of_memory(message: str) -> bool:
    """Return True if an error means that a GPU has no memory left.

    Level Zero says "out of resources" too where an allocation that was promised cannot be had.
    """
    pattern = r"out[ _]of[ _](device[ _]|host[ _])?(memory|resources)"
    return re.search(pattern, message, re.IGNORECASE) is not None
