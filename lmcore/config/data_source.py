"""Data sources of a run, parsed from its flags.

Megatron's three ways to name several sources: `--data-path W P W P`, a list for each part of its
own (`--train-data-path ...`), and ranges of documents (`--train-weighted-split-paths "NAME: W
START:END PATH, ..."`).  Reads no files: `lmcore.data.blend.check` fills in data file lists and
metadata, `lmcore.data.blend.sources` opens the data sets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lmcore.config.section.data import DataSection
from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.errors import ConfigError, LmcoreError

__all__ = [
    "BUNDLED",
    "DIVIDED",
    "OWN",
    "PARTS",
    "Blend",
    "DataSource",
    "Part",
    "RunSources",
    "data_sources",
    "overlapping_ranges",
    "parse_data_path",
    "parse_weighted_split_paths",
    "read_sources",
    "without_ending",
]

Part = Literal["train", "valid", "test"]
PARTS: tuple[Part, ...] = ("train", "valid", "test")

BUNDLED = "shakespeare"
"""Name of the text that comes with lmcore; the data of a run whose flags name none."""

DIVIDED = ("corpus", "data_path", "data_file_list")
"""Options whose documents `--split` divides into the parts."""

OWN = {
    part: tuple(f"{part}_{kind}" for kind in ("data", "data_path", "weighted_split_paths"))
    for part in PARTS
}
"""The options that name sources of one part alone."""

_ONE_BY_ONE = "write weight and data set in turn, such as `0.7 web 0.3 books`, or no weight at all"
_RANGES = 'write `"NAME: WEIGHT START:END PATH, ..."`, such as `"train: 0.5 0:0.9 web"`'


@dataclass(frozen=True)
class DataSource:
    """One data set of a blend.

    Attributes:
        name: Prefix of the indexed data set, or the name of a text.
        weight: Its share of the samples, not normalized; None: in proportion to its size.
        documents: Start and end of its documents, as fractions; None: as `--split` divides them.
        corpus: True if `name` is the name of a text rather than a prefix.
        tokenizer: The tokenizer that made the data set, from its metadata file; None: unknown.
        append_eod: True if each document ends with an end-of-document token; None: unknown.
    """

    name: str
    weight: float | None = None
    documents: tuple[float, float] | None = None
    corpus: bool = False
    tokenizer: TokenizerIdentity | None = None
    append_eod: bool | None = None


@dataclass(frozen=True)
class Blend:
    """The sources of all parts or of one, in the order given.

    Attributes:
        option: The option that names them.
        sources: At least one, or none where `file_list` names them.
        title: What the user calls the blend (`--valid-weighted-split-paths`).
        file_list: A data file list to read them from.
    """

    option: str
    sources: tuple[DataSource, ...]
    title: str = ""
    file_list: str | None = None

    @property
    def flag(self) -> str:
        """The option as a flag."""
        return "--" + self.option.replace("_", "-")


@dataclass(frozen=True)
class RunSources:
    """Every source of a run.

    Attributes:
        divided: Blend whose documents `--split` divides into the parts; None if each part has its
            own blend.
        own: Blend of each part that has its own.
        bundled: True if no flag names data, so that the run reads the bundled text.
    """

    divided: Blend | None
    own: Mapping[Part, Blend] = field(default_factory=dict)
    bundled: bool = False

    def blends(self) -> tuple[Blend, ...]:
        """Return every blend, training first."""
        return (
            (self.divided,) if self.divided else tuple(self.own[p] for p in PARTS if p in self.own)
        )


def data_sources(settings: DataSection) -> RunSources:
    """Return the sources that the `data` section names; without any, the bundled text.

    Raises:
        ConfigError: Weights or ranges that cannot be read, all of them; names the options.
    """
    found, problems = read_sources(settings)
    _raise_all(problems)
    return found


def read_sources(settings: DataSection) -> tuple[RunSources, list[LmcoreError]]:
    """Return the sources as far as they can be read, and what is wrong with the words.

    A source whose weight or range is wrong is among them, so that more can be found wrong with it.
    Texts in `train_data` are divided by `--split` where validation and test have nothing of
    their own.
    """
    own: dict[Part, Blend] = {}
    problems: list[LmcoreError] = []
    for part in PARTS:
        for option in OWN[part]:
            words = getattr(settings, option)
            if words:
                own[part] = _own_blend(option, words, problems)
    if set(own) == {"train"} and own["train"].option == "train_data":
        return RunSources(own["train"]), problems
    if own:
        return RunSources(None, own), problems
    if settings.data_file_list is not None:
        divided = Blend("data_file_list", (), file_list=settings.data_file_list)
    elif settings.data_path:
        sources = _data_path(settings.data_path, "--data-path", problems)
        divided = Blend("data_path", sources)
    else:
        divided = Blend("corpus", (DataSource(settings.corpus or BUNDLED, corpus=True),))
        return RunSources(divided, bundled=settings.corpus is None), problems
    return RunSources(divided), problems


def _own_blend(option: str, words: tuple[str, ...], problems: list[LmcoreError]) -> Blend:
    flag = "--" + option.replace("_", "-")
    if option.endswith("_data"):
        return Blend(option, tuple(DataSource(word, corpus=True) for word in words))
    if option.endswith("_data_path"):
        return Blend(option, _data_path(words, flag, problems))
    groups = _weighted_split_paths(words, flag, problems)
    if len(groups) > 1:
        problem = ConfigError(
            f"`{flag}` names {len(groups)} blends: {', '.join(f'`{name}`' for name in groups)}",
            why="a run trains, validates and tests on one blend each",
            hint="keep one of them, or put their paths into one",
        )
        problems.append(problem)
    title, sources = next(iter(groups.items()), ("", ()))
    return Blend(option, sources, title)


def without_ending(path: str) -> str:
    """Return the prefix that `PREFIX.bin`, `PREFIX.idx` or the prefix itself names."""
    return path.removesuffix(".bin").removesuffix(".idx")


def parse_data_path(words: Sequence[str], flag: str) -> tuple[DataSource, ...]:
    """Return the sources of `W P W P ...`, or of `P P ...`, which go by their sizes.

    Raises:
        ConfigError: A weight that is negative, zero or none, or that some sources lack.
    """
    problems: list[LmcoreError] = []
    found = _data_path(words, flag, problems)
    _raise_all(problems)
    return found


def _data_path(
    words: Sequence[str], flag: str, problems: list[LmcoreError]
) -> tuple[DataSource, ...]:
    numeric = [_is_number(word) for word in words]
    if not any(numeric):
        return tuple(DataSource(without_ending(word.strip())) for word in words)
    shown = f"`{flag} {' '.join(words)}`"
    for place, (word, number) in enumerate(zip(words, numeric, strict=True)):
        if place % 2 == 0 and not number:
            problem = ConfigError(
                f"{shown}: `{word}` stands where a weight is expected",
                why="other data sets have weights",
                hint=_ONE_BY_ONE,
            )
            problems.append(problem)
            return ()
        if place % 2 == 1 and number:
            what = f"{shown}: `{word}` stands where a data set is expected"
            problems.append(ConfigError(what, hint=_ONE_BY_ONE))
            return ()
    if len(words) % 2:
        what = f"{shown}: no data set follows the weight `{words[-1]}`"
        problems.append(ConfigError(what, hint=_ONE_BY_ONE))
        return ()
    return tuple(
        DataSource(without_ending(path.strip()), _weight(text, path, flag, problems))
        for text, path in zip(words[::2], words[1::2], strict=True)
    )


def parse_weighted_split_paths(
    words: Sequence[str], flag: str
) -> dict[str, tuple[DataSource, ...]]:
    """Return the sources of each `"NAME: W START:END PATH, W START:END PATH"`, by name.

    Args:
        words: As typed; a group that the shell has split at its blanks is put together again.
        flag: For messages.

    Raises:
        ConfigError: Not such a text, a bad weight, or a range that is empty or beyond 0 to 1.
    """
    problems: list[LmcoreError] = []
    found = _weighted_split_paths(words, flag, problems)
    _raise_all(problems)
    return found


def _weighted_split_paths(
    words: Sequence[str], flag: str, problems: list[LmcoreError]
) -> dict[str, tuple[DataSource, ...]]:
    groups = list(words) if any(" " in word.strip() for word in words) else [" ".join(words)]
    found: dict[str, tuple[DataSource, ...]] = {}
    for group in groups:
        title, colon, rest = (part.strip() for part in group.partition(":"))
        entries = [entry.split() for entry in rest.split(",") if entry.strip()]
        if not (colon and title and entries) or any(len(entry) != 3 for entry in entries):
            problems.append(ConfigError(f"`{flag} {group}` cannot be read", hint=_RANGES))
            continue
        if title in found:
            what = f"`{flag}` has two blends of the name `{title}`"
            problems.append(ConfigError(what, hint=_RANGES))
        found[title] = tuple(
            DataSource(
                without_ending(path),
                _weight(weight, path, flag, problems),
                _range(span, path, flag, problems),
            )
            for weight, span, path in entries
        )
    return found


def overlapping_ranges(sources: RunSources) -> Iterator[ConfigError]:
    """Yield a problem for every two ranges of one data set that have documents in common."""
    seen: list[tuple[Blend, DataSource]] = []
    for blend in sources.blends():
        for one in blend.sources:
            for other_blend, other in seen:
                if one.name == other.name and _overlap(one, other):
                    first, second = _shown(other_blend, other), _shown(blend, one)
                    yield ConfigError(
                        f"{first} and {second} have documents of `{one.name}` in common",
                        why="a document would be read twice, or be trained on and validated on",
                        hint="give ranges that do not overlap, such as `0:0.95` and `0.95:1`",
                    )
            if one.documents is not None:
                seen.append((blend, one))


def _overlap(one: DataSource, other: DataSource) -> bool:
    if one.documents is None or other.documents is None:
        return False
    return max(one.documents[0], other.documents[0]) < min(one.documents[1], other.documents[1])


def _shown(blend: Blend, source: DataSource) -> str:
    assert source.documents is not None
    return f"`{source.documents[0]:g}:{source.documents[1]:g}` of `{blend.flag}`"


def _weight(text: str, path: str, flag: str, problems: list[LmcoreError]) -> float | None:
    why, hint = None, "give a number above 0; weights need not sum to 1"
    try:
        weight = float(text)
    except ValueError:
        what = f"`{flag}`: `{text}` is not a weight, for `{path}`"
        problems.append(ConfigError(what, hint=hint))
        return None
    if weight == 0:
        why, hint = "nothing would be read of it", f"leave `{path}` out, or {hint}"
    elif not math.isfinite(weight):
        why = "it is not finite"
    elif weight < 0:
        why = "a data set cannot be read a negative number of times"
    if why:
        what = f"`{flag}`: the weight of `{path}` is {text}"
        problems.append(ConfigError(what, why=why, hint=hint))
    return weight


def _range(text: str, path: str, flag: str, problems: list[LmcoreError]) -> tuple[float, float]:
    """Return start and end; of a range that is none, one that has no document."""
    start_text, _, end_text = text.partition(":")
    try:
        start, end = float(start_text), float(end_text)
    except ValueError:
        what = f"`{flag}`: `{text}` is not a range, for `{path}`"
        problems.append(ConfigError(what, hint=_RANGES))
        return 0.0, 0.0
    if not 0 <= start < end <= 1:
        problem = ConfigError(
            f"`{flag}`: the range `{text}` of `{path}` is empty or goes beyond the data set",
            why="start and end are shares of the documents, 0 <= start < end <= 1",
            hint=_RANGES,
        )
        problems.append(problem)
        return 0.0, 0.0
    return start, end


def _raise_all(problems: Sequence[LmcoreError]) -> None:
    if problems:
        raise ConfigError.collect(problems)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
