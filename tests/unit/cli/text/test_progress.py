"""The progress line of a command."""

from __future__ import annotations

import sys

import pytest

from lmcore.cli.text import progress as progress_line
from lmcore.cli.text.progress import ProgressLine


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the time by a value that a test sets."""
    now = [100.0]
    monkeypatch.setattr(progress_line.time, "monotonic", lambda: now[0])
    return now


def test_terminal_line_is_written_over(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal the line comes ten times a second at most, and is cleared at the end."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with ProgressLine(str) as line:
        for number, seconds in enumerate((0.0, 0.05, 0.06)):
            clock[0] += seconds
            line(number)
    assert line.live
    assert capsys.readouterr().err == "\x1b[K0\r\x1b[K2\r\x1b[K"


def test_line_is_cleared_when_the_command_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error's message starts on a clean line."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    def command() -> None:
        with ProgressLine(str) as line:
            line(1)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        command()
    assert capsys.readouterr().err == "\x1b[K1\r\x1b[K"


@pytest.mark.parametrize(
    "every, shown", [(True, "0\n1\n2\n"), (False, "2\n")], ids=["each", "by time"]
)
def test_log_has_whole_lines(
    clock: list[float], capsys: pytest.CaptureFixture[str], every: bool, shown: str
) -> None:
    """A log gets whole lines, every ten seconds or each once, as asked for."""
    with ProgressLine(str, every=every) as line:
        for number, seconds in enumerate((0, 9, 2)):
            clock[0] += seconds
            line(number)
    assert not line.live
    assert capsys.readouterr().err == shown
