"""`lmcore data prepare`: documents to indexed datasets, one per key.

Documents are read in batches, encoded in order by threads or processes, and written shard by shard;
at the end the files of all keys are renamed.  The output depends only on input, tokenizer and
settings, not on the workers or on interruptions.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lmcore.base.errors import ConfigError, DataError, RunError, counted
from lmcore.data.indexed.dataset import token_dtype
from lmcore.data.indexed.metadata import DatasetMetadata, remove_metadata, write_metadata
from lmcore.data.input.batch import Batch
from lmcore.data.input.compression import STDIN
from lmcore.data.input.files import InputFile
from lmcore.data.input.problem import InputProblem
from lmcore.data.input.read import read_input
from lmcore.data.prepare.encode import encode_batch
from lmcore.data.prepare.encode_types import EncodedBatch, EncodePlan
from lmcore.data.prepare.partial_output import PartialOutput, state_path
from lmcore.data.prepare.request import (
    KeyReport,
    PrepareProgress,
    PrepareReport,
    PrepareRequest,
    ProgressCallback,
    check_request,
    document_prefix,
    request_problems,
)
from lmcore.data.prepare.resume_state import (
    Identity,
    PrepareState,
    identity_of,
    read_completed,
    read_state,
    remove_completed,
    write_completed,
)
from lmcore.data.worker_pool import BatchWork, work_ordered

__all__ = [
    "KeyReport",
    "PrepareProgress",
    "PrepareReport",
    "PrepareRequest",
    "ProgressCallback",
    "document_prefix",
    "join",
    "prepare",
    "request_problems",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Job:
    """Checked request: its files, token type, and the identity of the whole input."""

    request: PrepareRequest
    files: Sequence[InputFile]
    dtype: np.dtype[np.integer]
    identity: Identity


def prepare(request: PrepareRequest, progress: ProgressCallback | None = None) -> PrepareReport:
    """Tokenize documents into `PREFIX_KEY_document.{bin,idx,meta.json}`, or `..._sentence`.

    With `resume`, a dataset that is complete already is reported again, and nothing is done.

    Args:
        request: input, output and settings.
        progress: called every `log_interval` documents, and at the end.

    Raises:
        DataError: input that is missing, damaged or (unless skipped) has a bad document; no
            documents; a full disk.  Only complete shards and older datasets remain.
        ConfigError: a request that cannot be met, with all its problems; or an existing dataset
            that is not to be replaced.
        RunError: a worker process died.
    """
    job = _checked(request)
    done = _done_before(job)
    if done is not None:
        return done
    request.require_replaceable()
    prefixes = [request.key_prefix(key) for key in request.json_keys]
    output = PartialOutput(
        request.prefix,
        prefixes,
        job.dtype,
        job.identity,
        resume=request.resume,
        overwrite=request.overwrite,
        continued_by=request.continued_by,
    )
    totals = _Totals(job, output, progress)
    try:
        _encode_all(job, totals)
        totals.require_tokens()
        output.finish(request.dataset_impl, request.shuffle)
        remove_completed(request)
        for key in output.keys:
            checksums = key.checksums()
            remove_metadata(key.prefix)
            key.commit()
            metadata = DatasetMetadata.of(
                request.tokenizer,
                append_eod=request.append_eod,
                documents=key.documents,
                sequences=key.sequences,
                tokens=key.counts.tokens,
                dtype=job.dtype.name,
                checksums=checksums,
                input_files=len(job.files),
                shuffle=request.shuffle,
            )
            write_metadata(key.prefix, metadata)
    except BaseException as error:
        output.abandon(error)
        raise
    output.remove()
    report = totals.report()
    if request.partition is not None:
        from lmcore.data.prepare.partition import write_partition_record

        write_partition_record(request, job.identity, report)
    if request.resume:
        write_completed(request, job.identity, report)
    return report


def _done_before(job: _Job) -> PrepareReport | None:
    """Return the report of a completed run that is to be resumed, else None."""
    request = job.request
    if not request.resume or read_state(state_path(request.prefix)) is not None:
        return None
    return read_completed(request, job.identity)


def join(request: PrepareRequest) -> PrepareReport:
    """Join the partitions of several hosts, as if one host had prepared the input.

    Raises:
        ConfigError: all partitions that are missing or do not fit; or an existing dataset that is
            not to be replaced.
        DataError: a partition is damaged, or the file system refuses.
    """
    from lmcore.data.prepare.partition import join_partitions

    job = _checked(request)
    request.require_replaceable()
    return join_partitions(request, job.identity)


def _checked(request: PrepareRequest) -> _Job:
    """Check the request and its files; raise all problems at once."""
    files, problems = check_request(request)
    if problems:
        raise problems[0] if len(problems) == 1 else ConfigError.collect(problems)
    dtype = np.dtype(token_dtype(request.tokenizer.vocab_size))
    identity = identity_of(request, files, dtype)
    share: Sequence[InputFile] = files
    if request.partition is not None:
        from lmcore.data.prepare.partition import partition_files

        share = partition_files(files, request.partition, request.partitions)
    return _Job(request, share, dtype, identity)


def _encode_all(job: _Job, totals: _Totals) -> None:
    request = job.request
    plan = EncodePlan(
        keys=request.json_keys,
        end=request.tokenizer.eod if request.append_eod else None,
        dtype=job.dtype,
        stop=request.on_error == "stop",
        splitter=request.splitter,
    )
    source = _BatchSource(job, totals.output.state)
    tokenizer = request.tokenizer
    work = BatchWork(
        functools.partial(encode_batch, tokenizer=tokenizer, plan=plan),
        carried=f"the tokenizer `{tokenizer.name}`",
        done="encoded",
    )
    results = work_ordered(
        source.batches(),
        work,
        workers=request.num_workers,
        threads=request.threads,
    )
    with closing(results):
        try:
            for encoded in results:
                totals.add(encoded, source.positions.popleft())
        except RunError as error:
            shard = totals.output.state.shards + 1
            raise RunError(
                f"{error.what}, in shard {shard}", why=error.why, hint=error.hint
            ) from None


@dataclass(frozen=True)
class _BatchPosition:
    """End of a batch: its number of batches within `file`, and the bytes of `file` read so far."""

    file: int
    batches: int
    position: int


class _BatchSource:
    """Remaining batches of the input, and the end position of each pending one."""

    def __init__(self, job: _Job, state: PrepareState) -> None:
        self._job, self._state = job, state
        self.positions: deque[_BatchPosition] = deque()

    def batches(self) -> Generator[Batch, None, None]:
        options = self._job.request.options
        for number, file in enumerate(self._job.files):
            if number < self._state.file:
                continue
            done = self._state.batches if number == self._state.file else 0
            with closing(read_input([file], options)) as batches:
                for count, batch in enumerate(itertools.islice(batches, done, None), done + 1):
                    self.positions.append(_BatchPosition(number, count, batch.position))
                    yield batch


class _Totals:
    """Writer of the encoded batches, and counters of the run."""

    def __init__(self, job: _Job, output: PartialOutput, progress: ProgressCallback | None) -> None:
        self._job, self.output, self._progress = job, output, progress
        self._request = job.request
        self._began = time.perf_counter()
        state = output.state
        self._seconds_before = state.seconds
        self._documents, self._json_bytes = state.documents, state.json_bytes
        self._shard_start = state.json_bytes
        self._reported = self._documents
        self._skipped: Counter[str] = Counter(state.skipped)
        self._pace = _Pace(job.files)
        self._resumable = all(Path(file.path).is_file() for file in job.files)

    def add(self, encoded: EncodedBatch, position: _BatchPosition) -> None:
        if encoded.problem is not None:
            if self._request.on_error == "stop":
                raise encoded.problem.error()
            self._warn(encoded.problem)
        self.output.add(encoded.keys)
        self._documents += encoded.documents
        self._json_bytes += encoded.json_bytes
        self._skipped.update(encoded.skipped)
        if self._documents - self._reported >= self._request.log_interval:
            self._show(position)
        if self._resumable and self._json_bytes - self._shard_start >= self._request.shard_bytes:
            self._complete_shard(position)

    def _complete_shard(self, position: _BatchPosition) -> None:
        self._shard_start = self._json_bytes
        self.output.complete_shard(
            PrepareState(
                shards=self.output.state.shards + 1,
                file=position.file,
                batches=position.batches,
                documents=self._documents,
                json_bytes=self._json_bytes,
                seconds=self._seconds(),
                skipped=dict(self._skipped),
                keys=(),
            )
        )

    def _warn(self, problem: InputProblem) -> None:
        if (
            problem.reason not in self._skipped
        ):  # only the first of each kind; the report has counts
            _log.warning("skipped %s: %s (%s)", problem.where, problem.reason, problem.detail)

    def _seconds(self) -> float:
        return self._seconds_before + time.perf_counter() - self._began

    def _show(self, position: _BatchPosition | None) -> None:
        self._reported = self._documents
        if self._progress is not None:
            fraction, left = self._pace.at(position)
            self._progress(
                PrepareProgress(self._documents, self._json_bytes, self._seconds(), fraction, left)
            )

    def require_tokens(self) -> None:
        """Raise `DataError` if a dataset would be empty; a partition's may be."""
        if self._request.partition is not None:
            return
        files = [file.path for file in self._job.files]
        named = ", ".join(f"`{file}`" for file in files[:3]) + (" ..." if len(files) > 3 else "")
        lost = ", ".join(f"{count:,} {reason}" for reason, count in self._skipped.items())
        if not self._documents:
            raise DataError(
                f"no documents in {named}",
                why=f"skipped: {lost}" if lost else "the input is empty",
                hint="`--on-error stop` shows the first" if lost else "check `--input`",
            )
        documents = counted(self._documents, "document")
        for key, output in zip(self._request.json_keys, self.output.keys, strict=True):
            if not output.counts.tokens:
                raise DataError(
                    f"no text under the key `{key}` in {named}",
                    why=f"skipped: {lost}; empty in the other {documents}"
                    if lost
                    else f"empty in all {documents}",
                    hint="`--on-error stop` shows the first skipped one"
                    if lost
                    else "check `--json-keys`",
                )

    def report(self) -> PrepareReport:
        self._show(None)
        return PrepareReport(
            files=tuple(file.path for file in self._job.files),
            documents=self._documents,
            json_bytes=self._json_bytes,
            seconds=self._seconds(),
            skipped=dict(self._skipped),
            outputs=tuple(
                KeyReport(
                    key=key,
                    prefix=output.prefix,
                    documents=output.counts.documents,
                    tokens=output.counts.tokens,
                    empty=output.counts.empty,
                    bytes=output.counts.tokens * output.dtype.itemsize,
                    dtype=output.dtype.name,
                )
                for key, output in zip(self._request.json_keys, self.output.keys, strict=True)
            ),
        )


class _Pace:
    """Estimate of the remaining time, from the bytes read on disk."""

    def __init__(self, files: Sequence[InputFile]) -> None:
        self._began = time.perf_counter()
        self._first: float | None = None
        sizes = [Path(file.path).stat().st_size if file.path != STDIN else 0 for file in files]
        self._known = all(Path(file.path).is_file() for file in files) and any(sizes)
        self._before = [0, *itertools.accumulate(sizes)]

    def at(self, position: _BatchPosition | None) -> tuple[float | None, float | None]:
        """Return the fraction read and the seconds left; None if unknown."""
        if not self._known:
            return None, None
        if position is None:
            return 1.0, 0.0
        read = self._before[position.file] + position.position
        fraction = min(1.0, read / self._before[-1])
        if self._first is None:  # a resumed run starts in the middle
            self._first = fraction
            self._began = time.perf_counter()
            return fraction, None
        done = fraction - self._first
        if done <= 0:
            return fraction, None
        return fraction, (time.perf_counter() - self._began) * (1 - fraction) / done
