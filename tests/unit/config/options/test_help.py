"""Help texts: aligned, wrapped, with bounds and defaults."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from lmcore.config.option import option, options_of
from lmcore.config.options.help import fitted, render_help, render_run_help
from lmcore.config.section import run_options


@dataclass(frozen=True)
class Sample:
    """A section."""

    num_layers: int = option(4, "Layers.", minimum=1)
    kind: str = option("a", "Kind.", choices=("a", "b"))
    save_optim: bool = option(True, "Save the state.")
    fast: bool = option(False, "Be fast.")
    files: tuple[str, ...] = option((), "Files to read.", metavar="FILE")
    a_name_that_is_rather_long: float | None = option(None, "Text " * 20)


EXPECTED = """\
Do it.

usage: lmcore do FILE [--flags]

arguments:
  FILE                          What to do.

options: all of them
  --num-layers N                Layers. [>= 1; default 4]
  --kind WORD                   Kind. [one of a, b; default a]
  --[no-]save-optim             Save the state. [default on]
  --fast                        Be fast.
  --files FILE ...              Files to read.
  --a-name-that-is-rather-long X
                                Text Text Text Text Text Text Text
                                Text Text Text Text Text Text Text
                                Text Text Text Text Text Text
  -h, --help                    Show this help.

The end."""


def test_whole_text() -> None:
    """The help of a small command, whole."""
    text = render_help(
        "lmcore do",
        "Do it.",
        [("options", "all of them", options_of(Sample))],
        positionals=[("FILE", "What to do.")],
        epilog="The end.",
        width=70,
    )
    assert text == EXPECTED


def test_run_help_shows_every_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """`lmcore train --help` shows each section's options, within the terminal's width."""
    monkeypatch.setenv("COLUMNS", "80")
    text = render_run_help("lmcore train", "Train.")
    for one in run_options().values():
        assert f"{one.flag[2:]}" in text
    assert "--preset NAME" in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_lines_of_prose_are_wrapped_together() -> None:
    """A text that is broken at 100 columns leaves no short lines within a paragraph."""
    text = "Documents stream from one to the next. The line of an\nunchanged one stays.\n\nEnd."
    assert fitted(text, 40).splitlines() == [
        "Documents stream from one to the next.",
        "The line of an unchanged one stays.",
        "",
        "End.",
    ]


def test_long_lines_are_wrapped() -> None:
    """Prose and tables are wrapped, code in backticks and commands are not broken."""
    text = (
        "A line of prose that is long, and `some code` at its end.\n\nrows:\n"
        "  name        a description that is longer than the line\n\n"
        "  lmcore data split --datasets one two --output-prefix parts"
    )
    assert fitted(text, 40).splitlines() == [
        "A line of prose that is long, and",
        "`some code` at its end.",
        "",
        "rows:",
        "  name        a description that is",
        "              longer than the line",
        "",
        "  lmcore data split --datasets one two --output-prefix parts",
    ]
    assert fitted(text, 100) == text
