"""Choice of the device by a process that chooses several times, such as for each seed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmcore.base import log
from lmcore.plugin import HANDED_DOWN
from lmcore.runtime import device_choice
from lmcore.runtime.launch.rank import RankInfo


def test_its_lines_are_shown_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chosen: Any = SimpleNamespace(warnings=("a plugin is old",), notice="using the CPU")
    monkeypatch.delenv(HANDED_DOWN, raising=False)
    monkeypatch.setattr(device_choice, "select", lambda _plugins, requested: chosen)
    monkeypatch.setattr(log, "_warned", set())
    caplog.set_level("INFO")
    unused: Any = None
    for _ in range(3):
        assert device_choice.select_device(unused, None, RankInfo()) is chosen
    assert [record.getMessage() for record in caplog.records] == [
        "a plugin is old",
        "using the CPU",
    ]
