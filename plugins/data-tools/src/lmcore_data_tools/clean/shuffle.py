"""Step `shuffle`: documents in random order, with a part of them in memory at a time.

Every document gets a random key of 64 bits and goes to one of 64 files by its first bits; the files
are sorted one after another, and one that is too large is partitioned again.  The order of
the keys decides, for any memory size.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from lmcore_data_tools.clean.corpus_step import StepContext, count_seen
from lmcore_data_tools.clean.document import Entry, EntryBatch
from lmcore_data_tools.clean.document_store import DocumentStore, Keyed
from lmcore_data_tools.clean.segment import Processed

__all__ = ["Shuffle"]

_BITS = 6
_KEY_BITS = 64
_HELD_BYTES = 256 << 20
_BATCH = 512


@dataclass(frozen=True)
class Shuffle:
    """Corpus step that shuffles; the order depends only on seed and number of documents.

    Attributes:
        seed: seed of the order.
        held_bytes: bytes of documents in memory at a time.
    """

    seed: int
    held_bytes: int = _HELD_BYTES
    key_maker: ClassVar[None] = None
    has_own_row: ClassVar[bool] = True

    def run(
        self, batches: Iterator[Processed], context: StepContext
    ) -> Generator[EntryBatch, None, None]:
        """See `CorpusStep`."""
        numbers = np.random.Generator(np.random.Philox(self.seed))

        def numbered() -> Iterator[list[Keyed]]:
            for batch in batches:
                count_seen(self, context, batch)
                count = len(batch.entries)
                keys = numbers.integers(0, 1 << _KEY_BITS, size=count, dtype=np.uint64)
                yield list(zip(batch.entries, keys.tolist(), strict=True))

        yield from self._sorted(numbered(), context.directory, _KEY_BITS)

    def _sorted(
        self, documents: Iterable[list[Keyed]], directory: Path, bits: int
    ) -> Generator[EntryBatch, None, None]:
        """Yield *documents* by key; the keys differ only in their last *bits* bits."""
        with ExitStack() as stack:
            parts: dict[int, DocumentStore] = {}
            shift = max(bits - _BITS, 0)
            for block in documents:
                split: dict[int, tuple[list[Entry], list[int]]] = {}
                for entry, key in block:
                    entries, keys = split.setdefault(key >> shift & 63, ([], []))
                    entries.append(entry)
                    keys.append(key)
                for number, (entries, keys) in split.items():
                    if number not in parts:
                        part = DocumentStore(directory / f"part-{bits:02}-{number:02}")
                        parts[number] = stack.enter_context(closing(part))
                    parts[number].append(entries, keys)
            for _, part in sorted(parts.items()):
                part.flush()
                if part.bytes > self.held_bytes and len(part) > 1 and shift:
                    blocks = (block for _, block in part.blocks())
                    yield from self._sorted(blocks, directory, shift)
                else:
                    yield from _in_memory(part)
                part.close()
                part.path.unlink()


def _in_memory(part: DocumentStore) -> Iterator[EntryBatch]:
    documents = [document for _, block in part.blocks() for document in block]
    documents.sort(key=lambda document: document[1])
    for start in range(0, len(documents), _BATCH):
        yield EntryBatch(tuple(entry for entry, _ in documents[start : start + _BATCH]))
