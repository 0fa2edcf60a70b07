"""Reads and checks `vocab.json` and `merges.txt` of a byte-level BPE before anything uses them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import chain
from typing import cast

from lmcore.errors import DataError

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
    """The rules of a `merges.txt`, highest priority first, and the line that each stands on."""

    merges: list[Merge]
    lines: list[int]


def byte_alphabet() -> tuple[str, ...]:
    """Return the character that stands for each byte in the files of a byte-level BPE.

    Printable Latin-1 bytes stand for themselves; the other 68 (controls, space, soft hyphen) are
    the characters from U+0100 on, in order of byte.  Source: the GPT-2 release.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    stands_for = {byte: chr(256 + i) for i, byte in enumerate(others)}
    return tuple(stands_for.get(byte, chr(byte)) for byte in range(256))


def read_vocabulary(path: str, content: bytes) -> dict[str, int]:
    """Return token -> id of a `vocab.json`; *path* is for messages.

    Raises:
        DataError: Not UTF-8, not JSON, not a map of strings to distinct ids.
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
    """Return the error of the first id that cannot be."""
    seen: dict[int, str] = {}
    for token, i in vocabulary.items():
        if type(i) is not int or not 0 <= i <= _MAX_ID:
            return DataError(f"`{path}`: the id of token `{token}` is `{i}`", hint=_EXPECTED)
        if i in seen:
            return DataError(f"`{path}`: tokens `{seen[i]}` and `{token}` share the id {i}")
        seen[i] = token
    raise AssertionError(path)


def read_merges(path: str, content: bytes) -> MergeRules:
    """Return the rules of a `merges.txt`; *path* is for messages.

    Raises:
        DataError: Not UTF-8, or a line that is not two tokens; names the line.
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
    """Return the error of the first line that is no rule, or stands there twice."""
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
                f"`{path}` line {number}: the rule `{line[:60]}` stands at line {seen[line]} too"
            )
        seen[line] = number
    raise AssertionError(path)


def require_match(
    vocabulary: dict[str, int], rules: MergeRules, *, vocab_file: str, merge_file: str
) -> None:
    """Raise `DataError` unless the two files make one byte-level BPE.

    Every byte and every rule's parts and result must be tokens, and every token must be a byte,
    a rule's result or a special token (in angle or square brackets).
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
            f"`{vocab_file}`: no rule of `{merge_file}` makes the token `{orphans[0]}` "
            f"(id {vocabulary[orphans[0]]})",
            why=f"the two files do not belong together: {len(rules.merges)} rules, "
            f"{len(vocabulary)} tokens, of which {len(orphans)} cannot be made",
            hint="take both files from the same tokenizer; `merges.txt` may be cut short",
        )


def _missing_token(
    vocabulary: dict[str, int], rules: MergeRules, vocab_file: str, merge_file: str
) -> DataError:
    """Return the error of the first rule with a token that the vocabulary lacks."""
    for number, (left, right) in zip(rules.lines, rules.merges, strict=True):
        for token in (left, right, left + right):
            if token not in vocabulary:
                return DataError(
                    f"`{merge_file}` line {number}: the rule `{left} {right}` needs the token "
                    f"`{token}`, which `{vocab_file}` does not have",
                    why=f"the two files do not belong together: {len(rules.merges)} rules, "
                    f"{len(vocabulary)} tokens",
                    hint="take both files from the same tokenizer",
                )
    raise AssertionError(merge_file)


def _decoded(path: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DataError(f"`{path}` line {line} is not UTF-8", hint=_EXPECTED) from None
