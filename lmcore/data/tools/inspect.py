"""`lmcore data inspect`: what a dataset holds, and whether its files fit together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.idx_reader import Format, Index, read_index
from lmcore.data.indexed.metadata import DatasetMetadata, read_metadata
from lmcore.data.indexed.missing_eod import find_missing_eod
from lmcore.data.indexed.token_scan import TokenScan, document_bounds, scan_tokens
from lmcore.data.tokenizer import Tokenizer
from lmcore.errors import DataError, counted

__all__ = ["DecodedDocument", "InspectReport", "inspect", "read_documents"]

_CHUNK = 1 << 20


@dataclass(frozen=True)
class InspectReport:
    """What a dataset holds.

    Attributes:
        prefix: Its path without ending.
        dataset_impl: The format of its index: `mmap`, or `cached`, which is also `lazy`; None, as
            most others, where the index is unreadable.
        documents: Number of documents.
        sequences: Number of sequences.
        tokens: Number of tokens that the index counts.
        dtype: Type of a stored token.
        bytes: Size of `.bin` and `.idx` together.
        mean_length: Tokens of a sequence.
        max_length: Likewise, of the longest.
        empty_sequences: Sequences without tokens.
        empty_documents: Documents without tokens.
        multimodal: Whether each sequence has a mode.
        tokenizer: Type of the tokenizer, where the metadata says it.
        scan: What the tokens are, where they were read.
        problems: What is wrong, one sentence each; empty for a sound dataset.
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
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return it as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class DecodedDocument:
    """One document of a dataset.

    Attributes:
        number: Which, from 0.
        lengths: Tokens of each of its sequences.
        tokens: Its ids.
        text: What they say; None where the tokenizer is not known.
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
    """Describe the dataset of a prefix; every pointer of its index is checked.

    Args:
        prefix: The dataset's path without ending.
        scan: Whether all tokens are read, too.
        eod: Id that ends a document; None for the metadata's.
        vocab_size: Number of ids that the tokenizer has; None for the metadata's.
        top: How many of the most frequent ids a scan tells.

    Raises:
        DataError: One of the two files is missing.  Anything else that is wrong is in `problems`.
    """
    paths = [Path(f"{prefix}{ending}") for ending in (".bin", ".idx")]
    dataset, index, problems = _open(prefix, paths)
    try:
        metadata = read_metadata(prefix)
    except DataError as error:
        metadata = None
        problems.append(_one_line(error))
    if eod is None and metadata is not None:
        eod = metadata.eod
    size = sum(path.stat().st_size for path in paths)
    kind = None if metadata is None else str(metadata.tokenizer.get("type"))
    if index is None:
        return InspectReport(str(prefix), bytes=size, tokenizer=kind, problems=tuple(problems))
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
        problems=tuple(problems),
    )


def read_documents(
    prefix: str | Path, numbers: Iterable[int], tokenizer: Tokenizer | None
) -> list[DecodedDocument]:
    """Return documents of a dataset, decoded where a tokenizer is given.

    Raises:
        DataError: The dataset is damaged or has no such document, or an id in it is none of the
            tokenizer's.
    """
    dataset = IndexedDataset(prefix)
    documents = []
    for number in numbers:
        if not 0 <= number < dataset.document_count:
            raise DataError(
                f"`{prefix}` has no document {number}",
                why=f"documents are 0 to {dataset.document_count - 1}"
                if dataset.document_count
                else "it has none at all",
            )
        first, last = dataset.document_indices[number : number + 2].tolist()
        tokens = dataset.document(number).tolist()
        documents.append(
            DecodedDocument(
                number,
                tuple(dataset.sizes[first:last].tolist()),
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
            why=f"token {wrong[0]} is none of the {tokenizer.vocab_size} ids of `{tokenizer.name}`",
            hint="the data was prepared with another tokenizer",
        )
    return tokenizer.decode(tokens)


def _open(
    prefix: str | Path, paths: list[Path]
) -> tuple[IndexedDataset | None, Index | None, list[str]]:
    """Return the dataset if it is sound, the index if that is, and what is wrong."""
    try:
        dataset = IndexedDataset(prefix)
    except DataError as error:
        if not all(path.is_file() for path in paths):
            raise
        problems = [_one_line(error)]
    else:
        return dataset, dataset.index, []
    try:
        return None, read_index(paths[1]), problems
    except DataError:
        return None, None, problems


def _uncounted(index: Index, bin_path: Path, eod: int | None) -> list[str]:
    """Explain tokens that the index does not count, if it is the ends of documents."""
    end = find_missing_eod(index, bin_path, eod)
    if end is None:
        return []
    told = (
        f"each of {counted(end.count, 'document')} is followed by token {end.token}, which the "
        "index does not count, so that all documents after the first are read from wrong places; "
        "`lmcore data repair` counts it"
    )
    return [told]


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


def _one_line(error: DataError) -> str:
    return f"{error.what}: {error.why}" if error.why else error.what


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
