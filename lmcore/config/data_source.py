"""Which data sets a run reads, and how much of each: the words of its flags, understood.

Megatron's three ways to name several sources: `--data-path W P W P`, a list for each part of its
own (`--train-data-path ...`), and ranges of documents (`--train-weighted-split-paths "NAME: W
START:END PATH, ..."`).  Reads no data; `lmcore.data.run_sources` opens what is named here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lmcore.config.section.data import DataSection
from lmcore.errors import ConfigError, LmcoreError

__all__ = [
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
]

Part = Literal["train", "valid", "test"]
PARTS: tuple[Part, ...] = ("train", "valid", "test")

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
        documents: Which part of its documents, as shares of them; None: what `--split` gives.
        corpus: Whether `name` is that of a text rather than a prefix.
    """

    name: str
    weight: float | None = None
    documents: tuple[float, float] | None = None
    corpus: bool = False


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
        divided: Read by all parts, as `--split` divides it; None where each has its own.
        own: The sources of each part that has its own.
    """

    divided: Blend | None
    own: Mapping[Part, Blend] = field(default_factory=dict)

    def blends(self) -> tuple[Blend, ...]:
        """Return every blend, training first."""
        return (
            (self.divided,) if self.divided else tuple(self.own[p] for p in PARTS if p in self.own)
        )


def data_sources(settings: DataSection) -> RunSources:
    """Return the sources that the `data` section names; the bundled text has none.

    Texts in `train_data` are divided by `--split` where validation and test have nothing of
    their own.

    Raises:
        ConfigError: Weights or ranges that cannot be read, all of them; names the options.
    """
    own: dict[Part, Blend] = {}
    problems: list[LmcoreError] = []
    for part in PARTS:
        for option in OWN[part]:
            words = getattr(settings, option)
            try:
                if words:
                    own[part] = _own_blend(option, words)
            except ConfigError as problem:
                problems += [problem, *problem.others]
    _raise_all(problems)
    if set(own) == {"train"} and own["train"].option == "train_data":
        return RunSources(own["train"])
    if own:
        return RunSources(None, own)
    if settings.data_file_list is not None:
        return RunSources(Blend("data_file_list", (), file_list=settings.data_file_list))
    if settings.data_path:
        return RunSources(Blend("data_path", parse_data_path(settings.data_path, "--data-path")))
    if settings.corpus is not None:
        return RunSources(Blend("corpus", (DataSource(settings.corpus, corpus=True),)))
    return RunSources(None)


def _own_blend(option: str, words: tuple[str, ...]) -> Blend:
    flag = "--" + option.replace("_", "-")
    if option.endswith("_data"):
        return Blend(option, tuple(DataSource(word, corpus=True) for word in words))
    if option.endswith("_data_path"):
        return Blend(option, parse_data_path(words, flag))
    groups = parse_weighted_split_paths(words, flag)
    if len(groups) > 1:
        raise ConfigError(
            f"`{flag}` names {len(groups)} blends: {', '.join(f'`{name}`' for name in groups)}",
            why="a run trains, validates and tests on one blend each",
            hint="keep one of them, or put their paths into one",
        )
    ((title, sources),) = groups.items()
    return Blend(option, sources, title)


def parse_data_path(words: Sequence[str], flag: str) -> tuple[DataSource, ...]:
    """Return the sources of `W P W P ...`, or of `P P ...`, which go by their sizes.

    Raises:
        ConfigError: A weight that is negative, zero or none, or that some sources lack.
    """
    numeric = [_is_number(word) for word in words]
    if not any(numeric):
        return tuple(DataSource(word.strip()) for word in words)
    shown = f"`{flag} {' '.join(words)}`"
    for place, (word, number) in enumerate(zip(words, numeric, strict=True)):
        if place % 2 == 0 and not number:
            raise ConfigError(
                f"{shown}: `{word}` stands where a weight is expected",
                why="other data sets have weights",
                hint=_ONE_BY_ONE,
            )
        if place % 2 == 1 and number:
            raise ConfigError(
                f"{shown}: `{word}` stands where a data set is expected", hint=_ONE_BY_ONE
            )
    if len(words) % 2:
        raise ConfigError(
            f"{shown}: no data set follows the weight `{words[-1]}`", hint=_ONE_BY_ONE
        )
    problems: list[ConfigError] = []
    found = []
    for text, path in zip(words[::2], words[1::2], strict=True):
        try:
            found.append(DataSource(path.strip(), _weight(text, path, flag)))
        except ConfigError as problem:
            problems.append(problem)
    _raise_all(problems)
    return tuple(found)


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
    groups = list(words) if any(" " in word.strip() for word in words) else [" ".join(words)]
    found: dict[str, tuple[DataSource, ...]] = {}
    problems: list[ConfigError] = []
    for group in groups:
        title, colon, rest = (part.strip() for part in group.partition(":"))
        entries = [entry.split() for entry in rest.split(",") if entry.strip()]
        if not (colon and title and entries) or any(len(entry) != 3 for entry in entries):
            raise ConfigError(f"`{flag} {group}` cannot be read", hint=_RANGES)
        if title in found:
            raise ConfigError(f"`{flag}` has two blends of the name `{title}`", hint=_RANGES)
        sources = []
        for weight, span, path in entries:
            try:
                one = DataSource(path, _weight(weight, path, flag), _range(span, path, flag))
                sources.append(one)
            except ConfigError as problem:
                problems.append(problem)
        found[title] = tuple(sources)
    _raise_all(problems)
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


def _weight(text: str, path: str, flag: str) -> float:
    why, hint = None, "give a number above 0; weights need not sum to 1"
    try:
        weight = float(text)
    except ValueError:
        raise ConfigError(f"`{flag}`: `{text}` is not a weight, for `{path}`", hint=hint) from None
    if weight == 0:
        why, hint = "nothing would be read of it", f"leave `{path}` out, or {hint}"
    elif not math.isfinite(weight):
        why = "it is not finite"
    elif weight < 0:
        why = "a data set cannot be read a negative number of times"
    if why:
        raise ConfigError(f"`{flag}`: the weight of `{path}` is {text}", why=why, hint=hint)
    return weight


def _range(text: str, path: str, flag: str) -> tuple[float, float]:
    start_text, _, end_text = text.partition(":")
    try:
        start, end = float(start_text), float(end_text)
    except ValueError:
        raise ConfigError(
            f"`{flag}`: `{text}` is not a range, for `{path}`", hint=_RANGES
        ) from None
    if not 0 <= start < end <= 1:
        raise ConfigError(
            f"`{flag}`: the range `{text}` of `{path}` is empty or goes beyond the data set",
            why="start and end are shares of the documents, 0 <= start < end <= 1",
            hint=_RANGES,
        )
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
