"""`Tokenizer`: the interface for data preparation, training metadata and generation.

A plugin's tokenizer derives from `Tokenizer`; its factory is registered by the hook
`lmcore_add_tokenizers`.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Tokenizer", "TokenizerFactory", "file_digest"]


class Tokenizer(ABC):
    """Text to ids and back.

    `lmcore data prepare --workers N` sends a tokenizer to its worker processes, so that an
    instance must survive `pickle`.

    Attributes:
        name: The type, as given to `--tokenizer-type`.
        vocab_size: Number of real ids, before the model pads the vocabulary.
        eod: Id that ends a document, or None where the vocabulary has none.
        encodes_any_text: True if `encode` takes every text without lone surrogates; if not,
            data preparation tries each document alone, so that it can name the bad one.
    """

    name: str
    vocab_size: int
    eod: int | None
    encodes_any_text: bool = True

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of *text*; text that spells a special token is ordinary text.

        Raises:
            UnicodeEncodeError: *text* holds a lone surrogate.
            DataError: *text* is nothing that this type can encode.
        """

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Return the ids of each text, as int32 arrays."""
        return [np.asarray(self.encode(text), dtype=np.int32) for text in texts]

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of *ids*; bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: An id outside the vocabulary.
        """

    @abstractmethod
    def describe(self) -> dict[str, str | int | None]:
        """Return what rebuilds it: `type` and the arguments of `build_tokenizer`."""

    def files(self) -> tuple[str, ...]:
        """Return the files that define it, in a fixed order."""
        return ()

    def fingerprint(self) -> str:
        """Return a hash of type, size and file contents; the paths do not matter."""
        identity = [self.name, self.vocab_size, self.eod, [file_digest(f) for f in self.files()]]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


class TokenizerFactory(Protocol):
    """Function that a plugin registers: builds a tokenizer from the command line's options."""

    def __call__(
        self, *, vocab_file: str | None, merge_file: str | None, vocab_size: int | None
    ) -> Tokenizer:
        """Return the tokenizer; raise `ConfigError` where an option that it needs is None."""


def file_digest(path: str) -> str:
    """Return the sha256 of a file's contents, in hexadecimal."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
