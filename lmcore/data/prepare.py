"""`lmcore data prepare`: JSON lines to indexed datasets, one for each key.

Read in batches, encoded in order (by worker processes where there are several), written to
temporary names; only when all is encoded do the files of all keys get their names.  The bytes
written depend on input, tokenizer and keys alone.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from typing import Literal

from lmcore.data.encode import Encoded, EncodePlan, Problem, Reason
from lmcore.data.indexed import token_dtype
from lmcore.data.indexed_writer import IndexedDatasetWriter
from lmcore.data.metadata import DatasetMetadata, remove_metadata, write_metadata
from lmcore.data.source import read_batches, resolve_inputs
from lmcore.data.tokenizer import Tokenizer
from lmcore.data.worker_pool import encode_ordered
from lmcore.errors import ConfigError, DataError

__all__ = [
    "KeyReport",
    "PrepareReport",
    "PrepareRequest",
    "Progress",
    "ProgressCallback",
    "document_prefix",
    "prepare",
    "publish",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrepareRequest:
    """What to prepare.

    Attributes:
        inputs: Files, patterns, or `-` for standard input.
        output_prefix: First part of the output's names.
        tokenizer: Makes the ids.
        json_keys: Keys whose text becomes a dataset each.
        append_eod: Whether each document ends with the tokenizer's end-of-document id.
        workers: Processes that encode; 1 encodes in this one.
        on_error: What to do with a line that cannot be used.
        log_interval: Documents between two calls of the progress callback.
    """

    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer: Tokenizer
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    workers: int = 1
    on_error: Literal["stop", "skip"] = "stop"
    log_interval: int = 1000


@dataclass(frozen=True)
class Progress:
    """How far preparation has come; one MB is 2**20 bytes of JSON."""

    documents: int
    json_bytes: int
    seconds: float

    def line(self) -> str:
        """Return Megatron's progress line."""
        seconds = max(self.seconds, 1e-9)
        return (
            f"Processed {self.documents} documents ({self.documents / seconds:.1f} docs/s, "
            f"{self.json_bytes / 2**20 / seconds:.2f} MB/s)."
        )


ProgressCallback = Callable[[Progress], None]


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
    """What was prepared; `skipped` counts the lines left out, by reason."""

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


def prepare(request: PrepareRequest, progress: ProgressCallback | None = None) -> PrepareReport:
    """Tokenize JSON lines into `PREFIX_KEY_document.{bin,idx,meta.json}`.

    Args:
        request: What to prepare.
        progress: Called every `log_interval` documents, and once at the end.

    Raises:
        DataError: Input that is missing, damaged or (unless it is to be skipped) has a bad line;
            no documents; a full disk.  No file is left, and older ones stay.
        ConfigError: A request that cannot be met.
        RunError: A worker process died.
    """
    _check(request)
    files = resolve_inputs(request.inputs)
    tokenizer = request.tokenizer
    dtype = token_dtype(tokenizer.vocab_size)
    plan = EncodePlan(
        keys=request.json_keys,
        end=tokenizer.eod if request.append_eod else None,
        dtype=dtype,
        stop=request.on_error == "stop",
    )
    with ExitStack() as stack:
        writers = []
        for key in request.json_keys:
            writer = IndexedDatasetWriter(document_prefix(request.output_prefix, key), dtype)
            stack.enter_context(closing(writer))
            writers.append(writer)
        totals = _Totals(request, writers, progress)
        batches = stack.enter_context(closing(read_batches(files)))
        results = stack.enter_context(
            closing(encode_ordered(batches, tokenizer, plan, workers=request.workers))
        )
        for encoded in results:
            totals.add(encoded)
        totals.require_tokens(files)
        publish(writers, tokenizer, append_eod=request.append_eod)
    return totals.report(files)


def publish(
    writers: Sequence[IndexedDatasetWriter], tokenizer: Tokenizer, *, append_eod: bool
) -> None:
    """Give all files their names, after all of them are complete on the disk."""
    for writer in writers:
        writer.finish()
    for writer in writers:
        remove_metadata(writer.prefix)
        writer.commit()
        write_metadata(
            writer.prefix,
            DatasetMetadata.of(
                tokenizer,
                append_eod=append_eod,
                documents=writer.documents,
                sequences=writer.sequences,
                tokens=writer.tokens,
                dtype=writer.dtype.name,
            ),
        )


def _check(request: PrepareRequest) -> None:
    keys = request.json_keys
    if not keys or len(set(keys)) != len(keys):
        raise ConfigError(f"`--json-keys {' '.join(keys)}` must name different keys, at least one")
    for key in keys:
        if not key or "/" in key or "\0" in key:
            raise ConfigError(f"the JSON key `{key}` cannot be part of a file name")
    if request.workers < 1:
        raise ConfigError(f"`--workers {request.workers}` must be at least 1")
    if request.log_interval < 1:
        raise ConfigError(f"`--log-interval {request.log_interval}` must be at least 1")
    if request.append_eod and request.tokenizer.eod is None:
        raise ConfigError(
            f"the tokenizer `{request.tokenizer.name}` has no end-of-document token",
            hint="leave `--append-eod` out, or use a vocabulary that has one",
        )


class _Totals:
    """Writes what comes in, and counts."""

    def __init__(
        self,
        request: PrepareRequest,
        writers: Sequence[IndexedDatasetWriter],
        progress: ProgressCallback | None,
    ) -> None:
        self._request, self._writers, self._progress = request, writers, progress
        self._start = time.perf_counter()
        self._documents = self._json_bytes = self._reported = 0
        self._empty = [0] * len(writers)
        self._skipped: Counter[Reason] = Counter()

    def add(self, encoded: Encoded) -> None:
        if encoded.problem is not None:
            if self._request.on_error == "stop":
                raise encoded.problem.error()
            self._warn(encoded.problem)
        for i, (key, writer) in enumerate(zip(encoded.keys, self._writers, strict=True)):
            writer.add_documents(key.tokens, key.lengths)
            self._empty[i] += key.empty
        self._documents += encoded.documents
        self._json_bytes += encoded.json_bytes
        self._skipped.update(encoded.skipped)
        if self._documents - self._reported >= self._request.log_interval:
            self._show()

    def _warn(self, problem: Problem) -> None:
        if problem.reason not in self._skipped:  # the first of its kind; the report counts all
            _log.warning(
                "skipped `%s` line %d: %s (%s)",
                problem.source,
                problem.line,
                problem.reason,
                problem.detail,
            )

    def _seconds(self) -> float:
        return time.perf_counter() - self._start

    def _show(self) -> None:
        self._reported = self._documents
        if self._progress is not None:
            self._progress(Progress(self._documents, self._json_bytes, self._seconds()))

    def require_tokens(self, files: Sequence[str]) -> None:
        """Raise `DataError` where a key's dataset would be empty."""
        named = ", ".join(f"`{file}`" for file in files[:3]) + (" ..." if len(files) > 3 else "")
        lost = ", ".join(f"{count} {reason}" for reason, count in self._skipped.items())
        if not self._documents:
            raise DataError(
                f"no documents in {named}",
                why=f"lines left out: {lost}" if lost else "the input is empty",
                hint="`--on-error stop` names the first bad line" if lost else "check `--input`",
            )
        for key, writer in zip(self._request.json_keys, self._writers, strict=True):
            if not writer.tokens:
                raise DataError(
                    f"no text under the key `{key}` in {named}",
                    why=f"it is empty in all of {self._documents} documents",
                    hint="check `--json-keys`",
                )

    def report(self, files: Sequence[str]) -> PrepareReport:
        self._show()
        return PrepareReport(
            files=tuple(files),
            documents=self._documents,
            json_bytes=self._json_bytes,
            seconds=self._seconds(),
            skipped={str(reason): count for reason, count in self._skipped.items()},
            outputs=tuple(
                KeyReport.of(key, writer, empty=empty)
                for key, writer, empty in zip(
                    self._request.json_keys, self._writers, self._empty, strict=True
                )
            ),
        )
