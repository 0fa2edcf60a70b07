"""The choice whether to compile blocks: the run's setting, else the device's default."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from stand_in_engine import stand_in_for_deepspeed

from lmcore.train.compilation import FACT, compiles_blocks


@pytest.mark.parametrize(
    "flags, fact, wanted",
    [
        ("", True, True),
        ("", None, False),
        ("", False, False),
        ("", "yes", False),
        ("--no-compile", True, False),
        ("--compile", None, True),
        ("--engine deepspeed --zero-stage 2", True, True),
        ("--engine deepspeed --zero-stage 3", True, False),
    ],
)
def test_who_decides(
    make_plan: Any,
    runtime: Any,
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    fact: Any,
    wanted: bool,
) -> None:
    """`--compile` and `--no-compile` do; without them a device that says that it pays."""
    stand_in_for_deepspeed(monkeypatch)
    facts = dict(runtime.device.facts) | ({} if fact is None else {FACT: fact})
    device = dataclasses.replace(runtime.device, facts=facts)
    assert compiles_blocks(make_plan(flags), device) is wanted


def test_not_on_the_cpu(make_plan: Any, runtime: Any) -> None:
    """The CPU does not say so: there the first step costs more than most runs get back."""
    assert not compiles_blocks(make_plan(""), runtime.device)


def test_not_on_a_device_that_lacks_it(make_plan: Any, runtime: Any) -> None:
    """A reason in `missing` goes before the fact that it pays."""
    facts, missing = {FACT: True}, {**runtime.device.missing, "compile": "no code generator"}
    device = dataclasses.replace(runtime.device, facts=facts, missing=missing)
    assert not compiles_blocks(make_plan(""), device)
