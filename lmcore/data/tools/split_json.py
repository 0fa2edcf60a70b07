"""`lmcore data split --test-percent`: JSON lines dealt out to train, dev and test.

Two passes: the first counts the lines, the second deals each out with the probability that makes
the counts exact, so that the lines of every part are a random choice in the order of the input,
and memory does not grow with it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

from lmcore.data.indexed.files import disk_errors, file_changed
from lmcore.data.input.compression import BOM, STDIN, open_text
from lmcore.data.input.files import find_inputs
from lmcore.durable import AtomicFile
from lmcore.errors import ConfigError, DataError, counted

__all__ = ["JsonPart", "JsonSplitReport", "split_json"]

_NAMES = ("train", "dev", "test")
_PIECE = 1 << 20


@dataclass(frozen=True)
class JsonPart:
    """One of the files that were written, beside its `.map`."""

    path: str
    lines: int


@dataclass(frozen=True)
class JsonSplitReport:
    """What was written."""

    files: tuple[str, ...]
    lines: int
    parts: tuple[JsonPart, ...]
    seconds: float

    def to_json(self) -> dict[str, object]:
        """Return it as JSON values."""
        return asdict(self)


def split_json(
    inputs: Sequence[str],
    output_dir: str | Path,
    *,
    shares: tuple[float, ...],
    seed: int = 1234,
) -> JsonSplitReport:
    r"""Write `train.json`, `dev.json` and `test.json`, and where each line came from.

    `train.json.map` says for each line of `train.json` the file and the line, from 1, that it was:
    `file\tline`.  Blank lines are left out, the others stay as they are.

    Args:
        inputs: Files of JSON lines, or patterns.
        output_dir: Where the files go; made where it is missing, and without files of such names.
        shares: Of dev and, where one is wanted, of test, as parts of one.
        seed: Of the choice.

    Raises:
        ConfigError: Shares that leave nothing, or are no parts of one.
        DataError: Input that is missing, damaged or changes; a part without lines; files of an
            earlier split; a full disk.  No file is left, and older ones stay.
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
        _deal(files, parts, counts, random.Random(seed))
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
    """Make a directory, and take it away again where what is to stand in it fails."""
    made = [one for one in (path, *path.parents) if not one.exists()]
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # others may have put something there
            for one in made:
                one.rmdir()
        raise


class _Part:
    """A file of lines and its map, under temporary names until `commit`."""

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
        """Note where the line comes from that is to follow."""
        with disk_errors(self.targets[1]):
            self._map.stream.write(f"{source}\t{number}\n".encode())

    def finish(self) -> None:
        """Bring both files to the disk."""
        for file in (self._lines, self._map):
            with disk_errors(file.path):
                file.finish()

    def commit(self) -> None:
        """Give both their names."""
        for file in (self._lines, self._map):
            with disk_errors(file.path):
                file.commit()

    def close(self) -> None:
        """Remove what is not committed."""
        for file in (self._lines, self._map):
            file.close()


def _deal(
    files: Sequence[str], parts: Sequence[_Part], counts: Sequence[int], chance: random.Random
) -> None:
    """Deal the lines out; those that are left for each part are as likely as any others."""
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
    """Yield the lines that are not blank with their numbers, a very long one in pieces."""
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
    """Return the lines of train and of each further part."""
    # Shares are decimal: 0.29 of 100 lines is 29 of them, which binary numbers do not give.
    counts = [math.floor(Fraction(str(share)) * total) for share in shares]
    counts.insert(0, total - sum(counts))
    for name, count in zip(_NAMES, counts, strict=False):
        if not count:
            *shown, last = [f"{part} {one:,}" for part, one in zip(_NAMES, counts, strict=False)]
            raise DataError(
                f"`{name}` gets no line",
                why=f"of {counted(total, 'line')} the parts get {', '.join(shown)} and {last}",
                hint="give more lines, or other shares by `--test-percent`",
            )
    return counts


def _check_shares(shares: Sequence[float]) -> None:
    typed = " ".join(map(str, shares))
    if len(shares) not in {1, 2}:
        raise ConfigError(
            f"`--test-percent {typed}` has {len(shares)} numbers",
            why="the first is the share of dev, the second that of test",
        )
    if not all(0 < share < 1 for share in shares) or sum(shares) >= 1:
        raise ConfigError(
            f"`--test-percent {typed}` leaves no lines for one of the parts",
            why="each is a part of one, above 0, and together they are below 1",
            hint="five in a hundred is 0.05",
        )


def _line_files(inputs: Sequence[str]) -> list[str]:
    found = find_inputs(inputs)
    for file in found:
        if file.path == STDIN or not Path(file.path).is_file():
            raise DataError(
                f"`{file.path}` cannot be read twice",
                why="the lines are counted before they are dealt out",
                hint="write it to a file first",
            )
        if file.format != "jsonl":
            raise DataError(
                f"`{file.path}` does not hold JSON lines",
                why=f"it was found to be {file.format}",
                hint="one JSON object a line is wanted; `jq -c '.[]' FILE` makes that of an array",
            )
    return [file.path for file in found]


def _require_apart(files: Sequence[str]) -> None:
    seen: list[Path] = []
    for file in map(Path, files):
        if any(file.samefile(other) for other in seen):
            raise DataError(f"`{file}` is given twice", why="its lines would be there twice")
        seen.append(file)


def _require_unused(paths: Sequence[Path]) -> None:
    """Raise where files of an earlier split stand, were it of more parts than this one.

    Its test lines would stay beside a train file that has them too.
    """
    names = [name for path in paths for name in (path, Path(f"{path}.map"))]
    if there := [path for path in names if path.exists()]:
        raise DataError(
            f"`{there[0]}` is there already",
            why=f"{counted(len(there), 'file')} of an earlier split would be replaced, or stay and "
            "hold lines that other parts have too",
            hint="remove them, or give another `--output-dir`",
        )
