"""Punkt's tables: the four text files of NLTK's `punkt_tab` data, and their search path.

    abbrev_types.txt     one abbreviation per line, without its period
    sent_starters.txt    words that often begin a sentence
    collocations.tab     pairs of words that belong together across a period
    ortho_context.tab    a word and its orthographic context, as a number

The older `.pickle` files can run code and are not read.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lmcore.bounded_file import read_bounded_file
from lmcore.errors import ConfigError, DataError

__all__ = ["PunktTables", "find_tables", "read_tables"]

_FILES = ("abbrev_types.txt", "sent_starters.txt", "collocations.tab", "ortho_context.tab")
_MAX_BYTES = 1 << 26
_SYSTEM = ("/usr/share", "/usr/local/share", "/usr/lib", "/usr/local/lib")


@dataclass(frozen=True)
class PunktTables:
    """Punkt's parameters of a language.

    Attributes:
        abbreviations: lower-case words, without the period.
        starters: words that often begin a sentence.
        collocations: pairs of words across a period.
        orthography: orthographic context of each word; bits as Punkt defines them.
        fingerprint: sha256 of the four files.
    """

    abbreviations: frozenset[str]
    starters: frozenset[str]
    collocations: frozenset[tuple[str, str]]
    orthography: dict[str, int]
    fingerprint: str


def find_tables(name: str) -> Path:
    """Return the directory of a language's tables in NLTK's data, by NLTK's search order.

    Raises:
        ConfigError: not installed; lists the directories searched.
    """
    roots = [Path(root) / "tokenizers" for root in _data_roots()]
    for root in roots:
        folder = root / "punkt_tab" / name
        if folder.is_dir():
            return folder
    raise _not_found(name, roots)


def _data_roots() -> Iterator[str]:
    yield from filter(None, os.environ.get("NLTK_DATA", "").split(os.pathsep))
    yield str(Path("~/nltk_data").expanduser())
    for base in (sys.prefix, f"{sys.prefix}/share", f"{sys.prefix}/lib", *_SYSTEM):
        yield f"{base}/nltk_data"


def _not_found(name: str, roots: list[Path]) -> ConfigError:
    reasons = [f"looked for `tokenizers/punkt_tab/{name}` in"]
    reasons += [f"  {root.parent}" for root in roots]
    for root in roots:
        known = sorted(path.name for path in (root / "punkt_tab").glob("*/"))
        if known:
            reasons.append(f"`{root / 'punkt_tab'}` has {', '.join(known)}")
        if (root / "punkt" / f"{name}.pickle").exists():
            reasons.append(f"`{root / 'punkt'}` has pickles, which can run code and are not read")
    return ConfigError(
        f"no Punkt tables for `--lang {name}`",
        why="\n".join(reasons),
        hint="download them with `python -m nltk.downloader punkt_tab`, or give `--punkt-model "
        "DIR`; `--sentence-splitter sentencex` needs none, but splits differently from Megatron",
    )


def read_tables(folder: Path) -> PunktTables:
    """Return the tables in *folder*.

    Raises:
        DataError: a file is missing, damaged or too large.
    """
    digest = hashlib.sha256()
    contents: dict[str, list[str]] = {}
    for name in _FILES:
        raw = _content(folder / name)
        digest.update(f"{name} {len(raw)}\n".encode() + raw)
        contents[name] = _lines(folder / name, raw)
    pairs = list(_pairs(folder / _FILES[2], contents[_FILES[2]]))
    written = dict(_pairs(folder / _FILES[3], contents[_FILES[3]]))
    return PunktTables(
        abbreviations=frozenset(contents[_FILES[0]]),
        starters=frozenset(contents[_FILES[1]]),
        collocations=frozenset(pairs),
        orthography={word: _number(folder / _FILES[3], bits) for word, bits in written.items()},
        fingerprint=digest.hexdigest(),
    )


def _content(path: Path) -> bytes:
    try:
        return read_bounded_file(path, _MAX_BYTES)
    except OSError as error:
        names = ", ".join(f"`{name}`" for name in _FILES)
        raise DataError(
            f"cannot read `{path}`",
            why=error.strerror or str(error),
            hint=f"a Punkt model is a directory with {names}",
        ) from error


def _lines(path: Path, raw: bytes) -> list[str]:
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"`{path}` is not UTF-8", why=str(error)) from None
    lines = text.replace("\r\n", "\n").split("\n")
    return lines[:-1] if not lines[-1] else lines


def _pairs(path: Path, lines: list[str]) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(lines, start=1):
        first, parted, second = line.partition("\t")
        if not parted or "\t" in second:
            raise DataError(
                f"`{path}` line {number} is not a pair",
                why=f"expected two fields and a tab, found `{line[:40]}`",
            )
        yield first, second


def _number(path: Path, bits: str) -> int:
    if not (bits.isascii() and bits.isdigit() and len(bits) < 10):
        raise DataError(f"`{path}`: `{bits[:40]}` is not a number")
    return int(bits)
