"""`lmcore data repair`: names, indices and missing end tokens of a dataset, repaired in new files.

Existing files are not changed: the repaired dataset gets a new name, or missing files are added;
then only the checksum of the index in the metadata is replaced.  Unchanged tokens are hard-linked,
or copied if the file system cannot link.
"""

from __future__ import annotations

import errno
import filecmp
import shlex
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from lmcore.base.errors import ConfigError, DataError, counted
from lmcore.base.missing_path import missing_path_hint
from lmcore.data.existing_output import require_unused
from lmcore.data.indexed.checksums import DatasetChecksums
from lmcore.data.indexed.copy import copy_bytes
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.files import disk_errors, file_changed, replacing
from lmcore.data.indexed.idx_reader import CACHED_MAGIC, TOKEN_DTYPES, Format, Index, read_index
from lmcore.data.indexed.idx_writer import IndexContent, RebuiltIndex, write_index
from lmcore.data.indexed.metadata import (
    DatasetMetadata,
    metadata_path,
    read_metadata,
    write_metadata,
)
from lmcore.data.indexed.missing_eod import IndexWithEod, find_missing_eod

__all__ = ["RepairReport", "RepairRequest", "hyphenated", "repair"]

_DTYPES = {dtype.name: dtype for dtype in TOKEN_DTYPES.values()}


@dataclass(frozen=True)
class RepairRequest:
    """Dataset to repair, and known facts about it.

    Attributes:
        prefix: path of the dataset, with or without suffix.
        output_prefix: path of the repaired one; None: add missing files beside the original.
        hyphens: replace `_` in the name by `-`.
        rebuild: rebuild the index even if it is readable.
        eod: end-of-document id; None: from the metadata.
        dtype: type of a stored token; None: from the metadata.
    """

    prefix: str
    output_prefix: str | None = None
    hyphens: bool = False
    rebuild: bool = False
    eod: int | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class RepairReport:
    """Result of a repair.

    Attributes:
        prefix: path of the repaired dataset.
        found: problems, one sentence each; empty if there were none.
        written: paths of the new files.
        documents: number of documents of the repaired dataset.
        tokens: number of its tokens.
        dtype: type of a stored token.
        dataset_impl: format of its index.
    """

    prefix: str
    found: tuple[str, ...]
    written: tuple[str, ...]
    documents: int
    tokens: int
    dtype: str
    dataset_impl: Format

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON values."""
        return asdict(self)


def repair(request: RepairRequest) -> RepairReport:
    """Repair a dataset as far as its correct content can be determined.

    Raises:
        DataError: it cannot be determined; the file system refuses.  Nothing is changed then.
        ConfigError: options that exclude each other; a file would be replaced.
    """
    prefix = _bare(request.prefix)
    bin_path, idx_path, found = _locate(prefix)
    target = _target(request, prefix)
    if target != prefix and request.hyphens and request.output_prefix is None:
        found.append(f"`{Path(prefix).name}` is also named `{Path(target).name}`")
        if Path(prefix).name.count("_") > 1:
            found.append(
                f"its corpus is now `{Path(target).name.partition('-')[0]}`, the part before the "
                "first `-`: if it has another name, give `--output-prefix` in place of `--hyphens`"
            )
    metadata = read_metadata(prefix)
    with closing(_RepairedFiles(bin_path, idx_path)) as repaired:
        repaired.find(request, metadata, found, Path(f"{target}.idx"))
        written = _write(repaired, target)
    dataset = IndexedDataset(target)
    if metadata is not None:
        right = _right_metadata(metadata, dataset, repaired.end)
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
    """Return a path with `-` for each `_` in its last part, the separator after a corpus name."""
    path = Path(prefix)
    return str(path.with_name(path.name.replace("_", "-")))


def _bare(path: str) -> str:
    while path.endswith((".bin", ".idx")):
        path = path[:-4]
    return path


def _locate(prefix: str) -> tuple[Path, Path | None, list[str]]:
    """Return the two files, with any suffixes, and the problems with their names."""
    found: list[str] = []
    paths: list[Path | None] = []
    for endings in ((".bin", ".bin.bin", ".idx.bin"), (".idx", ".bin.idx", ".idx.idx")):
        candidates = [Path(f"{prefix}{ending}") for ending in endings]
        existing = [path for path in candidates if path.is_file()]
        if len(existing) == 2 and filecmp.cmp(existing[0], existing[1], shallow=False):
            existing.pop()  # an earlier repair wrote the other one from it
        if len(existing) > 1:
            raise DataError(
                f"both `{existing[0]}` and `{existing[1]}` exist",
                hint="move one of them away",
            )
        paths.append(existing[0] if existing else None)
        if existing and existing[0] != candidates[0]:
            found.append(f"`{existing[0].name}` has a duplicate suffix")
    bin_path, idx_path = paths
    if bin_path is None:
        raise DataError(
            f"no such file: `{prefix}.bin`",
            why="a dataset cannot be repaired without its tokens",
            hint="PREFIX is one dataset; for each of a directory: "
            f'`for one in {shlex.quote(prefix)}/*.bin; do lmcore data repair "$one"; done`'
            if Path(prefix).is_dir()
            else missing_path_hint(prefix, None, ending=".bin"),
        )
    return bin_path, idx_path, found


def _target(request: RepairRequest, prefix: str) -> str:
    if request.output_prefix is not None:
        if request.hyphens:
            raise ConfigError("`--hyphens` and `--output-prefix` exclude each other")
        return _bare(request.output_prefix)
    return hyphenated(prefix) if request.hyphens else prefix


class _RepairedFiles:
    """Contents of the repaired files: the old index, or a new one.

    Attributes:
        content: content of the new index; None if the old one is correct.
        dtype: type of a stored token.
        format: format of the index.
        end: token found at the end of every document; None if not searched.
    """

    def __init__(self, bin_path: Path, idx_path: Path | None) -> None:
        self.bin_path, self.idx_path = bin_path, idx_path
        self.content: IndexContent | None = None
        self.dtype: np.dtype[np.integer] = np.dtype("u1")
        self.format: Format = "mmap"
        self.end: int | None = None
        self._rebuilt: RebuiltIndex | None = None

    def close(self) -> None:
        """Remove temporary files."""
        if self._rebuilt is not None:
            self._rebuilt.close()

    def find(
        self,
        request: RepairRequest,
        metadata: DatasetMetadata | None,
        found: list[str],
        target: Path,
    ) -> None:
        """Determine the index, and add the problems of the old one to *found*.

        Raises:
            DataError: the index cannot be determined.
        """
        eod = request.eod
        if eod is None and metadata is not None:
            eod = metadata.eod
        index = self._old_index(found, metadata)
        if index is None or request.rebuild:
            known = index.dtype.name if index else metadata.dtype if metadata else None
            if index is not None:
                found.append("the index is rebuilt, as requested")
                if index.modes is not None:
                    found.append("the modes of its sequences are lost")
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
            f"token {end.token} follows each of {counted(end.count, 'document')}, uncounted"
        )
        self.content, self.end = IndexWithEod(index, end), end.token

    def _old_index(self, found: list[str], metadata: DatasetMetadata | None) -> Index | None:
        if self.idx_path is None:
            found.append("the index is missing")
            return None
        try:
            index = read_index(self.idx_path)
        except DataError as error:
            found.append(f"the index is damaged: {error.what}")
            return None
        checksums = None if metadata is None else metadata.checksums
        if checksums is None or checksums.bin_bytes != self.bin_path.stat().st_size:
            return index  # none, or checksums of another dataset
        numbers = range(checksums.blocks)
        problem = checksums.bin_problem(self.bin_path, numbers)
        if problem is not None:
            found.append(f"{problem}; these tokens cannot be repaired")
        problem = checksums.idx_problem(self.idx_path)
        if problem is None:
            return index
        found.append(f"the index is damaged: {problem}")
        return None

    def _old_format(self) -> Format:
        """Return the format of the old index, damaged or not, by its first bytes."""
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
                why="without metadata the end-of-document id or the token type is unknown",
                hint="for GPT-2's vocabulary use `--eod 50256 --dtype uint16`",
            )
        if dtype not in _DTYPES:
            raise DataError(f"`{dtype}` is not a token type", hint=f"one of {', '.join(_DTYPES)}")
        self.dtype, self.format = _DTYPES[dtype], self._old_format()
        with disk_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        self._rebuilt = rebuilt = RebuiltIndex(self.bin_path, self.dtype, eod, target.parent)
        self.content = rebuilt
        found.append(
            f"each token {eod} is taken as the end of a document, and each document as one sequence"
        )
        if not rebuilt.unended:
            self.end = eod
        else:
            found.append(
                f"{counted(rebuilt.unended, 'token')} after the last end "
                f"{'is' if rebuilt.unended == 1 else 'are'} taken as a document"
            )


def _write(repaired: _RepairedFiles, target: str) -> list[Path]:
    """Write or link the repaired files; return the paths of the new ones."""
    bin_path, idx_path = Path(f"{target}.bin"), Path(f"{target}.idx")
    keeps_index = repaired.content is None and repaired.idx_path == idx_path
    for path, keep in ((bin_path, repaired.bin_path == bin_path), (idx_path, keeps_index)):
        if not keep:
            _require_free(path)
    written = []
    with disk_errors(bin_path):
        bin_path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if repaired.bin_path != bin_path:
            _link(repaired.bin_path, bin_path)
            written.append(bin_path)
        if repaired.content is not None:
            _write_index(repaired, idx_path)
            written.append(idx_path)
        elif repaired.idx_path is not None and not keeps_index:
            _link(repaired.idx_path, idx_path)
            written.append(idx_path)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise
    return written


def _require_free(path: Path) -> None:
    require_unused([path], "--output-prefix", why="a repair never replaces a file")


def _write_index(repaired: _RepairedFiles, path: Path) -> None:
    assert repaired.content is not None
    with replacing(path) as file:
        write_index(file, repaired.content, repaired.dtype, repaired.format)


def _link(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it if the file system has no hard links."""
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
    """Return the metadata of the repaired dataset; *end* is the last token of its documents."""
    ended = end is not None and end == metadata.eod
    return replace(
        metadata,
        append_eod=ended or metadata.append_eod,
        documents=dataset.document_count,
        sequences=len(dataset),
        tokens=dataset.tokens,
        dtype=dataset.dtype.name,
        checksums=_right_checksums(metadata.checksums, dataset),
    )


def _right_checksums(
    recorded: DatasetChecksums | None, dataset: IndexedDataset
) -> DatasetChecksums:
    """Return the checksums of the repaired dataset; unchanged tokens keep the recorded ones."""
    if recorded is None or recorded.bin_bytes != dataset.bin_path.stat().st_size:
        return DatasetChecksums.of_files(dataset.bin_path, dataset.idx_path)
    return recorded.with_index(dataset.idx_path)


def _write_metadata(
    metadata: DatasetMetadata, right: DatasetMetadata, prefix: str, target: str, found: list[str]
) -> list[Path]:
    """Write the correct metadata, unless the file exists; return the paths of new files."""
    path = metadata_path(target)
    if target == prefix:
        if metadata.checksums is None:
            right = replace(right, checksums=None)
        elif right.checksums != metadata.checksums:
            metadata = replace(metadata, checksums=right.checksums)
            write_metadata(prefix, metadata)
            found.append(f"`{path.name}` got the checksum of the new index")
        if replace(right, append_eod=metadata.append_eod) != metadata:
            found.append(f"`{path.name}` has other counts, and was not changed")
        elif right != metadata:
            found.append(f"`{path.name}` has `append_eod: false`, and was not changed")
        return []
    if path.exists():
        found.append(f"`{path.name}` exists already, and was not changed")
        return []
    if right.append_eod and not metadata.append_eod:
        found.append(f"documents end with token {right.eod}: `{path.name}` has `append_eod: true`")
    write_metadata(target, right)
    return [path]


def _unexplained(index: Index, bin_path: Path, size: int, eod: int | None) -> DataError:
    what = f"`{bin_path}` cannot be repaired: the correct sizes are unknown"
    sizes = f"the index counts {counted(index.bin_bytes, 'byte')} of tokens, the file has {size:,}"
    if size < index.bin_bytes:
        return DataError(
            what,
            why=f"{sizes}: the file is truncated",
            hint="copy it again; or build an index of the remaining documents with `--rebuild` and "
            "`--output-prefix`",
        )
    reason = "the extra tokens are not the ends of the documents"
    if eod is not None:
        reason = f"token {eod} does not follow each document"
    return DataError(
        what,
        why=f"{sizes}, and {reason}",
        hint="if documents end with a token, find them with `--rebuild --eod ID --output-prefix "
        "PREFIX`",
    )
