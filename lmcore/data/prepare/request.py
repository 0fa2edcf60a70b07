"""Request, progress and report of `lmcore data prepare`, and the check before it starts.

The check reads only the bytes of the input that identify a file's format.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lmcore.base.errors import ConfigError, LmcoreError, counted
from lmcore.data.existing_output import require_replaceable
from lmcore.data.indexed.writer import FORMATS, IndexedDatasetWriter
from lmcore.data.input.compression import STDIN
from lmcore.data.input.files import InputFile, find_inputs
from lmcore.data.input.options import InputOptions, unused_options
from lmcore.data.tokenizer import Tokenizer
from lmcore.data.tokenizer.native import EncodesBlocks

if TYPE_CHECKING:
    from lmcore.data.prepare.sentences import SentenceSplitter

__all__ = [
    "KeyReport",
    "PrepareProgress",
    "PrepareReport",
    "PrepareRequest",
    "ProgressCallback",
    "document_prefix",
]


@dataclass(frozen=True)
class PrepareRequest:
    """Input, output and settings of a preparation.

    Attributes:
        inputs: files, patterns, directories, or `-` for standard input.
        output_prefix: first part of the names of the output files.
        tokenizer: tokenizer of the documents.
        json_keys: keys whose text is tokenized, into one dataset each.
        append_eod: end each document with the tokenizer's end-of-document id.
        workers: number of threads, or of processes if the tokenizer holds the interpreter's lock;
            None: one thread per available processor, else 1.
        on_error: stop at a document that cannot be used, or skip it.
        log_interval: number of documents between two calls of the progress callback.
        input_format: one of `lmcore.data.input.files.FORMATS`, or `auto`.
        reading: format options; `keys` and `skip` are set from the fields above.
        dataset_impl: key of `lmcore.data.indexed.writer.FORMATS`.
        resume: continue an unfinished run with the same output.
        overwrite: replace existing datasets of the same tokenizer.
        shard_bytes: size of the input between two points to resume from, in bytes.
        partitions: number of hosts that share the input.
        partition: number of this host's partition, from 0; None: the whole input.
        splitter: sentence splitter, one sequence per sentence; None: one sequence per document.
        shuffle: seed of a random order of the documents; None: the order of the input.
        continued_by: way to resume, for messages; None: by `--resume`.
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
    overwrite: bool = False
    shard_bytes: int = 1 << 30
    partitions: int = 1
    partition: int | None = None
    splitter: SentenceSplitter | None = None
    shuffle: int | None = None
    continued_by: str | None = None

    @property
    def options(self) -> InputOptions:
        """Input options with the keys and the error policy of the request."""
        return replace(self.reading, keys=self.json_keys, skip=self.on_error == "skip")

    @property
    def threads(self) -> bool:
        """True if threads encode, False for processes."""
        if self.splitter is not None:  # it holds the interpreter's lock
            return False
        return isinstance(self.tokenizer, EncodesBlocks) and self.tokenizer.threads

    @property
    def num_workers(self) -> int:
        """Number of threads or processes that encode."""
        if self.workers is not None:
            return self.workers
        return len(os.sched_getaffinity(0)) if self.threads else 1

    def key_prefix(self, key: str) -> str:
        """Return the prefix of the dataset of a key: `PREFIX_KEY_document`, or `..._sentence`."""
        level = "document" if self.splitter is None else "sentence"
        return f"{self.prefix}_{key}_{level}"

    def require_replaceable(self) -> None:
        """Refuse to replace existing datasets; see `lmcore.data.existing_output`."""
        require_replaceable(
            [self.key_prefix(key) for key in self.json_keys],
            overwrite=self.overwrite,
            fingerprint=self.tokenizer.fingerprint(),
            tokenizer=str(self.tokenizer.describe().get("type")),
        )

    @property
    def prefix(self) -> str:
        """First part of the names of this run's files, of the whole output or of a partition."""
        if self.partition is None:
            return self.output_prefix
        return f"{self.output_prefix}.{self.partition}-of-{self.partitions}"


@dataclass(frozen=True)
class PrepareProgress:
    """Progress of a preparation; one MB is 2**20 bytes of JSON.

    Attributes:
        documents: number of documents read, by this run and the runs that it resumes.
        json_bytes: size of these documents, in bytes, uncompressed.
        seconds: time spent on them.
        fraction: fraction of the input's bytes on disk that was read; None if unknown.
        seconds_left: estimated time to the end; None if unknown.
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
        """Return a progress bar with speed and remaining time, for a terminal."""
        text = f"{counted(self.documents, 'document')}, {self._speed(',.0f')}"
        if self.fraction is None:
            return text
        full = int(self.fraction * width)
        bar = "#" * full + "-" * (width - full)
        left = "" if self.seconds_left is None else f", {_clock(self.seconds_left)} left"
        return f"[{bar}] {self.fraction:4.0%}  {text}{left}"

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
    """Dataset of one key; `empty` counts documents without tokens, which are left out."""

    key: str
    prefix: str
    documents: int
    tokens: int
    empty: int
    bytes: int
    dtype: str

    @classmethod
    def of(cls, key: str, writer: IndexedDatasetWriter, *, empty: int) -> KeyReport:
        """Describe the dataset of *writer*."""
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
    """Result of a preparation.

    Attributes:
        files: input files.
        documents: number of documents read.
        json_bytes: size of the input, in bytes, uncompressed.
        seconds: time of this run and of the runs that it resumed.
        skipped: number of skipped documents by reason.
        outputs: dataset of each key.
    """

    files: tuple[str, ...]
    documents: int
    json_bytes: int
    seconds: float
    skipped: dict[str, int]
    outputs: tuple[KeyReport, ...]

    @property
    def megabytes_per_second(self) -> float:
        """Speed, in 2**20 bytes of JSON per second."""
        return self.json_bytes / 2**20 / max(self.seconds, 1e-9)

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON values."""
        return {**asdict(self), "megabytes_per_second": round(self.megabytes_per_second, 3)}


def document_prefix(output_prefix: str, key: str) -> str:
    """Return the prefix of the dataset of a key: `PREFIX_KEY_document`."""
    return f"{output_prefix}_{key}_document"


def request_problems(request: PrepareRequest) -> list[LmcoreError]:
    """Return all problems of a request."""
    return check_request(request)[1]


def check_request(request: PrepareRequest) -> tuple[list[InputFile], list[LmcoreError]]:
    """Return the input files of a request, and all its problems."""
    problems = _settings_problems(request)
    files: list[InputFile] = []
    missing: list[LmcoreError] = []
    for given in request.inputs or ("",):
        try:
            files.extend(find_inputs([given] if given else [], request.input_format))
        except LmcoreError as error:
            missing.append(error)
    problems += missing or unused_options(request.reading, files)
    problems += _given_twice(files)
    unsteady = [file.path for file in files if not Path(file.path).is_file()]
    if request.resume and unsteady:
        problems.append(
            ConfigError(
                f"`--resume` cannot read `{unsteady[0]}` a second time",
                why="it is standard input" if unsteady[0] == STDIN else "it is not a regular file",
            )
        )
    return files, problems


def _settings_problems(request: PrepareRequest) -> list[LmcoreError]:
    """Return all invalid settings of a request, without a look at any file."""
    keys = request.json_keys
    found: list[LmcoreError] = []
    if not keys or len(set(keys)) != len(keys):
        found.append(
            ConfigError(f"`--json-keys {' '.join(keys)}` must name different keys, at least one")
        )
    found.extend(
        ConfigError(f"the JSON key `{key}` cannot be part of a file name")
        for key in dict.fromkeys(keys)
        if not key or "/" in key or "\0" in key
    )
    if os.path.basename(request.output_prefix) in {"", ".", ".."}:  # noqa: PTH119  # Path drops `/`
        found.append(
            ConfigError(
                f"`--output-prefix {request.output_prefix}` does not end with a file name",
                why="the names of the output files begin with its last part",
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
                f"`--partition {request.partition}` is out of range",
                hint=f"with `--partitions {request.partitions}` it is 0 to "
                f"{max(0, request.partitions - 1)}",
            )
        )
    if request.shuffle is not None and request.partitions > 1:
        found.append(
            ConfigError(
                "`--shuffle` cannot be combined with `--partitions`",
                why="a host would shuffle the documents of its own files only",
                hint="prepare the input on one host, or shuffle the text with `lmcore data clean "
                "shuffle` first",
            )
        )
    if request.append_eod and request.tokenizer.eod is None:
        found.append(
            ConfigError(
                f"the tokenizer `{request.tokenizer.name}` has no end-of-document token",
                hint="omit `--append-eod`, or use a vocabulary that has one",
            )
        )
    if request.dataset_impl not in FORMATS:
        known = ", ".join(f"`{name}`" for name in FORMATS)
        found.append(
            ConfigError(
                f"unknown `--dataset-impl {request.dataset_impl}`",
                hint=f"known: {known}",
            )
        )
    return found


def _given_twice(files: Sequence[InputFile]) -> list[LmcoreError]:
    """Return a problem for the first file that is given twice, by the same name or another."""
    seen: dict[tuple[int, int], str] = {}
    for file in files:
        path = Path(file.path)
        if file.path == STDIN or not path.is_file():
            continue
        inode = (path.stat().st_dev, path.stat().st_ino)
        earlier = seen.get(inode)
        seen[inode] = file.path
        if earlier is not None:
            return [
                ConfigError(
                    f"`{file.path}` is given twice"
                    if file.path == earlier
                    else f"`{file.path}` and `{earlier}` are the same file",
                    why="its documents would be prepared twice",
                    hint="check the patterns of `--input`; to train on it more often give its "
                    "dataset a larger weight",
                )
            ]
    return []
