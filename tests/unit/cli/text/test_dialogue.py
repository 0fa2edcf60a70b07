"""Dialogues on a terminal: prompts, Ctrl-C, errors that end nothing."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from lmcore.base.errors import ConfigError
from lmcore.cli.text.dialogue import Dialogue


class Screen(io.StringIO):
    """An output that is a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes a dialogue whose user types some lines or causes exceptions."""

    def make(*lines: str | type[BaseException]) -> tuple[Dialogue, Screen]:
        answers = iter(lines)

        def ask(_prompt: str) -> str:
            line = next(answers, EOFError)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", ask)
        monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
        screen = Screen()
        return Dialogue(screen, prompt="you>"), screen

    return make


def test_terminal(typed, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C at the prompt, an error and bytes that are not UTF-8 are notes; Ctrl-D ends."""
    dialogue, screen = typed("a", KeyboardInterrupt, "\udc80", " ", "wrong", "\udcc3\udcbc")
    taken = []

    def take(line: str) -> bool:
        if line == "wrong":
            raise ConfigError("no")
        taken.append(line)
        dialogue.write(f"{line}\x1b[2J")
        return True

    dialogue.lines(take)
    assert taken == ["a", "ü"], "bytes of UTF-8, as the C locale leaves them"
    notes = capsys.readouterr().err
    assert notes == "\n(Ctrl-D ends)\nthe line is not UTF-8\nerror: no\n\n"
    assert "\x1b" not in screen.getvalue()
    assert screen.getvalue().count("\n") == 1  # between the first text and the error


def test_end(typed) -> None:
    """The caller can end a dialogue."""
    dialogue, _ = typed("a", "b")
    taken: list[str] = []
    dialogue.lines(lambda line: bool(taken.append(line)))
    assert taken == ["a"]


def test_bold(typed) -> None:
    """Text of the user is bold on a terminal."""
    dialogue, screen = typed()
    dialogue.write("x", bold=True)
    dialogue.write("")
    assert screen.getvalue() == "\x1b[1mx\x1b[0m"


def test_waits(typed, monkeypatch: pytest.MonkeyPatch) -> None:
    """`waits` is called before each line of a terminal, after Ctrl-C too, and not for a pipe."""
    typed("a", KeyboardInterrupt, "b")
    waits: list[None] = []
    dialogue = Dialogue(Screen(), prompt="you>", waits=lambda: waits.append(None))
    dialogue.lines(lambda line: True)
    assert len(waits) == 4
    stdin = SimpleNamespace(buffer=io.BytesIO(b"a\n"), isatty=lambda: False)
    monkeypatch.setattr("sys.stdin", stdin)
    dialogue = Dialogue(Screen(), prompt="you>", waits=lambda: waits.append(None))
    dialogue.lines(lambda line: True)
    assert len(waits) == 4
