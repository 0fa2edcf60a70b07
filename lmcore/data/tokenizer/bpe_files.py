"""Reads and checks `vocab.json` and `merges.txt` of a byte-level BPE before anything uses them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

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


def read_vocabulary(path: str) -> dict[str, int]:
    """Return token -> id of a `vocab.json`.

    Raises:
        DataError: Missing, not UTF-8, not JSON, not a map of strings to distinct ids.
    """
    text = _read(path, "--vocab-file")
    try:
        vocabulary = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"`{path}` is not JSON", why=str(error), hint=_EXPECTED) from None
    if not isinstance(vocabulary, dict) or not vocabulary:
        raise DataError(f"`{path}` is not a JSON object of tokens and ids", hint=_EXPECTED)
    seen: dict[int, str] = {}
    for token, i in vocabulary.items():
        if type(i) is not int or not 0 <= i <= _MAX_ID:
            raise DataError(f"`{path}`: the id of token `{token}` is `{i}`", hint=_EXPECTED)
        if i in seen:
            raise DataError(f"`{path}`: tokens `{seen[i]}` and `{token}` share the id {i}")
        seen[i] = token
    return vocabulary


def read_merges(path: str) -> MergeRules:
    """Return the rules of a `merges.txt`.

    Raises:
        DataError: Missing, not UTF-8, or a line that is not two tokens; names the line.
    """
    lines = [line.removesuffix("\r") for line in _read(path, "--merge-file").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    first = 1 if lines and lines[0].startswith("#version") else 0
    merges: dict[Merge, int] = {}
    for number, line in enumerate(lines[first:], start=first + 1):
        parts = line.split(" ")
        if len(parts) != 2 or not all(parts):
            raise DataError(
                f"`{path}` line {number}: `{line[:60]}` is not a merge rule",
                why="a rule is two tokens separated by one space",
                hint=_EXPECTED,
            )
        merge = (parts[0], parts[1])
        if merge in merges:
            raise DataError(
                f"`{path}` line {number}: the rule `{line[:60]}` stands at line {merges[merge]} too"
            )
        merges[merge] = number
    return MergeRules(list(merges), list(merges.values()))


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
    for number, (left, right) in zip(rules.lines, rules.merges, strict=True):
        for token in (left, right, left + right):
            if token not in vocabulary:
                raise DataError(
                    f"`{merge_file}` line {number}: the rule `{left} {right}` needs the token "
                    f"`{token}`, which `{vocab_file}` does not have",
                    why=f"the two files do not belong together: {len(rules.merges)} rules, "
                    f"{len(vocabulary)} tokens",
                    hint="take both files from the same tokenizer",
                )
    made = {left + right for left, right in rules.merges} | set(byte_alphabet())
    orphans = [t for t in vocabulary if t not in made and not _SPECIAL.fullmatch(t)]
    if orphans:
        raise DataError(
            f"`{vocab_file}`: no rule of `{merge_file}` makes the token `{orphans[0]}` "
            f"(id {vocabulary[orphans[0]]})",
            why=f"the two files do not belong together: {len(rules.merges)} rules, "
            f"{len(vocabulary)} tokens, of which {len(orphans)} cannot be made",
            hint="take both files from the same tokenizer; `merges.txt` may be cut short",
        )


def _read(path: str, flag: str) -> str:
    try:
        return Path(path).read_bytes().decode()
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DataError(f"`{path}` line {line} is not UTF-8", hint=_EXPECTED) from None
    except OSError as error:
        raise DataError(
            f"cannot read `{path}`", why=error.strerror or str(error), hint=f"check `{flag}`"
        ) from None
