"""Sentence splitters of `lmcore data prepare`: Punkt, rules, and one line a sentence.

The packages of the splitters are loaded on demand.  Punkt is NLTK's, as in Megatron, with the four
text files of `punkt_tab`:

    abbrev_types.txt     one abbreviation per line, without its period
    sent_starters.txt    words that often begin a sentence
    collocations.tab     pairs of words that belong together across a period
    ortho_context.tab    a word and its orthographic context, as a number

The older `.pickle` files can run code and are not read.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.errors import ConfigError, DataError, MissingPackageError, suggestion, unreadable

__all__ = ["SPLITTERS", "SentenceOptions", "SentenceSplitter", "build_splitter"]

SPLITTERS = ("punkt", "sentencex", "lines")
# NLTK's names of its Punkt models, and ISO 639 codes.
_CODES = {
    "czech": "cs",
    "danish": "da",
    "dutch": "nl",
    "english": "en",
    "estonian": "et",
    "finnish": "fi",
    "french": "fr",
    "german": "de",
    "greek": "el",
    "italian": "it",
    "malayalam": "ml",
    "norwegian": "no",
    "polish": "pl",
    "portuguese": "pt",
    "russian": "ru",
    "slovene": "sl",
    "spanish": "es",
    "swedish": "sv",
    "turkish": "tr",
}
_NAMES = {code: name for name, code in _CODES.items()}
_CODE = re.compile("[a-z]{2,3}")
_NAME = re.compile("[a-z_]{3,40}")


class SentenceSplitter(Protocol):
    """Sentence splitter; can be pickled, and is thread-safe."""

    def split(self, text: str) -> Sequence[str]:
        """Return the sentences of *text*, in order; sentences without tokens are dropped later."""

    def describe(self) -> dict[str, str]:
        """Return the settings; splitters with equal settings give equal sentences."""


@dataclass(frozen=True)
class SentenceOptions:
    """Options of a sentence splitter.

    Attributes:
        splitter: one of `SPLITTERS`.
        lang: language, by NLTK's name (`english`) or ISO 639 code (`en`).
        keep_newlines: keep the white space after a sentence as part of it.
        punkt_model: directory of Punkt's tables; None: in NLTK's data.
    """

    splitter: str = "punkt"
    lang: str = "english"
    keep_newlines: bool = False
    punkt_model: str | None = None


@dataclass(frozen=True)
class LineSplitter:
    """Splitter of texts with one sentence per line (`--presplit-sentences`).

    Attributes:
        keep_newlines: keep the line end as part of a sentence.
    """

    keep_newlines: bool = False

    def split(self, text: str) -> Sequence[str]:
        """Return the lines that are not blank."""
        lines = text.split("\n")
        if self.keep_newlines:
            lines = [f"{line}\n" for line in lines[:-1]] + lines[-1:]
        else:
            lines = [line.removesuffix("\r") for line in lines]
        return [line for line in lines if line.strip()]

    def describe(self) -> dict[str, str]:
        """Return the settings."""
        return {"splitter": "lines", "keep_newlines": str(self.keep_newlines)}


@dataclass(frozen=True)
class RuleSplitter:
    """Splitter with the rules and abbreviations of about 240 languages: the `sentencex` package.

    Attributes:
        lang: name or ISO 639 code; for a code without rules the package uses a related language.
        keep_newlines: keep the white space after a sentence as part of it.

    Raises:
        ConfigError: *lang* is neither a known name nor a code.
        MissingPackageError: `sentencex` is not installed.
    """

    lang: str
    keep_newlines: bool = False

    def __post_init__(self) -> None:
        _code_of(self.lang)
        try:
            import sentencex  # noqa: F401
        except ImportError:
            raise MissingPackageError(
                "sentencex",
                needed_for="`--sentence-splitter sentencex`",
                install="pip install sentencex",
            ) from None

    def split(self, text: str) -> Sequence[str]:
        """Return the sentences; only white space of the text may be missing."""
        import sentencex

        sentences: list[str] = []
        for piece in sentencex.segment(_code_of(self.lang), text):
            if not self.keep_newlines:
                sentences.append(piece.strip())
            elif sentences and not piece.strip():  # the separator of paragraphs is a separate piece
                sentences[-1] += piece
            else:
                sentences.append(piece)
        return [sentence for sentence in sentences if sentence]

    def describe(self) -> dict[str, str]:
        """Return the settings."""
        from importlib.metadata import version  # imported on demand: 25 ms

        return {
            "splitter": "sentencex",
            "version": version("sentencex"),
            "lang": _code_of(self.lang),
            "keep_newlines": str(self.keep_newlines),
        }


def build_splitter(options: SentenceOptions) -> SentenceSplitter:
    """Build the splitter of *options*.

    Raises:
        ConfigError: an unknown splitter or language, or Punkt's tables are not installed.
        DataError: the tables are damaged.
        MissingPackageError: the package of the splitter is not installed.
    """
    if options.punkt_model is not None and options.splitter != "punkt":
        raise ConfigError(
            f"`--punkt-model` has no effect with `--sentence-splitter {options.splitter}`",
            hint="omit one of them",
        )
    match options.splitter:
        case "punkt":
            model = options.punkt_model
            folder = Path(model) if model is not None else find_tables(_name_of(options.lang))
            return PunktSplitter(read_tables(folder), keep_newlines=options.keep_newlines)
        case "sentencex":
            return RuleSplitter(options.lang, options.keep_newlines)
        case "lines":
            return LineSplitter(options.keep_newlines)
        case unknown:
            raise ConfigError(
                f"unknown `--sentence-splitter {unknown}`", hint=suggestion(unknown, SPLITTERS)
            )


def _name_of(lang: str) -> str:
    """Return NLTK's name of a language given by name or code; an unknown name is returned as is.

    Raises:
        ConfigError: neither a plain word nor a known code.
    """
    lowered = lang.lower()
    name = _NAMES.get(lowered, lowered)
    if not _NAME.fullmatch(name):  # it becomes part of a path
        raise ConfigError(f"unknown `--lang {lang}`", hint=suggestion(lowered, _CODES))
    return name


def _code_of(lang: str) -> str:
    """Return the ISO 639 code of a language given by name or code.

    Raises:
        ConfigError: neither a known name nor a code of two or three letters.
    """
    lowered = lang.lower()
    code = _CODES.get(lowered, lowered)
    if not _CODE.fullmatch(code):
        raise ConfigError(
            f"unknown `--lang {lang}`",
            why="it must be an ISO 639 code of two or three letters, such as `en`",
            hint=suggestion(lowered, _CODES),
        )
    return code


_MAX_CHARACTERS = 1_000_000  # as in Megatron, which splits longer texts there, even inside a word

# NLTK's pattern of a possible sentence end, with the white space after the period as part of the
# sentence; the word before the period is matched as in Megatron.
_KEEPING = r"\S*%(SentEndChars)s\s*(?=(?P<after_tok>%(NonWord)s|(?P<next_tok>\S+)))"
_FILES = ("abbrev_types.txt", "sent_starters.txt", "collocations.tab", "ortho_context.tab")
_MAX_BYTES = 1 << 26
_SYSTEM = ("/usr/share", "/usr/local/share", "/usr/lib", "/usr/local/lib")


class PunktSplitter:
    """Sentence splitter of NLTK.

    Source: Kiss and Strunk 2006, as implemented in `nltk.tokenize.punkt`.

    Args:
        tables: Punkt's parameters of the language.
        keep_newlines: keep the white space after a sentence as part of it.

    Raises:
        MissingPackageError: `nltk` is not installed.
    """

    def __init__(self, tables: PunktTables, *, keep_newlines: bool = False) -> None:
        self._tables, self._keep_newlines = tables, keep_newlines
        self._tokenizer = _tokenizer(tables, keep_newlines=keep_newlines)

    def split(self, text: str) -> Sequence[str]:
        """Return the sentences."""
        sentences: list[str] = []
        for start in range(0, len(text), _MAX_CHARACTERS):
            sentences += self._tokenizer.tokenize(text[start : start + _MAX_CHARACTERS])
        return sentences

    def describe(self) -> dict[str, str]:
        """Return the settings."""
        return {
            "splitter": "punkt",
            "tables": self._tables.fingerprint,
            "keep_newlines": str(self._keep_newlines),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self._tables, self._keep_newlines)


def _rebuilt(tables: PunktTables, keep_newlines: bool) -> PunktSplitter:  # noqa: FBT001
    return PunktSplitter(tables, keep_newlines=keep_newlines)


def _tokenizer(tables: PunktTables, *, keep_newlines: bool) -> Any:
    try:
        from nltk.tokenize import punkt
    except ImportError:
        raise MissingPackageError(
            "nltk", needed_for="`--split-sentences`", install="pip install nltk"
        ) from None
    parameters = punkt.PunktParameters()
    parameters.abbrev_types = set(tables.abbreviations)
    parameters.sent_starters = set(tables.starters)
    parameters.collocations = set(tables.collocations)
    parameters.ortho_context = defaultdict(int, tables.orthography)
    words = punkt.PunktLanguageVars()
    if keep_newlines:
        kept = {"_period_context_fmt": _KEEPING}
        words = type("KeepingLanguageVars", (punkt.PunktLanguageVars,), kept)()
    return punkt.PunktSentenceTokenizer(parameters, lang_vars=words)


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
        raise DataError(f"`{path}` is not UTF-8", why=unreadable(error)) from None
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
