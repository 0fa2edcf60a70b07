"""Checks that are made in this process, on the host with some of its functions exchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from lmcore_cpu.device import create_device


@pytest.fixture
def findings() -> Callable[..., tuple[str, ...]]:
    """Return a function that makes a check of a device and returns what it finds."""
    from lmcore_conformance.bench import Bench
    from lmcore_conformance.registry import Failure, all_checks

    def make(name: str, **changes: Any) -> tuple[str, ...]:
        (check,) = (check for check in all_checks() if check.id == name)
        device = create_device()
        bench = Bench()
        vars(bench)["device"] = dataclasses.replace(
            device, dtypes=device.dtypes - {"float16"}, **changes
        )
        try:
            check.run(bench)
        except Failure as failure:
            return failure.findings
        return ()

    return make
