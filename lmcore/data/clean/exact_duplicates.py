"""Step `exact`, and the second part of `url`: removal of repeated texts or URLs."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from lmcore.data.clean.corpus_step import StepContext, count_seen, keep_representatives
from lmcore.data.clean.document import Document, EntryBatch
from lmcore.data.clean.document_store import DocumentStore
from lmcore.data.clean.filter.url import normalized
from lmcore.data.clean.key_store import KeyStore
from lmcore.data.clean.segment import Processed
from lmcore.data.clean.union_find import UnionFind

__all__ = ["Digest", "ExactDuplicates"]


@dataclass(frozen=True)
class Digest:
    """Digest of 128 bits of a document's text or URL."""

    of: Literal["text", "url"]

    def keys(self, documents: Sequence[Document]) -> npt.NDArray[np.uint64]:
        """Return the digests, (documents, 2)."""
        digests = b"".join(self._digest(document) for document in documents)
        return np.frombuffer(digests, "<u8").reshape(-1, 2)

    def _digest(self, document: Document) -> bytes:
        value = document.text if self.of == "text" else normalized(document.url)
        content = value.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(content, digest_size=16).digest()


@dataclass(frozen=True)
class ExactDuplicates:
    """Corpus step that keeps the first document with each text or URL."""

    of: Literal["text", "url"] = "text"

    @property
    def key_maker(self) -> Digest:
        """See `CorpusStep`."""
        return Digest(self.of)

    @property
    def has_own_row(self) -> bool:
        """False for URLs, whose row belongs to the rules of the step `url`."""
        return self.of == "text"

    def run(
        self, batches: Iterator[Processed], context: StepContext
    ) -> Generator[EntryBatch, None, None]:
        """See `CorpusStep`."""
        store = KeyStore(context.directory, columns=2)
        with closing(DocumentStore(context.directory / "documents")) as documents:
            for batch in batches:
                count_seen(self, context, batch)
                if batch.keys is not None:
                    store.add(batch.keys, len(documents) + np.arange(len(batch.entries)))
                documents.append(batch.entries)
            documents.flush()
            clusters = UnionFind(context.directory / "union-find", len(documents))
            for positions, starts in store.buckets():
                clusters.union_rows(positions, starts)
            yield from keep_representatives(documents, clusters, context, "duplicate")
