"""`lmcore data clean`: a corpus through a chain of steps.

Documents stream from one segment to the next.  Only temporary files are written until the end, when
the output and the file of dropped documents are renamed to their final names.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from lmcore.base.errors import ConfigError
from lmcore.data.existing_output import require_unused
from lmcore.data.indexed.files import disk_errors
from lmcore.data.input.files import find_inputs
from lmcore.data.input.options import unused_options
from lmcore.data.input.problem import Reason
from lmcore.data.input.read import read_input
from lmcore.data.worker_pool import BatchWork, work_ordered
from lmcore_data_tools.clean.chain import CleanRequest, PlannedSegment, plan_chain
from lmcore_data_tools.clean.corpus_step import StepContext
from lmcore_data_tools.clean.counts import StepCounts
from lmcore_data_tools.clean.document import EntryBatch
from lmcore_data_tools.clean.line_writer import STDOUT, LineWriter
from lmcore_data_tools.clean.segment import AnyBatch, Processed, Segment, process

__all__ = ["CleanProgress", "CleanReport", "ProgressCallback", "StepReport", "clean"]

_log = logging.getLogger(__name__)
_SECONDS_BETWEEN_PAIRS = 1.0


@dataclass(frozen=True)
class CleanProgress:
    """Progress of a segment.

    Attributes:
        doing: names of the steps.
        count: number of documents or pairs seen.
        unit: unit of `count`.
        bytes: size of their JSON; one MB is 2**20.
        seconds: time since the start of the segment.
    """

    doing: str
    count: int
    unit: str
    bytes: int
    seconds: float

    def line(self) -> str:
        """Return a progress line."""
        seconds = max(self.seconds, 1e-9)
        speed = f"{self.count / seconds:,.0f} {'docs' if self.unit == 'documents' else self.unit}/s"
        if self.bytes:
            speed += f", {self.bytes / 2**20 / seconds:.2f} MB/s"
        return f"{self.doing}: {self.count:,} {self.unit} ({speed})"


ProgressCallback = Callable[[CleanProgress], None]


@dataclass(frozen=True)
class StepReport:
    """Counts of a step; see `StepCounts`."""

    step: str
    documents: int
    kept: int
    changed: int
    added: int
    dropped: dict[str, int]

    @classmethod
    def of(cls, step: str, counts: StepCounts) -> StepReport:
        """Return the report of *counts*, with reasons sorted by number, then by name."""
        reasons = sorted((+counts.dropped).items(), key=lambda item: (-item[1], item[0]))
        return cls(step, counts.seen, counts.kept, counts.changed, counts.added, dict(reasons))


@dataclass(frozen=True)
class CleanReport:
    """Result of a cleaning run; `skipped` counts unreadable documents by reason."""

    files: tuple[str, ...]
    output: str
    dropped: str | None
    documents: int
    kept: int
    skipped: dict[str, int]
    steps: tuple[StepReport, ...]
    json_bytes: int
    output_bytes: int
    seconds: float

    @property
    def megabytes_per_second(self) -> float:
        """Speed, in 2**20 bytes of JSON per second."""
        return self.json_bytes / 2**20 / max(self.seconds, 1e-9)

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON values."""
        return {
            **self.__dict__,
            "steps": [step.__dict__ for step in self.steps],
            "megabytes_per_second": round(self.megabytes_per_second, 3),
        }


def clean(
    request: CleanRequest,
    progress: ProgressCallback | None = None,
    *,
    log_interval: int = 1000,
) -> CleanReport:
    """Apply the steps of *request* to its documents.

    The result depends only on the input, the steps, their settings and the seed.

    Args:
        request: input, output, steps and settings.
        progress: called about every *log_interval* documents, and at the end of a segment.
        log_interval: number of documents between two calls.

    Raises:
        DataError: input that is missing, damaged or (unless skipped) has a bad document; a full
            disk.  New files are removed, older ones stay.
        ConfigError: a request that cannot be met.
        RunError: a worker process died.
    """
    segments = plan_chain(request)
    inputs = find_inputs(request.inputs, request.input_format)
    if problems := unused_options(request.reading, inputs):
        raise ConfigError.collect(problems)
    files = [file.path for file in inputs]
    _check_paths(request, files)
    options = replace(
        request.reading,
        keys=tuple(key for key in (request.key, request.fields.url) if key is not None),
        key_flags=("--key", "--url-key"),
        skip=request.on_error == "skip",
    )
    with ExitStack() as stack:
        output = stack.enter_context(closing(LineWriter(request.output)))
        dropped = None
        if request.dropped is not None:
            dropped = stack.enter_context(closing(LineWriter(request.dropped)))
        scratch = stack.enter_context(_scratch(request))
        run = _Run(request, dropped, scratch, progress, log_interval)
        stream: Generator[AnyBatch, None, None] = stack.enter_context(
            closing(read_input(inputs, options))
        )
        for number, segment in enumerate(segments):
            stream = stack.enter_context(closing(run.segment(number, segment, stream)))
        kept = 0
        for batch in stream:
            assert isinstance(batch, EntryBatch)
            output.write(entry.raw for entry in batch.entries)
            kept += len(batch.entries)
        writers = [output] if dropped is None else [output, dropped]
        for writer in writers:
            writer.finish()
        for writer in writers:
            writer.commit()
    return run.report(files, kept=kept, output_bytes=output.bytes)


def _check_paths(request: CleanRequest, files: Sequence[str]) -> None:
    written = [path for path in (request.output, request.dropped) if path is not None]
    targets = [os.path.realpath(path) for path in written if path != STDOUT]
    if len(set(targets)) < len(targets):
        raise ConfigError("`--output` and `--dropped` are the same file")
    if request.dropped == STDOUT:
        raise ConfigError("`--dropped -`: only `--output` can go to standard output")
    for path in files:
        if path != STDOUT and os.path.realpath(path) in targets:
            raise ConfigError(
                f"`{path}` is both input and output",
                hint="give the output another name; input files are never replaced",
            )
    for option, output in (("--output", request.output), ("--dropped", request.dropped)):
        if output not in {None, STDOUT}:
            require_unused([output], option, overwrite=request.overwrite)


@contextmanager
def _scratch(request: CleanRequest) -> Iterator[Path]:
    """Create a directory for temporary files, and remove it at the end."""
    if request.scratch is not None:
        parent = Path(request.scratch)
    elif request.output == STDOUT:
        parent = Path(tempfile.gettempdir())
    else:
        parent = Path(request.output).parent
    with disk_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=".lmcore-clean-", suffix=".tmp", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class _Run:
    """Runner of the segments, with the counts of the steps."""

    def __init__(
        self,
        request: CleanRequest,
        dropped: LineWriter | None,
        scratch: Path,
        progress: ProgressCallback | None,
        log_interval: int,
    ) -> None:
        self._request, self._dropped, self._scratch = request, dropped, scratch
        self._progress, self._log_interval = progress, log_interval
        self._start = time.perf_counter()
        self._counts = [StepCounts() for _ in request.steps]
        self._skipped: Counter[Reason] = Counter()
        self._documents = self._json_bytes = 0

    def segment(
        self, number: int, planned: PlannedSegment, stream: Iterable[AnyBatch]
    ) -> Generator[EntryBatch, None, None]:
        """Yield the documents that remain of *stream* after a segment."""
        if number and not planned.steps and planned.corpus_step is None:
            for untouched in stream:
                assert isinstance(untouched, EntryBatch)
                yield untouched
            return
        work = BatchWork(
            functools.partial(process, segment=self._segment(planned)),
            carried="a step",
            done="cleaned",
        )
        meter = _Meter(self._doing(planned), self._progress, self._log_interval)
        processed = work_ordered(meter.timed(stream), work, workers=self._request.workers)
        with closing(processed):
            counted = self._counted(processed, meter, first=not number)
            if planned.corpus_step is None:
                for batch in counted:
                    if batch.entries:
                        yield EntryBatch(tuple(batch.entries))
                return
            row, corpus_step = planned.corpus_step
            directory = self._scratch / f"{number}"
            directory.mkdir()
            context = StepContext(
                directory=directory,
                name=self._request.steps[row],
                counts=self._counts[row],
                report_dropped=self._write_dropped if self._dropped is not None else None,
                compared=meter.compared,
            )
            with closing(corpus_step.run(counted, context)) as left:
                yield from left
            shutil.rmtree(directory)

    def _segment(self, planned: PlannedSegment) -> Segment:
        corpus_step = planned.corpus_step[1] if planned.corpus_step else None
        return Segment(
            fields=self._request.fields,
            steps=planned.steps,
            names=self._request.steps,
            key_maker=corpus_step.key_maker if corpus_step else None,
            stop=self._request.on_error == "stop",
            report_dropped=self._dropped is not None,
        )

    def _doing(self, planned: PlannedSegment) -> str:
        names = dict.fromkeys(self._request.steps[row] for row in planned.rows)
        return ", ".join(names) or "read"

    def _counted(
        self, batches: Iterable[Processed], meter: _Meter, *, first: bool
    ) -> Iterator[Processed]:
        for batch in batches:
            if batch.problem is not None:
                if self._request.on_error == "stop":
                    raise batch.problem.error()
                self._warn(batch)
            self._skipped.update(batch.bad)
            for row, counts in batch.counts.items():
                self._counts[row].add(counts)
            for line in batch.dropped:
                self._write_dropped(line)
            if first:
                self._documents += batch.documents
                self._json_bytes += batch.bytes
            meter.add(batch.documents, batch.bytes)
            yield batch
        meter.show()

    def _warn(self, batch: Processed) -> None:
        problem = batch.problem
        if problem is not None and problem.reason not in self._skipped:
            _log.warning("skipped %s: %s (%s)", problem.where, problem.reason, problem.detail)

    def _write_dropped(self, line: bytes) -> None:
        if self._dropped is not None:
            self._dropped.write([line])

    def report(self, files: Sequence[str], *, kept: int, output_bytes: int) -> CleanReport:
        """Return the report of the run."""
        return CleanReport(
            files=tuple(files),
            output=self._request.output,
            dropped=self._request.dropped,
            documents=self._documents,
            kept=kept,
            skipped={str(reason): count for reason, count in self._skipped.items()},
            steps=tuple(map(StepReport.of, self._request.steps, self._counts)),
            json_bytes=self._json_bytes,
            output_bytes=output_bytes,
            seconds=time.perf_counter() - self._start,
        )


class _Meter:
    """Progress reporter of a segment."""

    def __init__(self, doing: str, progress: ProgressCallback | None, interval: int) -> None:
        self._doing, self._progress, self._interval = doing, progress, interval
        self._documents = self._bytes = self._shown = 0
        self._start = self._compared_at = 0.0

    def timed(self, stream: Iterable[AnyBatch]) -> Iterator[AnyBatch]:
        """Yield *stream*; the clock starts at its first batch from the earlier segments."""
        for batch in stream:
            self._start = self._start or time.perf_counter()
            yield batch

    def add(self, documents: int, size: int) -> None:
        self._documents += documents
        self._bytes += size
        if self._documents - self._shown >= self._interval:
            self.show()

    def show(self) -> None:
        if self._documents > self._shown:
            self._shown = self._documents
            self._report(self._doing, self._documents, "documents", self._bytes)

    def compared(self, pairs: int) -> None:
        now = time.perf_counter()
        if now - self._compared_at > _SECONDS_BETWEEN_PAIRS:
            self._compared_at = now
            self._report(f"{self._doing}: comparing", pairs, "pairs", 0)

    def _report(self, doing: str, count: int, unit: str, size: int) -> None:
        if self._progress is not None:
            seconds = time.perf_counter() - self._start
            self._progress(CleanProgress(doing, count, unit, size, seconds))
