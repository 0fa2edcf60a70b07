"""Settings of the simulated devices, from environment variables; torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lmcore.base.errors import ConfigError
from lmcore_sim.faults import VARIABLE as FAULTS
from lmcore_sim.faults import Faults, parse_faults

__all__ = ["DEVICES", "FAULTS", "MEMORY", "MISSING_WAIT", "Settings", "read_settings"]

DEVICES = "LMCORE_SIM_DEVICES"
MEMORY = "LMCORE_SIM_MEMORY"
MISSING_WAIT = "LMCORE_SIM_MISSING_WAIT"
_MOST_DEVICES = 64  # as many as csrc/ has room for
_DEFAULT_DEVICES = "2"
_DEFAULT_MEMORY = "16GiB"
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Settings:
    """The devices of a process.

    Attributes:
        num_devices: Number of devices; 0: none.
        memory_bytes: Memory of each device, in bytes.
        faults: Faults to inject.
        missing_wait_raises: True if an op that uses results of another stream without waiting for
            them raises; False if it computes wrong numbers, as on hardware.
    """

    num_devices: int
    memory_bytes: int
    faults: Faults
    missing_wait_raises: bool = False


def read_settings(env: Mapping[str, str]) -> Settings:
    """Return the settings in `LMCORE_SIM_DEVICES`, `..._MEMORY`, `..._FAULTS`, `..._MISSING_WAIT`.

    Raises:
        ConfigError: A value is malformed.
    """
    count = env.get(DEVICES, "").strip() or _DEFAULT_DEVICES
    if not (count.isascii() and count.isdigit() and int(count) <= _MOST_DEVICES):
        raise ConfigError(
            f"`{DEVICES}={count}` is no number of devices",
            hint=f"use a number from 0, which means that there are none, to {_MOST_DEVICES}",
        )
    return Settings(
        int(count),
        _memory(env.get(MEMORY, "").strip() or _DEFAULT_MEMORY),
        parse_faults(env.get(FAULTS, "")),
        _raises(env.get(MISSING_WAIT, "").strip() or "wrong"),
    )


def _raises(text: str) -> bool:
    if text not in {"wrong", "error"}:
        raise ConfigError(
            f"`{MISSING_WAIT}={text}` is no effect of a missing wait",
            hint="use `wrong`, for wrong numbers, or `error`, to raise",
        )
    return text == "error"


def _memory(text: str) -> int:
    """Return the bytes of "64MiB", "1.5GiB" or "1000000"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KiB|MiB|GiB|B)?", text, re.ASCII)
    if found is None:
        raise ConfigError(
            f"`{MEMORY}={text}` is no amount of memory",
            hint="write `64MiB`, `16GiB` or a number of bytes",
        )
    return int(float(found[1]) * _UNITS[found[2] or "B"])
