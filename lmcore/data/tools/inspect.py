"""`lmcore data inspect`: the contents of a dataset, and the consistency of its files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lmcore.base.errors import DataError, counted
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.idx_reader import Format, Index, read_index
from lmcore.data.indexed.metadata import DatasetMetadata, read_metadata
from lmcore.data.indexed.missing_eod import find_missing_eod
from lmcore.data.indexed.token_scan import TokenScan, document_bounds, scan_tokens
from lmcore.data.tokenizer import Tokenizer

__all__ = ["DecodedDocument", "InspectReport", "inspect", "read_documents"]

_CHUNK = 1 << 20


@dataclass(frozen=True)
class InspectReport:
    """Contents and problems of a dataset; most fields are None if the index is unreadable.

    Attributes:
        prefix: path without suffix.
        dataset_impl: format of the index: `mmap` or `cached` (also for `lazy`).
        documents: number of documents.
        sequences: number of sequences.
        tokens: number of tokens in the index.
        dtype: type of a stored token.
        bytes: size of `.bin` and `.idx` together, in bytes.
        mean_length: mean number of tokens of a sequence.
        max_length: number of tokens of the longest sequence.
        empty_sequences: number of sequences without tokens.
        empty_documents: number of documents without tokens.
        multimodal: True if each sequence has a mode.
        tokenizer: tokenizer type of the metadata.
        scan: statistics of the tokens, if they were read.
        blocks: number of blocks of `.bin` with a checksum; None if the metadata has none.
        verified: number of these blocks that were compared, as was all of `.idx`.
        problems: one sentence each; empty for a valid dataset.
    """

    prefix: str
    dataset_impl: Format | None = None
    documents: int | None = None
    sequences: int | None = None
    tokens: int | None = None
    dtype: str | None = None
    bytes: int = 0
    mean_length: float | None = None
    max_length: int | None = None
    empty_sequences: int | None = None
    empty_documents: int | None = None
    multimodal: bool | None = None
    tokenizer: str | None = None
    scan: TokenScan | None = None
    blocks: int | None = None
    verified: int = 0
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class DecodedDocument:
    """One document of a dataset.

    Attributes:
        number: index of the document, from 0.
        lengths: number of tokens of each of its sequences.
        tokens: its token ids.
        text: decoded text; None if the tokenizer is unknown.
    """

    number: int
    lengths: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str | None


def inspect(
    prefix: str | Path,
    *,
    scan: bool = False,
    eod: int | None = None,
    vocab_size: int | None = None,
    top: int = 10,
) -> InspectReport:
    """Describe a dataset, check every pointer of its index, and verify checksums.

    Args:
        prefix: path of the dataset without suffix.
        scan: read all tokens, and verify all blocks of `.bin` instead of a few.
        eod: end-of-document id; None: from the metadata.
        vocab_size: size of the vocabulary; None: from the metadata.
        top: number of most frequent ids in the scan.

    Raises:
        DataError: one of the two files is missing.  Anything else wrong is in `problems`.
    """
    paths = [Path(f"{prefix}{ending}") for ending in (".bin", ".idx")]
    dataset, index, problems = _open(prefix, paths)
    try:
        metadata = read_metadata(prefix)
    except DataError as error:
        metadata = None
        problems.append(error.what_and_why)
    if eod is None and metadata is not None:
        eod = metadata.eod
    checksums = None if metadata is None else metadata.checksums
    blocks, verified = None if checksums is None else checksums.blocks, 0
    if checksums is not None:
        numbers = list(range(checksums.blocks)) if scan else checksums.sample()
        verified = len(numbers)
        damage = (checksums.idx_problem(paths[1]), checksums.bin_problem(paths[0], numbers))
        problems += [problem for problem in damage if problem is not None]
    size = sum(path.stat().st_size for path in paths)
    kind = None if metadata is None else str(metadata.tokenizer.get("type"))
    if index is None:
        return InspectReport(
            str(prefix),
            bytes=size,
            tokenizer=kind,
            blocks=blocks,
            verified=verified,
            problems=tuple(problems),
        )
    found = None
    if dataset is None:
        problems += _uncounted(index, paths[0], eod)
    else:
        problems += [] if metadata is None else _differences(dataset, metadata)
        if scan:
            if vocab_size is None and metadata is not None:
                vocab_size = metadata.vocab_size
            found = scan_tokens(dataset, eod=eod, vocab_size=vocab_size, top=top)
            problems += _token_problems(found, index, metadata)
    sequences = len(index.sizes)
    return InspectReport(
        prefix=str(prefix),
        dataset_impl=index.format,
        documents=index.document_count,
        sequences=sequences,
        tokens=index.tokens,
        dtype=index.dtype.name,
        bytes=size,
        mean_length=index.tokens / sequences if sequences else 0.0,
        max_length=int(index.sizes.max()) if sequences else 0,
        empty_sequences=_empty_sequences(index),
        empty_documents=_empty_documents(index),
        multimodal=index.modes is not None,
        tokenizer=kind,
        scan=found,
        blocks=blocks,
        verified=verified,
        problems=tuple(problems),
    )


def read_documents(
    prefix: str | Path, numbers: Iterable[int], tokenizer: Tokenizer | None
) -> list[DecodedDocument]:
    """Return documents of a dataset, decoded if a tokenizer is given.

    Raises:
        DataError: the dataset is damaged or has no such document, or an id is outside the
            vocabulary.
    """
    dataset = IndexedDataset(prefix)
    documents = []
    for number in numbers:
        if not 0 <= number < dataset.document_count:
            raise DataError(
                f"`{prefix}` has no document {number}",
                why=f"documents are 0 to {dataset.document_count - 1}"
                if dataset.document_count
                else "it has no documents",
            )
        with dataset.reading(f"document {number}"):
            first, last = dataset.document_indices[number : number + 2].tolist()
            sizes, tokens = dataset.sizes[first:last].tolist(), dataset.document(number).tolist()
        documents.append(
            DecodedDocument(
                number,
                tuple(sizes),
                tuple(tokens),
                None if tokenizer is None else _decode(tokenizer, tokens, number),
            )
        )
    return documents


def _decode(tokenizer: Tokenizer, tokens: list[int], number: int) -> str:
    wrong = [token for token in tokens if not 0 <= token < tokenizer.vocab_size]
    if wrong:
        raise DataError(
            f"document {number} cannot be decoded",
            why=f"token {wrong[0]} is outside the {tokenizer.vocab_size} ids of `{tokenizer.name}`",
            hint="the data was prepared with another tokenizer",
        )
    return tokenizer.decode(tokens)


def _open(
    prefix: str | Path, paths: list[Path]
) -> tuple[IndexedDataset | None, Index | None, list[str]]:
    """Return the dataset if it is valid, the index if it is readable, and the problems."""
    try:
        dataset = IndexedDataset(prefix)
    except DataError as error:
        if not all(path.is_file() for path in paths):
            raise
        problems = [error.what_and_why]
    else:
        return dataset, dataset.index, []
    try:
        return None, read_index(paths[1]), problems
    except DataError:
        return None, None, problems


def _uncounted(index: Index, bin_path: Path, eod: int | None) -> list[str]:
    """Return the problem if the tokens missing in the index are the ends of documents."""
    end = find_missing_eod(index, bin_path, eod)
    if end is None:
        return []
    problem = (
        f"each of {counted(end.count, 'document')} is followed by token {end.token}, which the "
        "index does not count: all documents but the first are read at wrong offsets; "
        "fix it with `lmcore data repair`"
    )
    return [problem]


def _token_problems(scan: TokenScan, index: Index, metadata: DatasetMetadata | None) -> list[str]:
    problems = []
    if scan.outside:
        problems.append(
            f"{counted(scan.outside, 'token')} outside the ids of the tokenizer's vocabulary"
        )
    filled = index.document_count - _empty_documents(index)
    if metadata is not None and metadata.append_eod and scan.ended not in {None, filled}:
        problems.append(
            f"the metadata says that documents end with token {scan.eod}, "
            f"{scan.ended} of {filled} do"
        )
    return problems


def _empty_sequences(index: Index) -> int:
    return sum(
        int(np.count_nonzero(index.sizes[at : at + _CHUNK] == 0))
        for at in range(0, len(index.sizes), _CHUNK)
    )


def _empty_documents(index: Index) -> int:
    return sum(int(np.count_nonzero(np.diff(bounds) == 0)) for bounds in document_bounds(index))


def _differences(indexed: IndexedDataset, metadata: DatasetMetadata) -> list[str]:
    found = {
        "documents": indexed.document_count,
        "sequences": len(indexed),
        "tokens": indexed.tokens,
        "dtype": indexed.dtype.name,
    }
    return [
        f"the metadata says {name} {getattr(metadata, name)}, the dataset has {value}"
        for name, value in found.items()
        if getattr(metadata, name) != value
    ]
