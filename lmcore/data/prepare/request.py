"""What `lmcore data prepare` is asked for, and what it reports: the records around `prepare.py`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lmcore.data.indexed.writer import FORMATS, IndexedDatasetWriter
from lmcore.data.input.options import InputOptions
from lmcore.data.tokenizer import Tokenizer
from lmcore.data.tokenizer.native import EncodesBlocks
from lmcore.errors import ConfigError, LmcoreError

if TYPE_CHECKING:
    from lmcore.data.prepare.sentence.base import SentenceSplitter

__all__ = [
    "KeyReport",
    "PrepareProgress",
    "PrepareReport",
    "PrepareRequest",
    "ProgressCallback",
    "document_prefix",
    "settings_problems",
]


@dataclass(frozen=True)
class PrepareRequest:
    """What to prepare.

    Attributes:
        inputs: Files, patterns, directories, or `-` for standard input.
        output_prefix: First part of the output's names.
        tokenizer: Makes the ids.
        json_keys: Keys whose text becomes a dataset each.
        append_eod: Whether each document ends with the tokenizer's end-of-document id.
        workers: Threads that encode, or processes where the tokenizer holds the interpreter's
            lock; None: the processors at hand for threads, else 1.
        on_error: What to do with a document that cannot be used.
        log_interval: Documents between two calls of the progress callback.
        input_format: One of `lmcore.data.input.files.FORMATS`, or `auto`.
        reading: How the input is read; its `keys` and `skip` follow from the fields above.
        dataset_impl: A key of `lmcore.data.indexed.writer.FORMATS`.
        resume: Whether to continue what an earlier run with the same output left unfinished.
        shard_bytes: Input after which what is written becomes a point to resume from.
        partitions: Hosts that share the input.
        partition: Which share this is, from 0; None: all of it.
        splitter: Cuts documents into sentences, a sequence each; None: a document is one.
    """

    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer: Tokenizer
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    workers: int | None = None
    on_error: Literal["stop", "skip"] = "stop"
    log_interval: int = 1000
    input_format: str = "auto"
    reading: InputOptions = field(default_factory=InputOptions)
    dataset_impl: str = "mmap"
    resume: bool = False
    shard_bytes: int = 1 << 30
    partitions: int = 1
    partition: int | None = None
    splitter: SentenceSplitter | None = None

    @property
    def options(self) -> InputOptions:
        """How the input is read."""
        return replace(self.reading, keys=self.json_keys, skip=self.on_error == "skip")

    @property
    def threads(self) -> bool:
        """Whether threads do the encoding."""
        if self.splitter is not None:  # it holds the interpreter's lock
            return False
        return isinstance(self.tokenizer, EncodesBlocks) and self.tokenizer.threads

    @property
    def num_workers(self) -> int:
        """How many threads or processes encode."""
        if self.workers is not None:
            return self.workers
        return len(os.sched_getaffinity(0)) if self.threads else 1

    def key_prefix(self, key: str) -> str:
        """Return the prefix of a key's dataset: `PREFIX_KEY_document`, or `..._sentence`."""
        level = "document" if self.splitter is None else "sentence"
        return f"{self.prefix}_{key}_{level}"

    @property
    def prefix(self) -> str:
        """First part of the names of this run's files: the output's, or that of one share."""
        if self.partition is None:
            return self.output_prefix
        return f"{self.output_prefix}.{self.partition}-of-{self.partitions}"


def settings_problems(request: PrepareRequest) -> list[LmcoreError]:
    """Return everything that is wrong with a request by itself, before any file is looked at."""
    keys = request.json_keys
    found: list[LmcoreError] = []
    if not keys or len(set(keys)) != len(keys):
        told = f"`--json-keys {' '.join(keys)}` must name different keys, at least one"
        found.append(ConfigError(told))
    found.extend(
        ConfigError(f"the JSON key `{key}` cannot be part of a file name")
        for key in dict.fromkeys(keys)
        if not key or "/" in key or "\0" in key
    )
    if os.path.basename(request.output_prefix) in {"", ".", ".."}:  # noqa: PTH119  # Path drops `/`
        found.append(
            ConfigError(
                f"`--output-prefix {request.output_prefix}` has no name for the files",
                why="the names of the files begin with its last part",
                hint=f"for example `--output-prefix {Path(request.output_prefix) / 'web'}`",
            )
        )
    for flag, value in (
        ("--workers", request.workers),
        ("--log-interval", request.log_interval),
        ("--shard-mib", request.shard_bytes),
        ("--partitions", request.partitions),
    ):
        if value is not None and value < 1:
            found.append(ConfigError(f"`{flag} {value}` must be at least 1"))
    if request.partition is not None and not 0 <= request.partition < request.partitions:
        found.append(
            ConfigError(
                f"`--partition {request.partition}` is none of {request.partitions}",
                hint=f"with `--partitions {request.partitions}` they count from 0 to "
                f"{max(0, request.partitions - 1)}",
            )
        )
    if request.append_eod and request.tokenizer.eod is None:
        found.append(
            ConfigError(
                f"the tokenizer `{request.tokenizer.name}` has no end-of-document token",
                hint="leave `--append-eod` out, or use a vocabulary that has one",
            )
        )
    if request.dataset_impl not in FORMATS:
        known = ", ".join(f"`{name}`" for name in FORMATS)
        found.append(
            ConfigError(
                f"`--dataset-impl {request.dataset_impl}` is not known",
                hint=f"it is one of {known}",
            )
        )
    return found


@dataclass(frozen=True)
class PrepareProgress:
    """How far preparation has come; one MB is 2**20 bytes of JSON.

    Attributes:
        documents: Read by this run and those that it continues.
        json_bytes: Likewise.
        seconds: Spent on them.
        fraction: Of the input's bytes on the disk that were read; None where nobody knows.
        seconds_left: Until the end at this pace, or None.
    """

    documents: int
    json_bytes: int
    seconds: float
    fraction: float | None = None
    seconds_left: float | None = None

    def line(self) -> str:
        """Return Megatron's progress line."""
        return f"Processed {self.documents} documents ({self._speed('.1f')})."

    def bar(self, width: int = 24) -> str:
        """Return a bar with the pace and what is left, for a terminal."""
        told = f"{self.documents:,} documents, {self._speed(',.0f')}"
        if self.fraction is None:
            return told
        full = int(self.fraction * width)
        bar = "#" * full + "-" * (width - full)
        left = "" if self.seconds_left is None else f", {_clock(self.seconds_left)} left"
        return f"[{bar}] {self.fraction:4.0%}  {told}{left}"

    def _speed(self, form: str) -> str:
        seconds = max(self.seconds, 1e-9)
        megabytes = self.json_bytes / 2**20 / seconds
        return f"{format(self.documents / seconds, form)} docs/s, {megabytes:.2f} MB/s"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


ProgressCallback = Callable[[PrepareProgress], None]


@dataclass(frozen=True)
class KeyReport:
    """The dataset of one key; `empty` counts documents without tokens, which are not in it."""

    key: str
    prefix: str
    documents: int
    tokens: int
    empty: int
    bytes: int
    dtype: str

    @classmethod
    def of(cls, key: str, writer: IndexedDatasetWriter, *, empty: int) -> KeyReport:
        """Describe what *writer* wrote."""
        return cls(
            key=key,
            prefix=writer.prefix,
            documents=writer.documents,
            tokens=writer.tokens,
            empty=empty,
            bytes=writer.tokens * writer.dtype.itemsize,
            dtype=writer.dtype.name,
        )


@dataclass(frozen=True)
class PrepareReport:
    """What was prepared; `skipped` counts what was left out, by reason.

    `seconds` are those of this run, and of the runs that it continued.
    """

    files: tuple[str, ...]
    documents: int
    json_bytes: int
    seconds: float
    skipped: dict[str, int]
    outputs: tuple[KeyReport, ...]

    @property
    def megabytes_per_second(self) -> float:
        """2**20 bytes of JSON each second."""
        return self.json_bytes / 2**20 / max(self.seconds, 1e-9)

    def to_json(self) -> dict[str, object]:
        """Return it as JSON values."""
        return {**asdict(self), "megabytes_per_second": round(self.megabytes_per_second, 3)}


def document_prefix(output_prefix: str, key: str) -> str:
    """Return the prefix of a key's dataset: `PREFIX_KEY_document`."""
    return f"{output_prefix}_{key}_document"
