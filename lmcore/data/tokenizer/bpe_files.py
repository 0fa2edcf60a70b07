"""Reading and checking `vocab.json` and `merges.txt` of a byte-level BPE."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import chain
from typing import cast

from lmcore.base.errors import DataError, counted

__all__ = [
    "Merge",
    "MergeRules",
    "byte_alphabet",
    "read_merges",
    "read_vocabulary",
    "require_match",
]

Merge = tuple[str, str]

_SPECIAL = re.compile(r"<.*>|\[.*\]", re.DOTALL)
_MAX_ID = 2**31 - 2
_EXPECTED = "`GPT2BPETokenizer` needs the tokenizer's own `vocab.json` and `merges.txt`"


@dataclass(frozen=True)
class MergeRules:
    """Rules of a `merges.txt`, highest priority first, each with its line number, from 1."""

    merges: list[Merge]
    lines: list[int]


def byte_alphabet() -> tuple[str, ...]:
    """Return the 256 characters that represent bytes in the files of a byte-level BPE.

    A printable Latin-1 byte is its own character; the other 68 (controls, space, soft hyphen) are
    the characters from U+0100 on, in order of byte.

    Source: the GPT-2 release.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    replacement = {byte: chr(256 + i) for i, byte in enumerate(others)}
    return tuple(replacement.get(byte, chr(byte)) for byte in range(256))


def read_vocabulary(path: str, content: bytes) -> dict[str, int]:
    """Return token to id of a `vocab.json`.

    Args:
        path: name of the file, for messages.
        content: bytes of the file.

    Raises:
        DataError: not UTF-8, not JSON, or not an object of tokens and distinct ids.
    """
    text = _decoded(path, content)
    try:
        vocabulary = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"`{path}` is not JSON", why=str(error), hint=_EXPECTED) from None
    if not isinstance(vocabulary, dict) or not vocabulary:
        raise DataError(f"`{path}` is not a JSON object of tokens and ids", hint=_EXPECTED)
    ids = vocabulary.values()
    if (
        set(map(type, ids)) != {int}
        or min(ids) < 0
        or max(ids) > _MAX_ID
        or (len(set(ids)) != len(vocabulary))
    ):
        raise _wrong_id(path, vocabulary)
    return vocabulary


def _wrong_id(path: str, vocabulary: dict[str, object]) -> DataError:
    """Return the error for the first invalid or duplicate id."""
    seen: dict[int, str] = {}
    for token, i in vocabulary.items():
        if type(i) is not int or not 0 <= i <= _MAX_ID:
            return DataError(f"`{path}`: the id of token `{token}` is `{i}`", hint=_EXPECTED)
        if i in seen:
            return DataError(f"`{path}`: tokens `{seen[i]}` and `{token}` share the id {i}")
        seen[i] = token
    raise AssertionError(path)


def read_merges(path: str, content: bytes) -> MergeRules:
    """Return the rules of a `merges.txt`.

    Args:
        path: name of the file, for messages.
        content: bytes of the file.

    Raises:
        DataError: not UTF-8, a line that is not two tokens, or a duplicate rule; names the line.
    """
    text = _decoded(path, content)
    lines = text.split("\n")
    if "\r" in text:
        lines = [line.removesuffix("\r") for line in lines]
    while lines and not lines[-1]:
        lines.pop()
    first = 1 if lines and lines[0].startswith("#version") else 0
    del lines[:first]
    merges = [tuple(line.split(" ")) for line in lines]
    sound = not merges or (
        set(map(len, merges)) == {2} and all(map(all, merges)) and len(set(merges)) == len(merges)
    )
    if not sound:
        raise _wrong_rule(path, lines, first + 1)
    return MergeRules(cast("list[Merge]", merges), list(range(first + 1, first + 1 + len(lines))))


def _wrong_rule(path: str, lines: list[str], first: int) -> DataError:
    """Return the error for the first line that is not a rule or repeats one."""
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=first):
        parts = line.split(" ")
        if len(parts) != 2 or not all(parts):
            return DataError(
                f"`{path}` line {number}: `{line[:60]}` is not a merge rule",
                why="a rule is two tokens separated by one space",
                hint=_EXPECTED,
            )
        if line in seen:
            return DataError(
                f"`{path}` line {number}: the rule `{line[:60]}` repeats line {seen[line]}"
            )
        seen[line] = number
    raise AssertionError(path)


def require_match(
    vocabulary: dict[str, int], rules: MergeRules, *, vocab_file: str, merge_file: str
) -> None:
    """Raise `DataError` unless the two files form one byte-level BPE.

    Every byte and the parts and result of every rule must be tokens; every token must be a byte,
    the result of a rule, or a special token (in angle or square brackets).
    """
    for byte, character in enumerate(byte_alphabet()):
        if character not in vocabulary:
            raise DataError(
                f"`{vocab_file}` has no token for the byte {byte} (`{character}`)",
                why="a byte-level BPE must be able to encode any text",
                hint=_EXPECTED,
            )
    results = set(map("".join, rules.merges))
    if not (results <= vocabulary.keys() and vocabulary.keys() >= {*chain(*rules.merges)}):
        raise _missing_token(vocabulary, rules, vocab_file, merge_file)
    made = results.union(byte_alphabet())
    orphans = [t for t in vocabulary if t not in made and not _SPECIAL.fullmatch(t)]
    if orphans:
        raise DataError(
            f"`{vocab_file}`: no rule of `{merge_file}` produces the token `{orphans[0]}` "
            f"(id {vocabulary[orphans[0]]})",
            why=f"the two files do not belong together: {counted(len(rules.merges), 'rule')}, "
            f"{counted(len(vocabulary), 'token')}, {len(orphans):,} of them unreachable",
            hint="take both files from the same tokenizer; `merges.txt` may be truncated",
        )


def _missing_token(
    vocabulary: dict[str, int], rules: MergeRules, vocab_file: str, merge_file: str
) -> DataError:
    """Return the error for the first rule with a token that the vocabulary does not have."""
    for number, (left, right) in zip(rules.lines, rules.merges, strict=True):
        for token in (left, right, left + right):
            if token not in vocabulary:
                return DataError(
                    f"`{merge_file}` line {number}: the rule `{left} {right}` needs the token "
                    f"`{token}`, which `{vocab_file}` does not have",
                    why="the two files do not belong together: "
                    f"{counted(len(rules.merges), 'rule')}, {counted(len(vocabulary), 'token')}",
                    hint="take both files from the same tokenizer",
                )
    raise AssertionError(merge_file)


def _decoded(path: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DataError(f"`{path}` line {line} is not UTF-8", hint=_EXPECTED) from None
