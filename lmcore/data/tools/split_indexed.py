"""`lmcore data split --samples`: indexed datasets cut into files of so many documents."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path

from lmcore.data.indexed.copy import DocumentRange, DocumentRanges, write_ranges
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.files import IndexedFiles
from lmcore.data.indexed.metadata import write_metadata
from lmcore.data.tools.merge import open_sources, with_counts
from lmcore.errors import DataError, counted

__all__ = ["IndexedSplitReport", "SplitFile", "split_indexed"]


@dataclass(frozen=True)
class SplitFile:
    """One of the datasets that were written."""

    prefix: str
    documents: int
    tokens: int
    bytes: int


@dataclass(frozen=True)
class IndexedSplitReport:
    """What was written."""

    datasets: int
    documents: int
    tokens: int
    dtype: str
    files: tuple[SplitFile, ...]
    seconds: float

    def to_json(self) -> dict[str, object]:
        """Return it as JSON values."""
        return asdict(self)


def split_indexed(
    prefixes: Sequence[str], output_prefix: str, *, samples: int
) -> IndexedSplitReport:
    """Write the documents of datasets to `PREFIX-00000`, `PREFIX-00001`, ... in their order.

    Nothing has its name before everything is on the disk.

    Args:
        prefixes: The datasets' paths without ending; they must fit together, as for `merge`.
        output_prefix: First part of the new ones' paths.
        samples: Documents of each new one; the last has what is left.

    Raises:
        DataError: See `merge`; files of such names are there; no documents.
    """
    start = time.perf_counter()
    if samples < 1:
        raise ValueError(f"{samples} documents in a file")
    _require_unused(output_prefix)
    sources = open_sources(prefixes, output_prefix)
    first = sources[0]
    written: list[tuple[str, IndexedFiles, DocumentRanges]] = []
    with ExitStack() as stack:
        for number, ranges in enumerate(_groups([one.documents for one in sources], samples)):
            prefix = f"{output_prefix}-{number:05}"
            files = stack.enter_context(closing(IndexedFiles(prefix)))
            content = DocumentRanges(ranges)
            write_ranges(files, ranges)
            files.finish(content, first.dtype, first.format)
            written.append((prefix, files, content))
        if not written:
            raise DataError("no documents to split", why="all of the data sets are empty")
        for prefix, files, content in written:
            files.commit()
            metadata = with_counts(sources, content)
            if metadata is not None:
                write_metadata(prefix, metadata)
    return IndexedSplitReport(
        datasets=len(sources),
        documents=sum(content.documents for _, _, content in written),
        tokens=sum(content.tokens for _, _, content in written),
        dtype=first.dtype,
        files=tuple(_describe(*one) for one in written),
        seconds=time.perf_counter() - start,
    )


def _describe(prefix: str, files: IndexedFiles, content: DocumentRanges) -> SplitFile:
    size = sum(path.stat().st_size for path in (files.bin_path, files.idx_path))
    return SplitFile(prefix, content.documents, content.tokens, size)


def _groups(sources: Sequence[DocumentRange], samples: int) -> Iterator[list[DocumentRange]]:
    """Yield what goes into each file: ranges of *samples* documents in all."""
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
    """Raise where files of an earlier split stand: more of them might be there than are made."""
    path = Path(output_prefix)
    name = re.compile(re.escape(path.name) + r"-\d{5,}\.(bin|idx|meta\.json)")
    if path.parent.is_dir():
        found = sorted(other.name for other in path.parent.iterdir() if name.fullmatch(other.name))
        if found:
            raise DataError(
                f"`{path.parent / found[0]}` is there already",
                why=f"{counted(len(found), 'file')} of names that the output may get would stay",
                hint="remove them, or give another `--output-prefix`",
            )
