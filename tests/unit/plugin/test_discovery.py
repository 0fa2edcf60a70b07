"""Variables of lmcore in the environment, and misspelt ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lmcore.base import log
from lmcore.plugin.discovery import VARIABLES, warn_unknown_variables


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins without the warnings of others."""
    monkeypatch.setattr(log, "_warned", set())


def test_all_variables_are_known() -> None:
    """The list has every variable that the core names, and the documentation each of them."""
    root = Path(__file__).parents[3]
    named = {
        name
        for path in (root / "lmcore").rglob("*.py")
        for name in re.findall(r'"(LMCORE_[A-Z_]+[A-Z])"', path.read_text("utf-8"))
    }
    assert named == {*VARIABLES}
    text = (root / "docs/reference/environment.md").read_text("utf-8")
    assert [name for name in VARIABLES if f"| `{name}` |" not in text] == []


def test_misspelt(caplog: pytest.LogCaptureFixture) -> None:
    """A variable that nobody reads is a warning with the nearest name, once; a plugin's is none."""
    env = {
        "LMCORE_DEVCE": "cpu",
        "LMCORE_ZZZ": "1",
        "LMCORE_SIM_DEVICES": "2",
        "LMCORE_BIG_NPU_X": "1",
        "LMCORE_DEVICE": "cpu",
        "HOME": "/",
    }
    for _ in range(2):
        warn_unknown_variables(env, ["sim", "big-npu"])
    assert [record.getMessage() for record in caplog.records] == [
        "`LMCORE_DEVCE` has no effect: lmcore has no such variable; did you mean `LMCORE_DEVICE`?",
        "`LMCORE_ZZZ` has no effect: lmcore has no such variable",
    ]


def test_workers_do_not_repeat_it(caplog: pytest.LogCaptureFixture) -> None:
    """The process that started them has said it."""
    warn_unknown_variables({"LMCORE_DEVCE": "cpu", "LMCORE_SELECTION": "{}"}, ["cpu"])
    assert caplog.records == []
