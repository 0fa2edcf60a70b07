"""`lmcore data split`: random parts of JSON lines, and equal parts of indexed datasets.

`--test-percent` needs two passes: the first counts the lines, the second assigns each line to
train, dev or test with the probability that makes the counts exact.  The lines of each part are a
random choice in the order of the input, and memory does not grow with it.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

from lmcore.base.durable import AtomicFile
from lmcore.base.errors import ConfigError, DataError, counted
from lmcore.data.existing_output import require_unused
from lmcore.data.indexed.copy import DocumentRange, DocumentRanges, write_ranges
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.files import IndexedFiles, disk_errors, file_changed
from lmcore.data.indexed.metadata import write_metadata
from lmcore.data.input.compression import BOM, STDIN, open_text
from lmcore.data.input.files import find_inputs
from lmcore.data.tools.merge import open_sources, with_counts

__all__ = ["JsonPart", "JsonSplitReport", "split_json"]

_NAMES = ("train", "dev", "test")
_PIECE = 1 << 20


@dataclass(frozen=True)
class JsonPart:
    """Written file, which has a `.map` beside it."""

    path: str
    lines: int


@dataclass(frozen=True)
class JsonSplitReport:
    """Written files and their numbers of lines."""

    files: tuple[str, ...]
    lines: int
    parts: tuple[JsonPart, ...]
    seconds: float

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON values."""
        return asdict(self)


def split_json(
    inputs: Sequence[str],
    output_dir: str | Path,
    *,
    shares: tuple[float, ...],
    seed: int = 1234,
) -> JsonSplitReport:
    r"""Write `train.json`, `dev.json` and `test.json`, and the origin of each line.

    `train.json.map` has for each line of `train.json` its file and line number, from 1:
    `file\tline`. Blank lines are dropped, all other lines are unchanged.

    Args:
        inputs: files of JSON lines, or patterns.
        output_dir: directory of the new files, which must not exist; created if missing.
        shares: fractions of the lines for dev and, optionally, test.
        seed: seed of the choice.

    Raises:
        ConfigError: fractions that are invalid or leave no lines for train; files of an earlier
            split.
        DataError: input that is missing, damaged or changes; a part without lines; a full disk.
            New files are removed, older ones stay.
    """
    start = time.perf_counter()
    _check_shares(shares)
    files = _line_files(inputs)
    _require_apart(files)
    paths = [Path(output_dir) / f"{name}.json" for name in _NAMES]
    _require_unused(paths)
    paths = paths[: 1 + len(shares)]
    counts = _line_counts(_count(files), shares)
    with ExitStack() as stack:
        stack.enter_context(_directory(Path(output_dir)))
        parts = []
        for path in paths:
            parts.append(_Part(path))
            stack.callback(parts[-1].close)
        _assign(files, parts, counts, random.Random(seed))
        for part in parts:
            part.finish()
        for part in parts:
            part.commit()
    return JsonSplitReport(
        files=tuple(files),
        lines=sum(counts),
        parts=tuple(JsonPart(str(path), count) for path, count in zip(paths, counts, strict=True)),
        seconds=time.perf_counter() - start,
    )


@contextmanager
def _directory(path: Path) -> Iterator[None]:
    """Create a directory, and remove it again if the block fails."""
    created = [folder for folder in (path, *path.parents) if not folder.exists()]
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # another process may have put something there
            for folder in created:
                folder.rmdir()
        raise


class _Part:
    """Writer of a file of lines and its map, under temporary names until `commit`."""

    def __init__(self, path: Path) -> None:
        self.targets = (path, Path(f"{path}.map"))
        with disk_errors(path):
            self._lines, self._map = (
                AtomicFile(target, buffering=_PIECE) for target in self.targets
            )

    def write(self, piece: bytes) -> None:
        """Append a piece of a line."""
        with disk_errors(self.targets[0]):
            self._lines.stream.write(piece)

    def begin(self, source: str, number: int) -> None:
        """Write the origin of the next line."""
        with disk_errors(self.targets[1]):
            self._map.stream.write(f"{source}\t{number}\n".encode())

    def finish(self) -> None:
        """Sync both files to disk."""
        for file in (self._lines, self._map):
            with disk_errors(file.path):
                file.finish()

    def commit(self) -> None:
        """Rename both files to their final names."""
        for file in (self._lines, self._map):
            with disk_errors(file.path):
                file.commit()

    def close(self) -> None:
        """Remove uncommitted files."""
        for file in (self._lines, self._map):
            file.close()


def _assign(
    files: Sequence[str], parts: Sequence[_Part], counts: Sequence[int], chance: random.Random
) -> None:
    """Write each line to a random part, weighted by the remaining lines of the parts."""
    left = list(counts)
    for file in files:
        last, part = 0, parts[0]
        for number, piece in _pieces(file):
            if number != last:
                if not any(left):
                    raise file_changed(file)
                last, chosen = number, _choose(left, chance)
                left[chosen] -= 1
                part = parts[chosen]
                part.begin(file, number)
            part.write(piece)
    if any(left):
        raise file_changed(files[-1])


def _choose(left: Sequence[int], chance: random.Random) -> int:
    at = chance.randrange(sum(left))
    for part, count in enumerate(left):
        at -= count
        if at < 0:
            return part
    raise AssertionError("`at` is below the sum")


def _pieces(file: str) -> Generator[tuple[int, bytes], None, None]:
    """Yield the non-blank lines with their numbers, a very long one in pieces."""
    number, begun, kept = 1, False, False
    with open_text(file) as stream:
        while piece := stream.readline(_PIECE):
            if not begun:
                piece = piece.removeprefix(BOM) if number == 1 else piece
                kept = not (piece.isspace() and len(piece) < _PIECE)
            if kept and piece:
                yield number, piece
            begun = not piece.endswith(b"\n")
            number += not begun
    if begun and kept:
        yield number, b"\n"


def _count(files: Sequence[str]) -> int:
    total = 0
    for file in files:
        last = 0
        for number, _ in _pieces(file):
            total += number != last
            last = number
    return total


def _line_counts(total: int, shares: tuple[float, ...]) -> list[int]:
    """Return the number of lines of train and of each other part."""
    # Decimal fractions: 0.29 of 100 lines is 29, which binary floating point does not give.
    counts = [math.floor(Fraction(str(share)) * total) for share in shares]
    counts.insert(0, total - sum(counts))
    for name, count in zip(_NAMES, counts, strict=False):
        if not count:
            *shown, last = [
                f"{part} {lines:,}" for part, lines in zip(_NAMES, counts, strict=False)
            ]
            raise DataError(
                f"`{name}` gets no lines",
                why=f"of {counted(total, 'line')} the parts get {', '.join(shown)} and {last}",
                hint="give more lines, or other fractions with `--test-percent`",
            )
    return counts


def _check_shares(shares: Sequence[float]) -> None:
    typed = " ".join(map(str, shares))
    if len(shares) not in {1, 2}:
        raise ConfigError(
            f"`--test-percent {typed}` has {counted(len(shares), 'number')}",
            why="the first is the fraction for dev, the second for test",
        )
    if not all(0 < share < 1 for share in shares) or sum(shares) >= 1:
        raise ConfigError(
            f"`--test-percent {typed}` leaves no lines for one of the parts",
            why="each fraction must be above 0, and their sum below 1",
            hint="5% is 0.05",
        )


def _line_files(inputs: Sequence[str]) -> list[str]:
    found = find_inputs(inputs)
    for file in found:
        if file.path == STDIN or not Path(file.path).is_file():
            raise DataError(
                f"`{file.path}` cannot be read twice",
                why="the lines are counted first",
                hint="write it to a file first",
            )
        if file.format != "jsonl":
            raise DataError(
                f"`{file.path}` is not JSON lines",
                why=f"its format is {file.format}",
                hint="convert an array to one object per line with `jq -c '.[]' FILE`"
                if file.format == "json"
                else "give only files of JSON lines, such as `'DIRECTORY/*.jsonl'`",
            )
    return [file.path for file in found]


def _require_apart(files: Sequence[str]) -> None:
    seen: list[Path] = []
    for file in map(Path, files):
        if any(file.samefile(other) for other in seen):
            raise DataError(f"`{file}` is given twice", why="its lines would be written twice")
        seen.append(file)


def _require_unused(paths: Sequence[Path]) -> None:
    """Raise if files of an earlier split exist, even of parts that this split does not have.

    Their test lines could be train lines of this split.
    """
    names = [name for path in paths for name in (path, Path(f"{path}.map"))]
    why = "files of an earlier split would be replaced, or stay and share lines with other parts"
    require_unused(names, "--output-dir", why=why)


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
    _require_unused_prefix(output_prefix)
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


def _require_unused_prefix(output_prefix: str) -> None:
    """Raise if files of an earlier split exist, which may be more than this one writes."""
    path = Path(output_prefix)
    name = re.compile(re.escape(path.name) + r"-\d{5,}\.(bin|idx|meta\.json)")
    if path.parent.is_dir():
        found = sorted(other for other in path.parent.iterdir() if name.fullmatch(other.name))
        why = f"{counted(len(found), 'file')} of an earlier split would stay"
        require_unused(found, "--output-prefix", why=why)
