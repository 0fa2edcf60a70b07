"""Prompts from files."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.generation.text.prompt import (
    read_json_schema,
    read_prompt_file,
    read_prompt_lines,
    read_stdin,
    source_and_prompt,
)


def written(path: Path, content: bytes) -> str:
    """Write a file with *content*; return its name."""
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize(
    "content,expected",
    [(b"a\nb\n", "a\nb"), (b"a\n\n", "a\n"), (b"a", "a"), (b"", ""), (b"a\r\n", "a")],
)
def test_file_is_one_prompt(content: bytes, expected: str, tmp_path: Path) -> None:
    """A file is one prompt, without the line break that ends it."""
    assert read_prompt_file(written(tmp_path / "p", content)) == expected


@pytest.mark.parametrize(
    "content,expected",
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"\n", [""]),
        ("é\r\n漢\u2028x\r\n".encode(), ["é", "漢\u2028x"]),
    ],
)
def test_each_line_is_a_prompt(content: bytes, expected: list[str], tmp_path: Path) -> None:
    """Every line counts, an empty one too, and only line breaks end a line."""
    assert read_prompt_lines(written(tmp_path / "p", content)) == expected


def test_no_lines(tmp_path: Path) -> None:
    """A file without a line has no prompt."""
    with pytest.raises(ConfigError, match="is empty"):
        read_prompt_lines(written(tmp_path / "p", b""))


@pytest.mark.parametrize("read", [read_prompt_file, read_prompt_lines])
def test_unreadable_files(read, tmp_path: Path) -> None:
    """A missing file, a directory, and bytes that are not UTF-8 are named, the line as well."""
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="cannot read the prompt file"):
            read(str(path))
    with pytest.raises(ConfigError, match="line 2 is not UTF-8"):
        read(written(tmp_path / "p", b"fine\n\xff\n"))


def test_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard input is one prompt."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é\n".encode())))
    assert read_stdin() == "é"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    with pytest.raises(ConfigError, match="standard input line 1 is not UTF-8"):
        read_stdin()


def test_the_end_of_a_source() -> None:
    """An encoder's input has one end, also if the tokenizer has put it there."""
    tokenizer = ByteTokenizer()
    end = tokenizer.eod
    assert source_and_prompt(tokenizer, [97, 98]) == ([97, 98, end], [0])
    assert source_and_prompt(tokenizer, (97, end)) == ([97, end], [0])
    assert source_and_prompt(tokenizer, ()) == ([end], [0])


def test_json_schema(tmp_path: Path) -> None:
    """A file with an object or a boolean; anything else is refused."""
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object"}')
    assert read_json_schema(str(file)) == {"type": "object"}
    for text, message in (
        ("{", "is not JSON"),
        ("[1]", "is not a JSON schema"),
        ('{"minimum": ' + "9" * 5000 + "}", "JSON"),
        ("[" * 99999, "JSON"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_json_schema(str(file))
    with pytest.raises(ConfigError, match=r"cannot read the file `.*` of `--json-schema`"):
        read_json_schema(str(tmp_path))
