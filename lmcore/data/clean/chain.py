"""From the names of steps and their settings to the segments that are run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from lmcore.data.clean.corpus_step import CorpusStep
from lmcore.data.clean.document import DocumentStep, FieldKeys
from lmcore.data.clean.evaluation_sets import read_evaluation_sets
from lmcore.data.clean.exact_duplicates import ExactDuplicates
from lmcore.data.clean.fix import FixStep
from lmcore.data.clean.language import LanguageStep
from lmcore.data.clean.length import CharactersStep, TokensStep
from lmcore.data.clean.minhash import MinHash
from lmcore.data.clean.near_duplicates import NearDuplicates
from lmcore.data.clean.ngram import EvaluationNgrams, NgramSettings, NgramStep
from lmcore.data.clean.shuffle import Shuffle
from lmcore.data.clean.url import DEFAULT_RULES, UrlRules, UrlStep, read_rules
from lmcore.data.input.options import InputOptions
from lmcore.data.tokenizer import Tokenizer
from lmcore.errors import ConfigError, suggestion

__all__ = ["STEPS", "CleanRequest", "PlannedSegment", "plan_chain"]


@dataclass(frozen=True)
class CleanRequest:
    """What to clean, and how.

    Attributes:
        steps: FieldKeys of `STEPS`, in the order in which they are taken.
        inputs: Files, patterns, directories, or `-` for standard input.
        output: Where the documents left go; `-` for standard output.
        dropped: Where lines about documents left out go.
        key: Where a document's text is; dots lead into inner objects.
        url_key: Where its address is, for the step `url`.
        url_rules: Files of rules; `default` is the list that comes with lmcore.
        languages: Languages that stay, as codes of two letters.
        min_tokens, tokenizer: Tokens that a document needs, by this tokenizer,
        min_characters: or characters.
        similarity: Share of common shingles of near duplicates.
        minhash: Finds them; its seed is `seed`.
        tasks, task_keys: Evaluation sets, and the keys of their texts.
        ngram: How their n-grams are found and cut out.
        seed: Of `near` and `shuffle`.
        workers: Processes that do the work of single documents; 1 does it in this one.
        on_error: What to do with a document that cannot be read.
        scratch: Directory for temporary files; None: beside the output.
        input_format: As `lmcore.data.input.files.find_inputs` takes it.
        reading: How tables and texts are read; `keys` and `skip` follow from the fields above.
    """

    steps: tuple[str, ...]
    inputs: tuple[str, ...]
    output: str
    dropped: str | None = None
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
        """Where the documents' text is, and their address if a step wants it."""
        return FieldKeys(self.key, self.url_key if "url" in self.steps else None)


@dataclass(frozen=True)
class PlannedSegment:
    """Steps that look at one document at a time, each with its row, and what they lead to."""

    steps: tuple[tuple[int, DocumentStep], ...]
    gathering: tuple[int, CorpusStep] | None

    @property
    def rows(self) -> list[int]:
        """The rows of the report that are filled here."""
        own = [row for row, _ in self.steps]
        return own if self.gathering is None else [*own, self.gathering[0]]


def plan_chain(request: CleanRequest) -> list[PlannedSegment]:
    """Return the segments of a chain; the last one gathers nothing.

    Raises:
        ConfigError: No step or an unknown one, or a setting that a step needs and has not got.
        MissingPackageError: A step needs a package that is not installed.
        DataError: A file of rules or an evaluation set cannot be used.
    """
    if not request.steps:
        raise ConfigError("no step is named", hint=f"known: {', '.join(STEPS)}")
    for name in request.steps:
        if name not in STEPS:
            raise ConfigError(f"unknown step `{name}`", hint=suggestion(name, STEPS))
    segments: list[PlannedSegment] = []
    steps: list[tuple[int, DocumentStep]] = []
    for row, name in enumerate(request.steps):
        step, gathering = STEPS[name].build(request)
        if step is not None:
            steps.append((row, step))
        if gathering is not None:
            segments.append(PlannedSegment(tuple(steps), (row, gathering)))
            steps = []
    return [*segments, PlannedSegment(tuple(steps), None)]


Built = tuple[DocumentStep | None, CorpusStep | None]


def _url(request: CleanRequest) -> Built:
    rules: UrlRules = read_rules(request.url_rules)
    return UrlStep(rules), ExactDuplicates("url")


def _fix(_request: CleanRequest) -> Built:
    return FixStep(), None


def _language(request: CleanRequest) -> Built:
    return LanguageStep(request.languages), None


def _length(request: CleanRequest) -> Built:
    if request.min_characters is not None:
        return CharactersStep(request.min_characters), None
    if request.tokenizer is None:
        raise ConfigError(
            "the step `length` needs `--tokenizer-type` or `--min-characters`",
            why=f"{request.min_tokens} tokens are wanted, and tokens are counted by a tokenizer",
            hint="give the tokenizer that you train with, or a bound such as "
            "`--min-characters 512`",
        )
    return TokensStep(request.min_tokens, request.tokenizer), None


def _exact(_request: CleanRequest) -> Built:
    return None, ExactDuplicates()


def _near(request: CleanRequest) -> Built:
    return None, NearDuplicates(request.minhash, request.similarity, request.key)


def _ngram(request: CleanRequest) -> Built:
    if not request.tasks:
        raise ConfigError(
            "the step `ngram` needs `--tasks`",
            why="it cuts out of the documents what stands in evaluation sets",
            hint="name the sets' files: `--tasks lambada_test.jsonl --task-keys text`",
        )
    ngrams = EvaluationNgrams(read_evaluation_sets(request.tasks, request.task_keys), request.ngram)
    if not len(ngrams):
        raise ConfigError(
            "the evaluation sets have no text that is long enough",
            why=f"a text of less than {request.ngram.shortest} words is not looked for",
            hint="check `--task-keys`, or lower `--ngram-min`",
        )
    return NgramStep(ngrams), None


def _shuffle(request: CleanRequest) -> Built:
    return None, Shuffle(request.seed)


@dataclass(frozen=True)
class StepKind:
    """A step as users know it."""

    summary: str
    build: Callable[[CleanRequest], Built]


STEPS: dict[str, StepKind] = {
    "url": StepKind("leave out bad, unwanted and repeated addresses", _url),
    "fix": StepKind("mend wrongly decoded text with ftfy", _fix),
    "language": StepKind("keep the languages wanted", _language),
    "length": StepKind("leave out short documents", _length),
    "exact": StepKind("keep the first of documents with the same text", _exact),
    "near": StepKind("keep the first of documents that are nearly the same", _near),
    "ngram": StepKind("cut out what stands in evaluation sets", _ngram),
    "shuffle": StepKind("put the documents in random order", _shuffle),
}
"""The steps by name, in the order in which a corpus usually takes them."""
