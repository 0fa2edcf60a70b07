"""`lmcore data repair`: names, indices and uncounted ends, mended in new files.

Nothing that exists is changed: what is repaired gets a name of its own, or is added where a file
was missing.  Tokens that need no change are linked, or copied where the disk cannot link.
"""

from __future__ import annotations

import errno
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from lmcore.data.indexed.copy import copy_bytes
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.files import disk_errors, file_changed, replacing
from lmcore.data.indexed.idx_reader import CACHED_MAGIC, TOKEN_DTYPES, Format, Index, read_index
from lmcore.data.indexed.idx_rebuild import RebuiltIndex
from lmcore.data.indexed.idx_writer import IndexContent, write_index
from lmcore.data.indexed.metadata import (
    DatasetMetadata,
    metadata_path,
    read_metadata,
    write_metadata,
)
from lmcore.data.indexed.missing_eod import IndexWithEod, find_missing_eod
from lmcore.errors import ConfigError, DataError, counted

__all__ = ["RepairReport", "RepairRequest", "hyphenated", "repair"]

_DTYPES = {dtype.name: dtype for dtype in TOKEN_DTYPES.values()}


@dataclass(frozen=True)
class RepairRequest:
    """What is to be repaired, and what is known of it.

    Attributes:
        prefix: The dataset's path, with or without endings.
        output_prefix: Path of the repaired one; None adds what is missing beside the original.
        hyphens: Whether `_` in the name becomes `-`.
        rebuild: Whether the index is made anew although it can be read.
        eod: Id that ends a document; None for the metadata's.
        dtype: Type of a stored token; None for the metadata's.
    """

    prefix: str
    output_prefix: str | None = None
    hyphens: bool = False
    rebuild: bool = False
    eod: int | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class RepairReport:
    """What was done.

    Attributes:
        prefix: Path of the repaired dataset.
        found: What was wrong, one sentence each; empty where nothing was.
        written: The files that are new.
        documents: Of the repaired dataset.
        tokens: Likewise.
        dtype: Type of a stored token.
        dataset_impl: Format of its index.
    """

    prefix: str
    found: tuple[str, ...]
    written: tuple[str, ...]
    documents: int
    tokens: int
    dtype: str
    dataset_impl: Format

    def to_json(self) -> dict[str, object]:
        """Return it as JSON values."""
        return asdict(self)


def repair(request: RepairRequest) -> RepairReport:
    """Mend a dataset, as far as what is right can be known.

    Raises:
        DataError: What is right cannot be known, and why; a file is there that would be replaced;
            the disk refuses.  Nothing is changed then.
        ConfigError: Options that do not go together.
    """
    prefix = _bare(request.prefix)
    bin_path, idx_path, found = _locate(prefix)
    target = _target(request, prefix)
    if target != prefix and request.hyphens and request.output_prefix is None:
        found.append(f"`{Path(prefix).name}` is `{Path(target).name}` now")
    metadata = read_metadata(prefix)
    with closing(_RepairedFiles(bin_path, idx_path)) as mended:
        mended.find(request, metadata, found, Path(f"{target}.idx"))
        written = _write(mended, target)
    dataset = IndexedDataset(target)
    if metadata is not None:
        right = _right_metadata(metadata, dataset, mended.end)
        written += _write_metadata(metadata, right, prefix, target, found)
    return RepairReport(
        target,
        tuple(found),
        tuple(map(str, written)),
        documents=dataset.document_count,
        tokens=dataset.tokens,
        dtype=dataset.dtype.name,
        dataset_impl=dataset.index.format,
    )


def hyphenated(prefix: str) -> str:
    """Return a path with `-` for every `_` of its last part, as corpora's names are divided."""
    path = Path(prefix)
    return str(path.with_name(path.name.replace("_", "-")))


def _bare(path: str) -> str:
    while path.endswith((".bin", ".idx")):
        path = path[:-4]
    return path


def _locate(prefix: str) -> tuple[Path, Path | None, list[str]]:
    """Return the two files whatever endings they have, and what is wrong with their names."""
    found: list[str] = []
    paths: list[Path | None] = []
    for endings in ((".bin", ".bin.bin", ".idx.bin"), (".idx", ".bin.idx", ".idx.idx")):
        there = [Path(f"{prefix}{ending}") for ending in endings]
        there = [path for path in there if path.is_file()]
        if len(there) > 1:
            raise DataError(
                f"`{there[0]}` and `{there[1]}` are both there",
                hint="move one of them away, so that it is clear which one is meant",
            )
        paths.append(there[0] if there else None)
        if there and there[0] != Path(f"{prefix}{endings[0]}"):
            found.append(f"`{there[0].name}` has one ending too many")
    bin_path, idx_path = paths
    if bin_path is None:
        raise DataError(
            f"no such file: `{prefix}.bin`", why="without its tokens nothing can be repaired"
        )
    return bin_path, idx_path, found


def _target(request: RepairRequest, prefix: str) -> str:
    if request.output_prefix is not None:
        if request.hyphens:
            raise ConfigError("`--hyphens` and `--output-prefix` exclude each other")
        return _bare(request.output_prefix)
    return hyphenated(prefix) if request.hyphens else prefix


class _RepairedFiles:
    """The content of the repaired files: the old index, or a new one.

    Attributes:
        content: What the new index says; None where the old one is right.
        dtype: Type of a stored token.
        format: Of the index.
        end: Token that was found to end every document; None where that was not looked for.
    """

    def __init__(self, bin_path: Path, idx_path: Path | None) -> None:
        self.bin_path, self.idx_path = bin_path, idx_path
        self.content: IndexContent | None = None
        self.dtype: np.dtype[np.integer] = np.dtype("u1")
        self.format: Format = "mmap"
        self.end: int | None = None
        self._rebuilt: RebuiltIndex | None = None

    def close(self) -> None:
        """Remove what was kept beside memory."""
        if self._rebuilt is not None:
            self._rebuilt.close()

    def find(
        self,
        request: RepairRequest,
        metadata: DatasetMetadata | None,
        found: list[str],
        target: Path,
    ) -> None:
        """Decide what the index should be, and add to *found* what is wrong with the old one.

        Raises:
            DataError: It cannot be known.
        """
        eod = request.eod
        if eod is None and metadata is not None:
            eod = metadata.eod
        index = self._old_index(found)
        if index is None or request.rebuild:
            known = index.dtype.name if index else metadata.dtype if metadata else None
            if index is not None:
                found.append("the index is made anew, as asked")
                if index.modes is not None:
                    found.append("the modes of its sequences are not kept")
            _require_free(target)  # before everything is read
            self._rebuild(eod, request.dtype or known, found, target)
            return
        self.dtype, self.format = index.dtype, index.format
        size = self.bin_path.stat().st_size
        if size == index.bin_bytes:
            return
        end = find_missing_eod(index, self.bin_path, eod)
        if end is None:
            raise _unexplained(index, self.bin_path, size, eod)
        found.append(
            f"token {end.token} stands after each of {counted(end.count, 'document')} and was not "
            "counted"
        )
        self.content, self.end = IndexWithEod(index, end), end.token

    def _old_index(self, found: list[str]) -> Index | None:
        if self.idx_path is None:
            found.append("the index is missing")
            return None
        try:
            return read_index(self.idx_path)
        except DataError as error:
            found.append(f"the index is damaged: {error.what}")
            return None

    def _old_format(self) -> Format:
        """Return the format that the old index's first bytes tell, damaged or not."""
        if self.idx_path is None:
            return "mmap"
        with self.idx_path.open("rb") as file:
            return "cached" if file.read(len(CACHED_MAGIC)) == CACHED_MAGIC else "mmap"

    def _rebuild(self, eod: int | None, dtype: str | None, found: list[str], target: Path) -> None:
        if eod is None or dtype is None:
            missing = [
                flag for flag, value in (("--eod", eod), ("--dtype", dtype)) if value is None
            ]
            raise DataError(
                f"an index for `{self.bin_path}` needs {' and '.join(f'`{m}`' for m in missing)}",
                why="the tokens alone do not say where documents end, or how many bytes a token "
                "has, and there is no metadata",
                hint="with GPT-2's vocabulary it is `--eod 50256 --dtype uint16`",
            )
        if dtype not in _DTYPES:
            raise DataError(f"`{dtype}` is no type of tokens", hint=f"one of {', '.join(_DTYPES)}")
        self.dtype, self.format = _DTYPES[dtype], self._old_format()
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        self._rebuilt = rebuilt = RebuiltIndex(self.bin_path, self.dtype, eod, target.parent)
        self.content = rebuilt
        found.append(
            f"each token {eod} was taken for the end of a document, and each document for one "
            "sequence"
        )
        if not rebuilt.unended:
            self.end = eod
        else:
            found.append(
                f"{counted(rebuilt.unended, 'token')} after the last end "
                f"{'is' if rebuilt.unended == 1 else 'are'} taken for a document"
            )


def _write(mended: _RepairedFiles, target: str) -> list[Path]:
    """Give the repaired files their names; return those that are new."""
    bin_path, idx_path = Path(f"{target}.bin"), Path(f"{target}.idx")
    keeps_index = mended.content is None and mended.idx_path == idx_path
    for path, keep in ((bin_path, mended.bin_path == bin_path), (idx_path, keeps_index)):
        if not keep:
            _require_free(path)
    written = []
    with disk_errors(bin_path):
        bin_path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if mended.bin_path != bin_path:
            _link(mended.bin_path, bin_path)
            written.append(bin_path)
        if mended.content is not None:
            _write_index(mended, idx_path)
            written.append(idx_path)
        elif mended.idx_path is not None and not keeps_index:
            _link(mended.idx_path, idx_path)
            written.append(idx_path)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise
    return written


def _require_free(path: Path) -> None:
    if path.exists():
        raise DataError(
            f"`{path}` is there already",
            why="a repair never replaces a file",
            hint="give another `--output-prefix`",
        )


def _write_index(mended: _RepairedFiles, path: Path) -> None:
    assert mended.content is not None
    with replacing(path) as file:
        write_index(file, mended.content, mended.dtype, mended.format)


def _link(source: Path, target: Path) -> None:
    """Give a file another name, or copy it where the file system has one name for a file only."""
    with disk_errors(target):
        try:
            target.hardlink_to(source.resolve())
        except OSError as error:
            if error.errno not in {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK}:
                raise
            _copy(source, target)


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as old, replacing(target) as new:
        size = source.stat().st_size
        if copy_bytes(old.fileno(), new.fileno(), 0, size) != size:
            raise file_changed(source)


def _right_metadata(
    metadata: DatasetMetadata, dataset: IndexedDataset, end: int | None
) -> DatasetMetadata:
    """Return the metadata of the repaired dataset, whose documents all end with *end*, if known."""
    ended = end is not None and end == metadata.eod
    return replace(
        metadata,
        append_eod=ended or metadata.append_eod,
        documents=dataset.document_count,
        sequences=len(dataset),
        tokens=dataset.tokens,
        dtype=dataset.dtype.name,
    )


def _write_metadata(
    metadata: DatasetMetadata, right: DatasetMetadata, prefix: str, target: str, found: list[str]
) -> list[Path]:
    """Write metadata that is right; beside the original it stays as it is."""
    path = metadata_path(target)
    if target == prefix:
        if replace(right, append_eod=metadata.append_eod) != metadata:
            found.append(f"`{path.name}` has other counts, and was left as it is")
        elif right != metadata:
            found.append(f"`{path.name}` says that no end was appended, and was left as it is")
        return []
    if path.exists():
        found.append(f"`{path.name}` is there already, and was left as it is")
        return []
    if right.append_eod and not metadata.append_eod:
        found.append(f"documents end with token {right.eod}, as `{path.name}` says now")
    write_metadata(target, right)
    return [path]


def _unexplained(index: Index, bin_path: Path, size: int, eod: int | None) -> DataError:
    what = f"`{bin_path}` cannot be repaired: the right sizes are not known"
    told = f"the index counts {index.bin_bytes} bytes of tokens, there are {size}"
    if size < index.bin_bytes:
        return DataError(
            what,
            why=f"{told}: the file is cut short",
            hint="copy it again; or give `--rebuild` with `--output-prefix`, which makes an index "
            "of the documents that are there",
        )
    reason = "the tokens that are too many do not stand after each document"
    if eod is not None:
        reason = f"token {eod} does not stand after each document"
    return DataError(
        what,
        why=f"{told}, and {reason}",
        hint="if documents end with a token, `--rebuild --eod ID` with `--output-prefix` finds "
        "them by it",
    )
