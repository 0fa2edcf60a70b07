"""Comparison of an encoder with the one that built an index of blocks or of chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError

if TYPE_CHECKING:
    from lmcore.retrieval.chunk_encoder import ChunkEncoder
    from lmcore.retrieval.chunk_index import ChunkIndex
    from lmcore.retrieval.encoder import TextEncoder
    from lmcore.retrieval.index import BlockIndex

__all__ = ["require_encoder"]


def require_encoder(index: BlockIndex | ChunkIndex, encoder: TextEncoder | ChunkEncoder) -> None:
    """Refuse an encoder that did not build an index.

    Raises:
        ConfigError: It is another, or its tokenizer is.
    """
    if (found := encoder.fingerprint()) != index.record.encoder:
        raise ConfigError(
            f"the index `{index.path}` was built by another encoder or tokenizer",
            why=f"it has the fingerprint {index.record.encoder[:16]} of both in "
            f"`{index.record.checkpoint}`; `{encoder.checkpoint}` has {found[:16]}",
            hint="give the encoder that it was built with, or build another index with this one",
        )
