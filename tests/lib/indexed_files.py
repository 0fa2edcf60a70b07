"""Indexed datasets with metadata, written for tests of the data tools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.metadata import DatasetMetadata, write_metadata
from lmcore.data.indexed.writer import IndexedDatasetWriter
from lmcore.data.tokenizer import ByteTokenizer


def write(
    prefix: Path,
    documents: Iterable[Sequence[Sequence[int]]],
    dtype: str = "uint16",
    dataset_impl: Any = "mmap",
) -> str:
    """Write a dataset from the sequences of each document; return its prefix."""
    with IndexedDatasetWriter(prefix, dtype, dataset_impl=dataset_impl) as writer:
        for document in documents:
            tokens = [token for sequence in document for token in sequence]
            writer.add_document(tokens, [len(sequence) for sequence in document])
    return str(prefix)


def describe(prefix: str, *, append_eod: bool = True, **changes: Any) -> None:
    """Write the metadata that `lmcore data prepare` would write, with *changes*."""
    dataset = IndexedDataset(prefix)
    counts = {
        "documents": dataset.document_count,
        "sequences": len(dataset),
        "tokens": dataset.tokens,
        "dtype": dataset.dtype.name,
    }
    metadata = DatasetMetadata.of(ByteTokenizer(), append_eod=append_eod, **{**counts, **changes})
    write_metadata(prefix, metadata)
