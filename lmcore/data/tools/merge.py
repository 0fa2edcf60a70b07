"""`lmcore data merge`: concatenation of indexed datasets, as if prepared at once."""

from __future__ import annotations

import filecmp
import logging
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from lmcore.base.errors import DataError, counted
from lmcore.config.derived.data_source import without_ending
from lmcore.data.existing_output import require_replaceable
from lmcore.data.indexed.checksums import DatasetChecksums
from lmcore.data.indexed.copy import DocumentRange, DocumentRanges, write_ranges
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.files import IndexedFiles, copies_among
from lmcore.data.indexed.idx_reader import Format
from lmcore.data.indexed.metadata import (
    DatasetMetadata,
    metadata_path,
    read_metadata,
    remove_metadata,
    verify_files,
    write_metadata,
)

__all__ = [
    "MergeInput",
    "MergeReport",
    "chosen_datasets",
    "find_datasets",
    "merge",
    "open_sources",
    "with_counts",
]

_log = logging.getLogger(__name__)

_COUNTS = {"documents", "sequences", "tokens", "dtype"}
# The paths of the tokenizer's files may differ; its fingerprint identifies it.
_MAY_DIFFER = {*_COUNTS, "tokenizer", "lmcore_version", "checksums", "input_files", "shuffle"}


@dataclass(frozen=True)
class MergeInput:
    """Input dataset, checked and closed again."""

    documents: DocumentRange
    dtype: str
    format: Format
    metadata: DatasetMetadata | None

    @property
    def prefix(self) -> str:
        """Path of the dataset without suffix."""
        return self.documents.prefix


@dataclass(frozen=True)
class MergeReport:
    """Merged dataset."""

    prefix: str
    datasets: int
    documents: int
    sequences: int
    tokens: int
    dtype: str
    dataset_impl: Format
    bytes: int
    seconds: float
    metadata: bool

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON values."""
        return asdict(self)


def find_datasets(directory: str | Path) -> list[str]:
    """Return the prefixes of all datasets in a directory, sorted by name.

    Raises:
        DataError: it is not a directory, or has no dataset.
    """
    try:
        found = sorted(
            str(path.with_suffix(""))
            for path in Path(directory).iterdir()
            if path.suffix == ".idx" and not _is_left_over(path)
        )
    except OSError as error:
        raise DataError(f"cannot read `{directory}`", why=error.strerror or str(error)) from error
    if not found:
        raise DataError(f"no dataset in `{directory}`", why="it has no `.idx` file")
    return found


def chosen_datasets(paths: Sequence[str], directory: str | None) -> list[str]:
    """Return the prefixes of *paths*, with or without suffix, or of all datasets in a directory.

    Raises:
        DataError: See `find_datasets`.
    """
    return list(map(without_ending, paths)) if directory is None else find_datasets(directory)


def _is_left_over(path: Path) -> bool:
    """Return True for an `X.bin.idx` that `lmcore data repair` left beside its copy `X.idx`."""
    right = path.with_suffix("").with_suffix(".idx")
    return (
        path.name.endswith(".bin.idx")
        and right.is_file()
        and filecmp.cmp(path, right, shallow=False)
    )


def merge(prefixes: Sequence[str], output_prefix: str, *, overwrite: bool = False) -> MergeReport:
    """Concatenate datasets, in order.

    The result is byte for byte what preparing all of the input at once gives.

    Args:
        prefixes: paths of the datasets without suffix.
        output_prefix: path of the new one without suffix.
        overwrite: replace an existing dataset of the same tokenizer.

    Raises:
        DataError: a dataset is missing, damaged, given twice, or differs from the first one in
            format, token type or vocabulary; or the file system refuses.  No output remains.
        ConfigError: the output exists and is not to be replaced.
    """
    start = time.perf_counter()
    sources = open_sources(prefixes, output_prefix)
    content = DocumentRanges([source.documents for source in sources])
    first = sources[0]
    made_by = first.metadata
    require_replaceable(
        [output_prefix],
        overwrite=overwrite,
        fingerprint=made_by.fingerprint if made_by else None,
        tokenizer=str(made_by.tokenizer.get("type")) if made_by else None,
    )
    with closing(IndexedFiles(output_prefix)) as files:
        write_ranges(files, content.ranges)
        files.finish(content, first.dtype, first.format)
        metadata = with_counts(sources, content, files)
        remove_metadata(output_prefix)
        files.commit()
    if metadata is not None:
        write_metadata(output_prefix, metadata)
    return MergeReport(
        prefix=output_prefix,
        datasets=len(sources),
        documents=content.documents,
        sequences=content.sequences,
        tokens=content.tokens,
        dtype=first.dtype,
        dataset_impl=first.format,
        bytes=sum(path.stat().st_size for path in (files.bin_path, files.idx_path)),
        seconds=time.perf_counter() - start,
        metadata=metadata is not None,
    )


def open_sources(prefixes: Sequence[str], output_prefix: str) -> list[MergeInput]:
    """Check that datasets are valid and compatible, and describe them.

    Raises:
        DataError: See `merge`.
    """
    if not prefixes:
        raise DataError("no dataset is given", hint="name datasets with `--datasets`")
    sources: list[MergeInput] = []
    seen: dict[tuple[int, int], str] = {}
    for prefix in prefixes:
        dataset = IndexedDataset(prefix)
        found = dataset.bin_path.stat()
        earlier = seen.setdefault((found.st_dev, found.st_ino), prefix)
        if len(seen) == len(sources):
            raise DataError(
                f"`{prefix}` is given twice"
                if prefix == earlier
                else f"`{prefix}` and `{earlier}` are the same data",
                why="its documents would be included twice",
                hint="to train on it more often, give it a larger weight",
            )
        metadata = read_metadata(prefix)
        _check_counts(dataset, metadata)
        verify_files(prefix, (0, 1))  # the output gets new checksums, which would hide damage
        source = MergeInput(
            DocumentRange.of(dataset), dataset.dtype.name, dataset.index.format, metadata
        )
        if sources:
            _check_alike(sources[0], source)
        sources.append(source)
    if (copies := copies_among(prefixes)) is not None:
        _log.warning("`%s` and `%s` have the same content, which is included twice", *copies)
    _check_modes(sources)
    _check_output(output_prefix, seen)
    _check_vocabularies(sources)
    return sources


def with_counts(
    sources: Sequence[MergeInput], content: DocumentRanges, files: IndexedFiles
) -> DatasetMetadata | None:
    """Return the metadata of a dataset made from *sources*; None if one of them has none.

    Args:
        sources: Datasets whose documents it has.
        content: Content of its index.
        files: Its finished files.
    """
    described = [source.metadata for source in sources if source.metadata is not None]
    if len(described) < len(sources):
        return None
    files_of = [metadata.input_files for metadata in described]
    alone = len(described) == 1
    return replace(
        described[0],
        input_files=None if None in files_of else sum(count or 0 for count in files_of),
        shuffle=described[0].shuffle if alone else None,
        documents=content.documents,
        sequences=content.sequences,
        tokens=content.tokens,
        checksums=DatasetChecksums.of_files(*files.finished_paths),
    )


def _check_counts(dataset: IndexedDataset, metadata: DatasetMetadata | None) -> None:
    if metadata is None:
        return
    found = (dataset.document_count, len(dataset), dataset.tokens, dataset.dtype.name)
    expected = (metadata.documents, metadata.sequences, metadata.tokens, metadata.dtype)
    if found != expected:
        raise DataError(
            f"`{metadata_path(dataset.prefix)}` does not match the dataset",
            why=f"it has {counted(metadata.documents, 'document')}, "
            f"{counted(metadata.sequences, 'sequence')}, {counted(metadata.tokens, 'token')} of "
            f"{metadata.dtype}; " + "the dataset has {:,}, {:,}, {:,} of {}".format(*found),
            hint="prepare the data again, or remove the metadata",
        )


def _check_alike(first: MergeInput, other: MergeInput) -> None:
    for name, one, two in (
        ("token type", first.dtype, other.dtype),
        ("format", first.format, other.format),
    ):
        if one != two:
            raise DataError(
                f"`{first.prefix}` and `{other.prefix}` differ in their {name}",
                why=f"`{one}` and `{two}`",
                hint="prepare all data with the same tokenizer"
                if name == "token type"
                else "prepare all data with the same `--dataset-impl`",
            )


def _check_modes(sources: Sequence[MergeInput]) -> None:
    kinds = {
        source.documents.multimodal: source for source in sources if source.documents.sequences
    }
    if len(kinds) > 1:
        raise DataError(
            f"`{kinds[True].prefix}` is multimodal and `{kinds[False].prefix}` is not",
            why="either all sequences of a dataset have a mode or none",
        )


def _check_vocabularies(sources: Sequence[MergeInput]) -> None:
    """Compare the vocabularies in the metadata; warn about missing metadata."""
    described = [source for source in sources if source.metadata is not None]
    for source in described[1:]:
        _check_vocabulary(described[0], source)
    if not described and len(sources) > 1:
        _log.warning(
            "the datasets have no metadata: their vocabularies cannot be compared, and the output "
            "gets no metadata"
        )
    elif 0 < len(described) < len(sources):
        missing = next(source for source in sources if source.metadata is None)
        _log.warning(
            "`%s` has no metadata: its vocabulary cannot be compared, and the output gets none",
            missing.prefix,
        )


def _check_vocabulary(first: MergeInput, other: MergeInput) -> None:
    one, two = first.metadata, other.metadata
    assert one is not None
    assert two is not None
    for field in fields(DatasetMetadata):
        mine, theirs = getattr(one, field.name), getattr(two, field.name)
        if field.name in _MAY_DIFFER or mine == theirs:
            continue
        vocabulary = field.name in {"fingerprint", "vocab_size"}
        raise DataError(
            f"`{first.prefix}` and `{other.prefix}` "
            + ("have different vocabularies" if vocabulary else f"differ in `{field.name}`"),
            why=f"their metadata has the {field.name} `{mine}` and `{theirs}`",
            hint="prepare all data with the same tokenizer and options",
        )


def _check_output(output_prefix: str, sources: dict[tuple[int, int], str]) -> None:
    path = Path(f"{output_prefix}.bin")
    if not path.exists():
        return
    found = path.stat()
    if (found.st_dev, found.st_ino) in sources:
        raise DataError(
            f"the output `{output_prefix}` is one of the input datasets",
            why="it would be replaced",
            hint="give another `--output-prefix`",
        )
