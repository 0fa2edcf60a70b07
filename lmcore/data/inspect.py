"""`lmcore data inspect`: what a dataset holds, and whether its files fit together."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lmcore.data.indexed import IndexedDataset
from lmcore.data.metadata import DatasetMetadata, read_metadata
from lmcore.errors import DataError

__all__ = ["InspectReport", "inspect"]


@dataclass(frozen=True)
class InspectReport:
    """What a dataset holds.

    Attributes:
        prefix: Its path without ending.
        documents: Number of documents; None, as the other counts, where the index is unreadable.
        sequences: Number of sequences.
        tokens: Number of tokens.
        dtype: Type of a stored token.
        bytes: Size of `.bin` and `.idx` together.
        mean_length: Tokens of a sequence.
        max_length: Likewise, of the longest.
        empty_sequences: Sequences without tokens.
        tokenizer: Type of the tokenizer, where the metadata says it.
        problems: What is wrong, one sentence each; empty for a sound dataset.
    """

    prefix: str
    documents: int | None
    sequences: int | None
    tokens: int | None
    dtype: str | None
    bytes: int
    mean_length: float | None
    max_length: int | None
    empty_sequences: int | None
    tokenizer: str | None
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """Return it as JSON values."""
        return asdict(self)


def inspect(prefix: str | Path) -> InspectReport:
    """Describe the dataset of a prefix; every pointer of its index is checked.

    Raises:
        DataError: One of the two files is missing.  Anything else that is wrong is in `problems`.
    """
    paths = [Path(f"{prefix}{ending}") for ending in (".bin", ".idx")]
    try:
        indexed = IndexedDataset(prefix)
    except DataError as error:
        if not all(path.is_file() for path in paths):
            raise
        indexed, problems = None, [_one_line(error)]
    else:
        problems = []
    try:
        metadata = read_metadata(prefix)
    except DataError as error:
        metadata = None
        problems.append(_one_line(error))
    size = sum(path.stat().st_size for path in paths)
    kind = None if metadata is None else str(metadata.tokenizer.get("type"))
    if indexed is None:
        return InspectReport(
            str(prefix), None, None, None, None, size, None, None, None, kind, tuple(problems)
        )
    if metadata is not None:
        problems += _differences(indexed, metadata)
    sequences = len(indexed)
    return InspectReport(
        prefix=str(prefix),
        documents=indexed.document_count,
        sequences=sequences,
        tokens=indexed.tokens,
        dtype=indexed.dtype.name,
        bytes=size,
        mean_length=indexed.tokens / sequences if sequences else 0.0,
        max_length=int(indexed.sizes.max()) if sequences else 0,
        empty_sequences=int(np.count_nonzero(indexed.sizes == 0)),
        tokenizer=kind,
        problems=tuple(problems),
    )


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
