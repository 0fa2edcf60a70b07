"""Planning of a chain of steps: from names and settings to segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from lmcore.base.errors import ConfigError, suggestion
from lmcore.data.input.options import InputOptions
from lmcore.data.tokenizer import Tokenizer
from lmcore_data_tools.clean.corpus_step import CorpusStep
from lmcore_data_tools.clean.document import DocumentStep, FieldKeys
from lmcore_data_tools.clean.duplicates import ExactDuplicates, NearDuplicates
from lmcore_data_tools.clean.filter.fix import FixStep
from lmcore_data_tools.clean.filter.language import LanguageStep
from lmcore_data_tools.clean.filter.length import CharactersStep, TokensStep
from lmcore_data_tools.clean.filter.ngram import (
    EvaluationNgrams,
    NgramSettings,
    NgramStep,
    read_evaluation_sets,
)
from lmcore_data_tools.clean.filter.url import DEFAULT_RULES, UrlStep, read_rules
from lmcore_data_tools.clean.minhash import MinHash
from lmcore_data_tools.clean.shuffle import Shuffle

__all__ = ["STEPS", "CleanRequest", "PlannedSegment", "plan_chain"]


@dataclass(frozen=True)
class CleanRequest:
    """Input, output, steps and settings of a cleaning run.

    Attributes:
        steps: keys of `STEPS`, in the order of application.
        inputs: files, patterns, directories, or `-` for standard input.
        output: output file; `-` for standard output.
        dropped: file for dropped documents, with reasons; None: none.
        overwrite: replace existing files of these names.
        key: key of a document's text; dots lead into inner objects.
        url_key: key of its URL, for the step `url`.
        url_rules: files of rules; `default` is the bundled list.
        languages: languages to keep, as ISO 639-1 codes.
        min_tokens, tokenizer: minimum number of tokens, by this tokenizer.
        min_characters: minimum number of characters, instead of tokens.
        similarity: Jaccard similarity of near duplicates.
        minhash: hash functions that find near duplicates; its seed is `seed`.
        tasks, task_keys: files of evaluation sets, and the keys of their texts.
        ngram: settings of decontamination.
        seed: seed of `near` and `shuffle`.
        workers: number of worker processes; 1: this process does the work.
        on_error: stop at an unreadable document, or skip it.
        scratch: directory for temporary files; None: beside the output.
        input_format: see `lmcore.data.input.files.find_inputs`.
        reading: format options; `keys` and `skip` are set from the fields above.
    """

    steps: tuple[str, ...]
    inputs: tuple[str, ...]
    output: str
    dropped: str | None = None
    overwrite: bool = False
    key: str = "text"
    url_key: str = "url"
    url_rules: tuple[str, ...] = (DEFAULT_RULES,)
    languages: tuple[str, ...] = ("en",)
    min_tokens: int = 128
    min_characters: int | None = None
    tokenizer: Tokenizer | None = None
    similarity: float = 0.9
    minhash: MinHash = field(default_factory=MinHash)
    tasks: tuple[str, ...] = ()
    task_keys: tuple[str, ...] = ("text",)
    ngram: NgramSettings = field(default_factory=NgramSettings)
    seed: int = 1234
    workers: int = 1
    on_error: Literal["stop", "skip"] = "stop"
    scratch: str | None = None
    input_format: str = "auto"
    reading: InputOptions = field(default_factory=InputOptions)

    @property
    def fields(self) -> FieldKeys:
        """Keys of the text, and of the URL if a step needs it."""
        return FieldKeys(self.key, self.url_key if "url" in self.steps else None)


@dataclass(frozen=True)
class PlannedSegment:
    """Document steps, each with its row in the report, and the corpus step that ends them."""

    steps: tuple[tuple[int, DocumentStep], ...]
    corpus_step: tuple[int, CorpusStep] | None

    @property
    def rows(self) -> list[int]:
        """Rows of the report for the steps of the segment."""
        own = [row for row, _ in self.steps]
        return own if self.corpus_step is None else [*own, self.corpus_step[0]]


def plan_chain(request: CleanRequest) -> list[PlannedSegment]:
    """Return the segments of a chain; the last one has no corpus step.

    Raises:
        ConfigError: no steps, an unknown one, or a missing setting.
        MissingPackageError: the package of a step is not installed.
        DataError: a file of rules or an evaluation set cannot be used.
    """
    if not request.steps:
        raise ConfigError("no step is given", hint=f"known: {', '.join(STEPS)}")
    for name in request.steps:
        if name not in STEPS:
            parts = name.strip(",").split(",")
            hint = suggestion(name, STEPS)
            if set(parts) <= set(STEPS):
                hint = f"separate the steps by spaces: `{' '.join(parts)}`"
            raise ConfigError(f"unknown step `{name}`", hint=hint)
    segments: list[PlannedSegment] = []
    steps: list[tuple[int, DocumentStep]] = []
    for row, name in enumerate(request.steps):
        step, corpus_step = STEPS[name](request)
        if step is not None:
            steps.append((row, step))
        if corpus_step is not None:
            segments.append(PlannedSegment(tuple(steps), (row, corpus_step)))
            steps = []
    return [*segments, PlannedSegment(tuple(steps), None)]


Built = tuple[DocumentStep | None, CorpusStep | None]


def _length(request: CleanRequest) -> Built:
    if request.min_characters is not None:
        return CharactersStep(request.min_characters), None
    if request.tokenizer is None:
        raise ConfigError(
            "the step `length` needs `--tokenizer-type` or `--min-characters`",
            why=f"it counts tokens by default, at least {request.min_tokens}",
            hint="give the tokenizer of the training, or a bound such as `--min-characters 512`",
        )
    return TokensStep(request.min_tokens, request.tokenizer), None


def _ngram(request: CleanRequest) -> Built:
    if not request.tasks:
        raise ConfigError(
            "the step `ngram` needs `--tasks`",
            why="it removes passages of evaluation sets from the documents",
            hint="give the files of the sets: `--tasks lambada_test.jsonl --task-keys text`",
        )
    ngrams = EvaluationNgrams(read_evaluation_sets(request.tasks, request.task_keys), request.ngram)
    if not len(ngrams):
        raise ConfigError(
            "no text of the evaluation sets is long enough",
            why=f"texts of less than {request.ngram.shortest} words are ignored",
            hint="check `--task-keys`, or lower `--ngram-min`",
        )
    return NgramStep(ngrams), None


STEPS: dict[str, Callable[[CleanRequest], Built]] = {
    "url": lambda r: (UrlStep(read_rules(r.url_rules)), ExactDuplicates("url")),
    "fix": lambda _: (FixStep(), None),
    "language": lambda r: (LanguageStep(r.languages), None),
    "length": _length,
    "exact": lambda _: (None, ExactDuplicates()),
    "near": lambda r: (None, NearDuplicates(r.minhash, r.similarity, r.key)),
    "ngram": _ngram,
    "shuffle": lambda r: (None, Shuffle(r.seed)),
}
"""Constructors of the steps by name, in the usual order."""
