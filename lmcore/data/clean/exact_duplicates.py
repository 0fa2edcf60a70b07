"""Step `exact`, and the end of `url`: of documents with one text or address keeps the first."""

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
from lmcore.data.clean.key_store import KeyStore
from lmcore.data.clean.segment import Processed
from lmcore.data.clean.union_find import UnionFind
from lmcore.data.clean.url import normalized

__all__ = ["Digest", "ExactDuplicates"]


@dataclass(frozen=True)
class Digest:
    """Makes of a document's text or address a digest of 128 bits."""

    of: Literal["text", "url"]

    def keys(self, documents: Sequence[Document]) -> npt.NDArray[np.uint64]:
        """Return two numbers for each document."""
        digests = b"".join(self._digest(document) for document in documents)
        return np.frombuffer(digests, "<u8").reshape(-1, 2)

    def _digest(self, document: Document) -> bytes:
        what = document.text if self.of == "text" else normalized(document.url)
        content = what.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(content, digest_size=16).digest()


@dataclass(frozen=True)
class ExactDuplicates:
    """Keeps the first document of each text, or of each address."""

    of: Literal["text", "url"] = "text"

    @property
    def key_maker(self) -> Digest:
        """See `CorpusStep`."""
        return Digest(self.of)

    @property
    def has_own_row(self) -> bool:
        """See `CorpusStep`; that of `url` counts for the rules, which come first."""
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
