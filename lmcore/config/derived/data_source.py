"""Data sources of a run, parsed from its flags.

Megatron's three ways to name several sources: `--data-path W P W P`, a separate list for each part
(`--train-data-path ...`), and ranges of documents (`--train-weighted-split-paths "NAME: W
START:END PATH, ..."`).  Reads no files: `lmcore.data.blend.check` fills in data file lists and
metadata, `lmcore.data.blend.sources` opens the datasets.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from lmcore.base.errors import ConfigError, LmcoreError
from lmcore.config.corpus import named_path, names_text_files
from lmcore.config.derived.split import DataSplit, parse_split
from lmcore.config.section.data import DataSection, text_names
from lmcore.config.section.task import TaskSection
from lmcore.config.tokenizer import TokenizerIdentity

__all__ = [
    "BUNDLED",
    "DIVIDED",
    "LARGEST_WEIGHT",
    "OWN",
    "PARTS",
    "TASK_OPTIONS",
    "Blend",
    "DataSource",
    "Part",
    "RunSources",
    "TaskData",
    "is_number",
    "overlapping_ranges",
    "own_values",
    "read_sources",
    "without_ending",
]

Part = Literal["train", "valid", "test"]
PARTS: tuple[Part, ...] = ("train", "valid", "test")

LARGEST_WEIGHT = 1e300
"""Largest weight of a dataset: the sum of any number of them is finite."""

BUNDLED = "shakespeare"
"""Name of the text that comes with lmcore; the data of a run whose flags name none."""

DIVIDED = ("corpus", "data_path", "data_file_list", "mock_data")
"""Options that name sources which `--split` divides into the parts."""

OWN = {
    part: tuple(f"{part}_{kind}" for kind in ("data", "data_path", "weighted_split_paths"))
    for part in PARTS
}
"""Options that name the sources of one part only, by part."""

TASK_OPTIONS: dict[Part, str] = {"train": "task_data", "valid": "task_valid_data"}
"""Options that name the files of a task, by part."""

_SET_RANGES = "valid_weighted_split_paths"
"""Option whose blends are validation sets, if there are several."""
_SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_ONE_BY_ONE = "alternate weight and dataset, such as `0.7 web 0.3 books`, or give no weights"
_RANGES = 'write `"NAME: WEIGHT START:END PATH, ..."`, such as `"train: 0.5 0:0.9 web"`'


@dataclass(frozen=True)
class DataSource:
    """A dataset of a blend.

    Attributes:
        name: Prefix of the indexed dataset, or name or path of a text.
        weight: Weight among the samples, not normalized; None: in proportion to its size.
        documents: Start and end of its documents, as fractions; None: as `--split` divides them.
        corpus: True if `name` is the name or path of a text rather than a prefix.
        files: Files of a task that are prepared together; empty for other sources.
        tokenizer: The tokenizer that made the dataset, from its metadata file; None: unknown.
        append_eod: True if each document ends with an end-of-document token; None: unknown.
        mock: True for documents of random tokens (`--mock-data`).
    """

    name: str
    weight: float | None = None
    documents: tuple[float, float] | None = None
    corpus: bool = False
    files: tuple[str, ...] = ()
    tokenizer: TokenizerIdentity | None = None
    append_eod: bool | None = None
    mock: bool = False

    @property
    def is_dataset(self) -> bool:
        """True if `name` is the prefix of an indexed dataset."""
        return not (self.corpus or self.files or self.mock)


@dataclass(frozen=True)
class TaskData:
    """Columns of a task's files, and what is in them.

    Attributes:
        task: `--task`.
        text: Names of the columns with the text.
        label: Name of the column with the class, the right choice, or the number.
        choices: Names of the columns with the choices; empty for a classification.
        labels: Names of the classes; empty for other tasks, and until the files are read.
        num_choices: Most choices of a question; 0 for a classification.
        rows: Number of rows of each part, once the files are read.
        choice_tokens: Most tokens of a choice; None: as many as it has.
    """

    task: str
    text: tuple[str, ...]
    label: str
    choices: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    num_choices: int = 0
    rows: Mapping[Part, int] = field(default_factory=dict)
    choice_tokens: int | None = None

    @property
    def regression(self) -> bool:
        """True if the label is a number that the head predicts."""
        return self.task == "regression"

    @property
    def num_labels(self) -> int:
        """Number of classes, or most choices of a question; 1 for a regression."""
        return 1 if self.regression else len(self.labels) or self.num_choices


@dataclass(frozen=True)
class Blend:
    """Sources of one part, or of all parts, in the order given.

    Attributes:
        option: Option that names the sources.
        sources: The sources; empty until `file_list` is read.
        title: Name that the user gives to the blend (`--valid-weighted-split-paths`).
        file_list: Path of the data file list that names the sources.
        note: Line for the user about the choice among datasets; empty: there was no choice.
    """

    option: str
    sources: tuple[DataSource, ...]
    title: str = ""
    file_list: str | None = None
    note: str = ""

    @property
    def flag(self) -> str:
        """The option as a flag."""
        return "--" + self.option.replace("_", "-")


@dataclass(frozen=True)
class RunSources:
    """All data sources of a run.

    Attributes:
        divided: Blend whose documents `--split` divides into the parts; None if each part has its
            own blend.
        own: Blend of each part with separate data.
        bundled: True if no flag names data, so that the run reads the bundled text.
        split: Shares of the documents of `divided` for each part; None if `--split` is malformed.
        task: Columns and content of a task's files; None without a task.
        sets: Further blends for validation by name; the run reports the loss of each.
    """

    divided: Blend | None
    own: Mapping[Part, Blend] = field(default_factory=dict)
    bundled: bool = False
    split: DataSplit | None = None
    task: TaskData | None = None
    sets: Mapping[str, Blend] = field(default_factory=dict)

    @property
    def validates_on_sets_alone(self) -> bool:
        """True if the sets are the only data for validation: the first one's loss is the run's."""
        without = "valid" not in self.own
        if self.divided is not None:
            without = self.split is not None and self.split.shares[1] == 0
        return bool(self.sets) and without

    def blends(self) -> tuple[Blend, ...]:
        """Return every blend, training first."""
        parts = (
            (self.divided,) if self.divided else tuple(self.own[p] for p in PARTS if p in self.own)
        )
        return (*parts, *self.sets.values())


def read_sources(
    settings: DataSection, task: TaskSection | None = None, corpora: Collection[str] = ()
) -> tuple[RunSources, list[LmcoreError]]:
    """Return the sources as far as they can be parsed, and every problem of the flags.

    A source whose weight or range is wrong is among them, so that its other problems are found
    too.  `--split` divides the texts of `train_data` if validation and test have no separate
    sources; a malformed split is not among the problems, but the rules report it.

    Args:
        settings: The `data` section.
        task: The `task` section; None: the run has no task.
        corpora: Names of corpora that validation sets may be.
    """
    try:
        split = parse_split(settings.split)
    except ConfigError:
        split = None
    problems: list[LmcoreError] = []
    if task is not None and task.task and task.task_data:
        return _task_sources(task, split), problems
    sources = _pretraining_sources(settings, split, problems)
    return replace(sources, sets=_sets(settings, sources, corpora, problems)), problems


def _pretraining_sources(
    settings: DataSection, split: DataSplit | None, problems: list[LmcoreError]
) -> RunSources:
    """Return the sources of the parts, without the named validation sets."""
    own: dict[Part, Blend] = {}
    for part in PARTS:
        for option in OWN[part]:
            words = own_values(settings, option)
            if words:
                own[part] = _own_blend(option, words, problems)
    if set(own) == {"train"} and own["train"].option == "train_data":
        return RunSources(own["train"], split=split)
    if own:
        return RunSources(None, own, split=split)
    if settings.mock_data:
        return RunSources(Blend("mock_data", (DataSource("mock data", mock=True),)), split=split)
    if settings.data_file_list is not None:
        divided = Blend("data_file_list", (), file_list=settings.data_file_list)
    elif settings.data_path:
        sources = _data_path(settings.data_path, "--data-path", problems)
        divided = Blend("data_path", sources)
    else:
        divided = Blend("corpus", (DataSource(settings.corpus or BUNDLED, corpus=True),))
        return RunSources(divided, bundled=settings.corpus is None, split=split)
    return RunSources(divided, split=split)


def own_values(settings: DataSection, option: str) -> tuple[str, ...]:
    """Return the values of an option of `OWN` that name the sources of the part.

    Names of validation sets, and blends of several names, which are such sets, are not among them.
    """
    words: tuple[str, ...] = getattr(settings, option)
    if option == "valid_data":
        return text_names(words)
    if option == _SET_RANGES and len(_weighted_split_paths(words, _flag(option), [])) > 1:
        return ()
    return words


def _sets(
    settings: DataSection,
    sources: RunSources,
    corpora: Collection[str],
    problems: list[LmcoreError],
) -> dict[str, Blend]:
    """Return the validation sets by name, and add to *problems* what is wrong with them."""
    found: dict[str, Blend] = {}
    words, flag = settings.valid_weighted_split_paths, _flag(_SET_RANGES)
    if words and not own_values(settings, _SET_RANGES):
        for name, blend in _weighted_split_paths(words, flag, problems).items():
            found[name] = Blend(_SET_RANGES, blend, name)
    trained = {source.name for blend in sources.blends()[:1] for source in blend.sources}
    for word in settings.valid_data:
        named = named_path(word)
        if named is None:
            continue
        shown, (name, prefix) = f"`--valid-data {word}`", named
        is_text = names_text_files(prefix) or prefix in corpora
        prefix = prefix if is_text else without_ending(prefix)
        if not _SET_NAME.fullmatch(name) or not prefix:
            problems.append(
                ConfigError(
                    f"{shown} is not NAME=PREFIX",
                    why="a name has letters, digits and the characters `_`, `-` and `.`",
                    hint="write `--valid-data web=data/web_text_document`",
                )
            )
        elif name in found:
            problems.append(
                ConfigError(
                    f"{shown}: there are two validation sets `{name}`",
                    hint="give each a name of its own; `--valid-weighted-split-paths "
                    '"NAME: 1 0:1 PREFIX, 1 0:1 PREFIX"` joins data sets',
                )
            )
        else:
            note = f"{shown}: the model is trained on documents of this data set, too"
            note = note if prefix in trained else ""
            source = DataSource(prefix, corpus=is_text)
            found[name] = Blend("valid_data", (source,), name, note=note)
    return found


def _task_sources(task: TaskSection, split: DataSplit | None) -> RunSources:
    own: dict[Part, Blend] = {}
    files: dict[Part, tuple[str, ...]] = {"train": task.task_data, "valid": task.task_valid_data}
    for part, option in TASK_OPTIONS.items():
        if files[part]:
            source = DataSource(" ".join(files[part]), files=files[part])
            own[part] = Blend(option, (source,))
    choices = task.task_choices if task.task == "multiple-choice" else ()
    found = TaskData(
        str(task.task),
        task.task_text,
        task.task_label,
        choices,
        task.task_labels if task.task == "classification" else (),
        choice_tokens=task.task_choice_tokens if choices else None,
    )
    return RunSources(None, own, split=split, task=found)


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _own_blend(option: str, words: tuple[str, ...], problems: list[LmcoreError]) -> Blend:
    flag = _flag(option)
    if option.endswith("_data"):
        return Blend(option, tuple(DataSource(word, corpus=True) for word in words))
    if option.endswith("_data_path"):
        return Blend(option, _data_path(words, flag, problems))
    groups = _weighted_split_paths(words, flag, problems)
    if len(groups) > 1:
        problem = ConfigError(
            f"`{flag}` names {len(groups)} blends: {', '.join(f'`{name}`' for name in groups)}",
            why="a run trains and tests on one blend each",
            hint="keep one of them, or put their paths into one",
        )
        problems.append(problem)
    title, sources = next(iter(groups.items()), ("", ()))
    return Blend(option, sources, title)


def without_ending(path: str) -> str:
    """Return the prefix of `PREFIX.bin`, `PREFIX.idx` or `PREFIX`."""
    return path.removesuffix(".bin").removesuffix(".idx")


def _data_path(
    words: Sequence[str], flag: str, problems: list[LmcoreError]
) -> tuple[DataSource, ...]:
    numeric = [is_number(word) for word in words]
    if not any(numeric):
        return tuple(DataSource(without_ending(word.strip())) for word in words)
    shown = f"`{flag} {' '.join(words)}`"
    for place, (word, number) in enumerate(zip(words, numeric, strict=True)):
        if place % 2 == 0 and not number:
            problem = ConfigError(
                f"{shown}: found `{word}` instead of a weight",
                why="other datasets have weights",
                hint=_ONE_BY_ONE,
            )
            problems.append(problem)
            return ()
        if place % 2 == 1 and number:
            what = f"{shown}: found `{word}` instead of a dataset"
            problems.append(ConfigError(what, hint=_ONE_BY_ONE))
            return ()
    if len(words) % 2:
        what = f"{shown}: no dataset follows the weight `{words[-1]}`"
        problems.append(ConfigError(what, hint=_ONE_BY_ONE))
        return ()
    return tuple(
        DataSource(without_ending(path.strip()), _weight(text, path, flag, problems))
        for text, path in zip(words[::2], words[1::2], strict=True)
    )


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
    """Yield a problem for each two ranges of a dataset that overlap."""
    seen: list[tuple[Blend, DataSource]] = []
    sets = list(sources.sets.values())  # documents may be in several of them
    for blend in sources.blends():
        for source in blend.sources:
            for other_blend, other in seen:
                both = blend in sets and other_blend in sets and blend != other_blend
                if source.name == other.name and _overlap(source, other) and not both:
                    first, second = _shown(other_blend, other), _shown(blend, source)
                    yield ConfigError(
                        f"{first} and {second} have documents of `{source.name}` in common",
                        why="documents would be read twice, or used for training and validation",
                        hint="give ranges that do not overlap, such as `0:0.95` and `0.95:1`",
                    )
            if source.documents is not None:
                seen.append((blend, source))


def _overlap(source: DataSource, other: DataSource) -> bool:
    if source.documents is None or other.documents is None:
        return False
    return max(source.documents[0], other.documents[0]) < min(
        source.documents[1], other.documents[1]
    )


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
        why, hint = "no samples would be taken from it", f"leave `{path}` out, or {hint}"
    elif not math.isfinite(weight):
        why = "it is not finite"
    elif weight < 0:
        why = "a weight is above 0"
    elif weight > LARGEST_WEIGHT:
        why, hint = "the sum of weights may overflow", f"give a number below {LARGEST_WEIGHT:g}"
    if why:
        what = f"`{flag}`: the weight of `{path}` is {text}"
        problems.append(ConfigError(what, why=why, hint=hint))
    return weight


def _range(text: str, path: str, flag: str, problems: list[LmcoreError]) -> tuple[float, float]:
    """Return start and end of a range; (0, 0) if it is wrong."""
    start_text, _, end_text = text.partition(":")
    try:
        start, end = float(start_text), float(end_text)
    except ValueError:
        what = f"`{flag}`: `{text}` is not a range, for `{path}`"
        problems.append(ConfigError(what, hint=_RANGES))
        return 0.0, 0.0
    if not 0 <= start < end <= 1:
        problem = ConfigError(
            f"`{flag}`: the range `{text}` of `{path}` is empty or goes beyond the dataset",
            why="start and end are fractions of the documents, 0 <= start < end <= 1",
            hint=_RANGES,
        )
        problems.append(problem)
        return 0.0, 0.0
    return start, end


def is_number(word: str) -> bool:
    """Return True if *word* is the text of a number."""
    try:
        float(word)
    except ValueError:
        return False
    return True
