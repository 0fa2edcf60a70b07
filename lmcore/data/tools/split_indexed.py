"""`lmcore data split --samples`: split of indexed datasets into ones of equal size."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path

from lmcore.base.errors import DataError, counted
from lmcore.data.existing_output import require_unused
from lmcore.data.indexed.copy import DocumentRange, DocumentRanges, write_ranges
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.files import IndexedFiles
from lmcore.data.indexed.metadata import write_metadata
from lmcore.data.tools.merge import open_sources, with_counts

__all__ = ["IndexedSplitReport", "SplitFile", "split_indexed"]


@dataclass(frozen=True)
class SplitFile:
    """Written dataset."""

    prefix: str
    documents: int
    tokens: int
    bytes: int


@dataclass(frozen=True)
class IndexedSplitReport:
    """Written datasets and their counts."""

    datasets: int
    documents: int
    tokens: int
    dtype: str
    files: tuple[SplitFile, ...]
    seconds: float

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON values."""
        return asdict(self)


def split_indexed(
    prefixes: Sequence[str], output_prefix: str, *, samples: int
) -> IndexedSplitReport:
    """Write the documents of datasets to `PREFIX-00000`, `PREFIX-00001`, ... in order.

    The files are renamed to their final names after all are complete.

    Args:
        prefixes: paths of the datasets without suffix, compatible as for `merge`.
        output_prefix: first part of the paths of the new ones.
        samples: number of documents of each new one, except the last.

    Raises:
        DataError: as `merge`; no documents.
        ConfigError: files with these names exist.
    """
    start = time.perf_counter()
    if samples < 1:
        raise ValueError(f"{samples} documents in a file")
    _require_unused(output_prefix)
    sources = open_sources(prefixes, output_prefix)
    first = sources[0]
    written: list[tuple[str, IndexedFiles, DocumentRanges]] = []
    with ExitStack() as stack:
        documents = [source.documents for source in sources]
        for number, ranges in enumerate(_groups(documents, samples)):
            prefix = f"{output_prefix}-{number:05}"
            files = stack.enter_context(closing(IndexedFiles(prefix)))
            content = DocumentRanges(ranges)
            write_ranges(files, ranges)
            files.finish(content, first.dtype, first.format)
            written.append((prefix, files, content))
        if not written:
            raise DataError("no documents to split", why="all datasets are empty")
        for prefix, files, content in written:
            metadata = with_counts(sources, content, files)
            files.commit()
            if metadata is not None:
                write_metadata(prefix, metadata)
    return IndexedSplitReport(
        datasets=len(sources),
        documents=sum(content.documents for _, _, content in written),
        tokens=sum(content.tokens for _, _, content in written),
        dtype=first.dtype,
        files=tuple(_describe(*dataset) for dataset in written),
        seconds=time.perf_counter() - start,
    )


def _describe(prefix: str, files: IndexedFiles, content: DocumentRanges) -> SplitFile:
    size = sum(path.stat().st_size for path in (files.bin_path, files.idx_path))
    return SplitFile(prefix, content.documents, content.tokens, size)


def _groups(sources: Sequence[DocumentRange], samples: int) -> Iterator[list[DocumentRange]]:
    """Yield for each new dataset its ranges of documents, *samples* in total."""
    group: list[DocumentRange] = []
    room = samples
    for source in sources:
        dataset = IndexedDataset(source.prefix, verify=False)
        at = source.first
        while at < source.last:
            end = min(source.last, at + room)
            group.append(DocumentRange.of(dataset, at, end))
            room -= end - at
            at = end
            if not room:
                yield group
                group, room = [], samples
    if group:
        yield group


def _require_unused(output_prefix: str) -> None:
    """Raise if files of an earlier split exist, which may be more than this one writes."""
    path = Path(output_prefix)
    name = re.compile(re.escape(path.name) + r"-\d{5,}\.(bin|idx|meta\.json)")
    if path.parent.is_dir():
        found = sorted(other for other in path.parent.iterdir() if name.fullmatch(other.name))
        why = f"{counted(len(found), 'file')} of an earlier split would stay"
        require_unused(found, "--output-prefix", why=why)
