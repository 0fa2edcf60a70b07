"""Byte tokenizer: one id per UTF-8 byte, without any files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lmcore.contract.tokenizer import Tokenizer

__all__ = ["ByteTokenizer"]

_EOD = 256


class ByteTokenizer(Tokenizer):
    """Tokenizer with the ids 0-255 for UTF-8 bytes and 256 for the end of a document."""

    name = "ByteTokenizer"
    vocab_size = 257
    eod = _EOD

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of *text*."""
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Return the UTF-8 bytes of each text, as int32 arrays."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of *ids*; the end of a document adds nothing."""
        for i in ids:
            if not 0 <= i <= _EOD:
                raise ValueError(f"id {i} is outside the vocabulary of {self.vocab_size}")
        return bytes(i for i in ids if i != _EOD).decode(errors="replace")

    def describe(self) -> dict[str, str | int | None]:
        """Return the type."""
        return {"type": self.name}
