"""Devices for the tests of the contract's records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lmcore.contract import Device

_OPTIONAL = (
    *("memory_stats", "reset_peak_memory", "empty_cache"),
    *("pin_memory", "new_stream", "new_event", "peak_flops"),
)


def host() -> Device:
    """Return the host with torch's own generator and nothing optional."""
    generator = torch.default_generator
    return Device(
        type="cpu",
        index=0,
        name="host",
        dtypes=frozenset({"float32", "float64", "bfloat16"}),
        synchronize=lambda: None,
        set_current=lambda: None,
        seed=generator.manual_seed,
        get_rng_state=generator.get_state,
        set_rng_state=generator.set_state,
        missing=dict.fromkeys(_OPTIONAL, "a test's device"),
    )


@pytest.fixture
def device() -> Device:
    """The host."""
    return host()


@pytest.fixture
def pinning() -> Callable[[Callable[..., Any]], Device]:
    """Makes a host that pins memory by a function."""

    def make(pin: Callable[..., Any]) -> Device:
        plain = host()
        missing = {name: why for name, why in plain.missing.items() if name != "pin_memory"}
        return replace(plain, pin_memory=pin, missing=missing)

    return make
