"""Lines for a terminal: wrapped, indented, and with commands in one piece."""

from __future__ import annotations

import pytest

from lmcore.cli.text.terminal import output_width, wrapped


def test_lines_are_wrapped_and_indented():
    """The first line has its own beginning, and no line is wider than asked."""
    text = wrapped("one two three four five", 12, first="> ", rest="   ")
    assert text == "> one two\n   three\n   four five"


def test_a_command_is_not_broken():
    """A command in backticks is not broken, so that it can be copied."""
    command = "`pip install 'thing==1' --index-url https://example.org/simple`"
    lines = wrapped(f"please run {command} now", 30, rest="  ").splitlines()
    assert lines == ["please run", f"  {command}", "  now"]


def test_each_line_is_wrapped_by_itself():
    """Line breaks of the text stay, and an empty text is an empty line."""
    assert wrapped("a\nb", 20, first="- ", rest="  ") == "- a\n  b"
    assert wrapped("", 20, first="- ") == "- "


@pytest.mark.parametrize("columns, width", [("80", 80), ("10", 40)])
def test_the_width_is_the_terminals(monkeypatch, columns, width):
    """Within reason."""
    monkeypatch.setenv("COLUMNS", columns)
    assert output_width() == width
