"""Outputs for samples."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError, printable
from lmcore.cli.text.sample_output import (
    JsonOutput,
    LinesOutput,
    PlainOutput,
    Sample,
    check_output_file,
    open_output_file,
)

SAMPLE = Sample("Ein", " Bär\n", (1, 2, 3), 2, finished=True, seed=9)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_plain() -> None:
    """Redirected, a sample is its prompt and text and nothing else, even unprintable bytes."""
    stream = io.StringIO()
    output = PlainOutput(stream, num_samples=1)
    assert not output.streams
    output.end(Sample("a", "\x1b[2J\ufffd", (1,), 1, finished=False, seed=1))
    assert stream.getvalue() == "a\x1b[2J\ufffd\n"


def test_several() -> None:
    """Several samples are distinguished, each with the seed that gives it again."""
    stream = io.StringIO()
    output = PlainOutput(stream, num_samples=2)
    output.end(SAMPLE)
    output.end(SAMPLE)
    assert stream.getvalue() == (
        "--- sample 1 of 2, seed 9\nEin Bär\n\n\n--- sample 2 of 2, seed 9\nEin Bär\n\n"
    )


def test_terminal() -> None:
    """A lone sample grows on a terminal, its prompt in bold."""
    stream = Terminal()
    output = PlainOutput(stream, num_samples=1)
    assert output.streams
    output.begin("Ein")
    seen = [stream.getvalue()]
    for piece in (" B", "", "är\n"):
        output.piece(piece)
        seen.append(stream.getvalue())
    output.end(SAMPLE)
    assert seen[0] == "\x1b[1mEin\x1b[0m"
    assert [text.removeprefix(seen[0]) for text in seen[1:]] == [" B", " B", " Bär\n"]
    assert stream.getvalue().endswith(" Bär\n\n")


def test_several_on_a_terminal_do_not_mix() -> None:
    """Samples that are made together are shown whole."""
    assert not PlainOutput(Terminal(), num_samples=2).streams


def test_terminal_obeys_no_model() -> None:
    """Control characters in a model's text do not reach the terminal; line breaks and tabs stay."""
    assert printable("a\x1b[2J\x07\x9b\r\n\tß") == "a\ufffd[2J\ufffd\ufffd\ufffd\n\tß"
    stream = Terminal()
    PlainOutput(stream, num_samples=1).piece("\x1b]0;title\x07")
    assert "\x1b" not in stream.getvalue()


def test_json() -> None:
    """Each sample is one line of JSON with the five values."""
    stream = io.StringIO()
    output = JsonOutput(stream)
    output.end(SAMPLE)
    output.end(SAMPLE)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert json.loads(lines[0]) == {
        "prompt": "Ein",
        "text": " Bär\n",
        "tokens": [1, 2, 3],
        "finished": True,
        "seed": 9,
    }


def test_lines() -> None:
    """Megatron's form has the whole text and the count of all its tokens."""
    stream = io.StringIO()
    LinesOutput(stream).end(SAMPLE)
    assert json.loads(stream.getvalue()) == {"text": "Ein Bär\n", "length": 5, "finished": True}


class TestFile:
    """An output file is whole or as it was."""

    def test_appears_when_done(self, tmp_path: Path) -> None:
        """The file is there after the last sample, and nothing beside it."""
        path = tmp_path / "out.jsonl"
        with open_output_file(path) as stream:
            stream.write("x\n")
            assert not path.exists()
        assert path.read_text(encoding="utf-8") == "x\n"
        assert list(tmp_path.iterdir()) == [path]

    def test_failure_keeps_the_old_one(self, tmp_path: Path) -> None:
        """A failure on the way leaves an older file untouched and no remains."""
        path = tmp_path / "out.jsonl"
        path.write_text("old", encoding="utf-8")

        def fail() -> None:
            with open_output_file(path) as stream:
                stream.write("new")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fail()
        assert path.read_text(encoding="utf-8") == "old"
        assert list(tmp_path.iterdir()) == [path]

    def test_impossible_paths(self, tmp_path: Path) -> None:
        """A directory, or a file in none, is refused before anything is made."""
        with pytest.raises(ConfigError, match="is a directory"):
            check_output_file(tmp_path)
        with pytest.raises(ConfigError, match="no such directory"):
            check_output_file(tmp_path / "none" / "out.jsonl")
        check_output_file(tmp_path / "out.jsonl")
