"""Step `ngram`: decontamination, the removal of passages that occur in evaluation sets.

`read_evaluation_sets` reads the texts of the sets.

Words are runs of letters, digits and `_` in lower case.  Each 13-gram of an evaluation text is
searched, or the whole text if it has 8 to 12 words.  Around a match the document is cut: 200
characters to each side and on to the end of the sentence; the rest on either side becomes a
separate document if it has 200 characters.

Source: the OpenWebText scripts of Megatron; Brown et al. 2020, appendix C.

Windows of words are searched by hash, for all windows of a document at once; the words themselves
are compared on a hit.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from lmcore.base.errors import ConfigError, DataError
from lmcore.data.input.compression import open_text
from lmcore.data.input.files import ending_of, resolve_inputs
from lmcore_data_tools.clean.document import Document, Drop, Replace, Verdict

__all__ = [
    "EvaluationNgrams",
    "NgramSettings",
    "NgramStep",
    "cut_around",
    "read_evaluation_sets",
    "words_of",
]

_WORD = re.compile(r"\w+")
_SENTENCE_ENDS = ".!?"
_BASE = np.uint64(0x9E3779B97F4A7C15)

Hashes = npt.NDArray[np.uint64]
_MOST_BYTES = 1 << 30
_TABLES = {".csv": ",", ".tsv": "\t"}


@dataclass(frozen=True)
class NgramSettings:
    """Settings of decontamination.

    Attributes:
        longest: n, number of words of an n-gram.
        shortest: minimum number of words of a text that is searched as a whole.
        cut: number of characters cut on each side of a match, at least.
        shortest_piece: minimum number of characters of a remaining piece.
        most_pieces: maximum number of pieces; a document with more is dropped.
    """

    longest: int = 13
    shortest: int = 8
    cut: int = 200
    shortest_piece: int = 200
    most_pieces: int = 10

    def __post_init__(self) -> None:
        if self.shortest > self.longest:
            raise ConfigError(
                f"`--ngram-min {self.shortest}` is more than `--ngram {self.longest}`"
            )


def lowered(text: str) -> str:
    """Return *text* in lower case, with every character at its index."""
    low = text.lower()
    if len(low) == len(text):
        return low
    return "".join(one if len(one := char.lower()) == 1 else char for char in text)


def words_of(text: str) -> list[str]:
    """Return the words of *text* in lower case."""
    return _WORD.findall(lowered(text))


class EvaluationNgrams:
    """N-grams of evaluation texts.

    Args:
        texts: evaluation texts.
        settings: sizes of the n-grams.
    """

    def __init__(self, texts: Sequence[str], settings: NgramSettings) -> None:
        self.settings = settings
        self._ngrams: set[tuple[str, ...]] = set()
        for text in texts:
            words = words_of(text)
            if len(words) < settings.shortest:
                continue
            size = min(settings.longest, len(words))
            self._ngrams |= {tuple(words[at : at + size]) for at in range(len(words) - size + 1)}
        self._numbers = {
            word: number
            for number, word in enumerate(sorted({w for ngram in self._ngrams for w in ngram}), 1)
        }
        self._hashes = self._hash_all()

    def __len__(self) -> int:
        return len(self._ngrams)

    def matches(
        self, words: Sequence[str], numbers: npt.NDArray[np.uint64]
    ) -> Iterator[tuple[int, int]]:
        """Yield start and length of each n-gram in *words*, by start, then longest first."""
        found: list[tuple[int, int]] = []
        windows_of = _Windows(_mixed(numbers))
        for size, hashes in self._hashes.items():
            found.extend(
                (at, -size)
                for at in hashes.places(windows_of.hashes(size))
                if tuple(words[at : at + size]) in self._ngrams
            )
        for at, size in sorted(found):
            yield at, -size

    def numbers_of(self, words: Sequence[str]) -> npt.NDArray[np.uint64]:
        """Return the number of each word, 0 for a word in no n-gram."""
        return np.array(list(map(self._numbers.get, words, repeat(0))), np.uint64)

    def _hash_all(self) -> dict[int, _HashSet]:
        hashes: dict[int, _HashSet] = {}
        for size in sorted({len(ngram) for ngram in self._ngrams}, reverse=True):
            rows = [ngram for ngram in self._ngrams if len(ngram) == size]
            numbers = np.array(
                [[self._numbers[word] for word in ngram] for ngram in rows], np.uint64
            )
            total = np.zeros(len(rows), np.uint64)
            for column in range(size):
                total = total * _BASE + _mixed(numbers[:, column])
            hashes[size] = _HashSet(total)
        return hashes


class _HashSet:
    """Set of hashes with vectorized lookup: first by a bitmap of their leading bits."""

    def __init__(self, hashes: Hashes) -> None:
        self._sorted = np.unique(hashes)
        bits = min(max(16, len(hashes).bit_length() + 4), 28)
        self._shift = np.uint64(64 - bits)
        self._begins = np.zeros(1 << bits, np.bool_)
        self._begins[self._sorted >> self._shift] = True

    def places(self, hashes: Hashes) -> list[int]:
        """Return the indices of *hashes* that are in the set."""
        likely = np.flatnonzero(self._begins[hashes >> self._shift])
        wanted = hashes[likely]
        found = np.minimum(np.searchsorted(self._sorted, wanted), len(self._sorted) - 1)
        there: list[int] = likely[self._sorted[found] == wanted].tolist()
        return there


class _Windows:
    """Polynomial hashes of windows of words, composed of windows of 1, 2, 4, 8 ... words."""

    def __init__(self, mixed: Hashes) -> None:
        self._doubled = [mixed]

    def hashes(self, size: int) -> Hashes:
        """Return the hash of every window of *size* words."""
        count = len(self._doubled[0]) - size + 1
        if count <= 0:
            return np.empty(0, np.uint64)
        total = np.zeros(count, np.uint64)
        done = 0
        for power in reversed(range(size.bit_length())):
            if size >> power & 1:
                part = self._of_power(power)[done : done + count]
                total = total * _power_of_base(1 << power) + part
                done += 1 << power
        return total

    def _of_power(self, power: int) -> Hashes:
        while len(self._doubled) <= power:
            last = self._doubled[-1]
            half = 1 << len(self._doubled) - 1
            self._doubled.append(last[:-half] * _power_of_base(half) + last[half:])
        return self._doubled[power]


def _power_of_base(exponent: int) -> np.uint64:
    return np.uint64(pow(int(_BASE), exponent, 1 << 64))


def _mixed(numbers: npt.NDArray[np.uint64]) -> Hashes:
    """Return hashes of consecutive numbers, by the first steps of SplitMix64's finalizer."""
    mixed = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return mixed ^ (mixed >> np.uint64(27))


class NgramStep:
    """Document step that cuts the n-grams of evaluation sets out of documents."""

    def __init__(self, ngrams: EvaluationNgrams) -> None:
        self._ngrams = ngrams

    def judge(self, document: Document) -> Verdict:
        """Return `Replace` with the remaining pieces, or `Drop` for none or too many."""
        text = document.text
        words = words_of(text)
        settings = self._ngrams.settings
        numbers = self._ngrams.numbers_of(words)
        if np.count_nonzero(numbers) < settings.shortest:
            return None
        matches = list(self._ngrams.matches(words, numbers))
        if not matches:
            return None
        spans = [match.span() for match in _WORD.finditer(lowered(text))]
        places = [(spans[at][0], spans[at + size - 1][1]) for at, size in matches]
        cuts = cut_around(text, places, settings.cut)
        at, size = matches[0]
        detail = " ".join(words[at : at + size])
        pieces, removed = _parts(text, cuts, settings.shortest_piece)
        if not pieces:
            return Drop("nothing left", detail)
        if len(pieces) > settings.most_pieces:
            return Drop("too many pieces", f"{len(pieces)} pieces, first cut at: {detail}")
        return Replace(tuple(pieces), tuple(removed), "cut", detail)


def cut_around(text: str, places: Sequence[tuple[int, int]], margin: int) -> list[tuple[int, int]]:
    """Return start and end of each cut of *text* around *places*, which are in order.

    A cut begins *margin* characters before a place, or earlier, after the last sentence end (`.`,
    `!` or `?`) there; it ends *margin* characters after the place, or later, after the next
    sentence end.  Without one it extends to the beginning or the end of the text.  A place that
    begins inside a cut makes no further cut.
    """
    cuts: list[tuple[int, int]] = []
    free = 0  # end of the last cut
    for begin, end in places:
        if begin < free:
            continue
        start = begin - margin
        while start > free and text[start] not in _SENTENCE_ENDS:
            start -= 1
        start = start + 1 if start > free else free
        stop = end + margin
        while stop < len(text) and text[stop] not in _SENTENCE_ENDS:
            stop += 1
        stop = min(stop + 1, len(text))
        cuts.append((start, stop))
        free = stop
    return cuts


def _parts(
    text: str, cuts: Sequence[tuple[int, int]], shortest: int
) -> tuple[list[str], list[str]]:
    """Return the pieces between the cuts that are long enough, and the removed passages."""
    pieces, removed = [], []
    before = 0
    for start, stop in [*cuts, (len(text), len(text))]:
        piece = text[before:start]
        if len(piece) >= shortest:
            pieces.append(piece)
        elif piece:
            removed.append(piece)
        if stop > start:
            removed.append(text[start:stop])
        before = stop
    return pieces, removed


def read_evaluation_sets(files: Sequence[str], keys: Sequence[str]) -> list[str]:
    """Return the texts under any of *keys*, at any depth of the records of evaluation sets.

    The published formats of LAMBADA, RACE, SQuAD and the tables of GLUE are supported.

    Args:
        files: JSON lines, JSON, csv or tsv, compressed or not; patterns and directories as well.
        keys: keys of texts or of lists of texts.

    Raises:
        DataError: a file that cannot be read, or that has none of the keys.
    """
    texts: list[str] = []
    wanted = frozenset(keys)
    for path in resolve_inputs(files):
        before = len(texts)
        names: dict[str, None] = {}
        for record in _records(path):
            names.update(dict.fromkeys(_names(record)))
            texts.extend(_texts(record, wanted, inside=False))
        if len(texts) == before:
            shown = ", ".join(f"`{name[:40]}`" for name in list(names)[:20]) or "none"
            raise DataError(
                f"`{path}` has no text under {' or '.join(f'`{key}`' for key in keys)}",
                why=f"its keys: {shown}",
                hint="give the keys of the texts with `--task-keys`",
            )
    return texts


def _records(path: str) -> Iterator[Any]:
    text = _content(path)
    delimiter = _TABLES.get(ending_of(path))
    if delimiter is not None:
        csv.field_size_limit(_MOST_BYTES)
        if delimiter == "\t":  # quotes are ordinary characters in the tables of GLUE
            rows = csv.DictReader(io.StringIO(text), delimiter="\t", quoting=csv.QUOTE_NONE)
        else:
            rows = csv.DictReader(io.StringIO(text), delimiter=delimiter)
        yield from rows
        return
    try:
        yield json.loads(text)  # one object or array, over any number of lines
    except (ValueError, RecursionError):
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(
                        f"`{path}` line {number}: broken JSON",
                        why=str(error),
                        hint="an evaluation set is JSON lines, JSON, or a table `.csv` or `.tsv`",
                    ) from None


def _content(path: str) -> str:
    with open_text(path) as stream:
        content = stream.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise DataError(f"`{path}` has more than 1 GiB", why="evaluation sets are read into memory")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"`{path}` is not UTF-8", hint="convert the file to UTF-8") from None


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield str(name)
            yield from _names(inner)
    elif isinstance(value, list):
        for inner in value[:1]:
            yield from _names(inner)


def _texts(value: Any, keys: frozenset[str], *, inside: bool) -> Iterator[str]:
    """Yield the strings below the keys; *inside* is set below one of them."""
    if isinstance(value, str):
        if inside:
            yield value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(inner, keys, inside=inside or name in keys)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, keys, inside=inside)
