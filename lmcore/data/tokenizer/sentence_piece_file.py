"""Loading of a SentencePiece model, a protocol buffer, after a check that it is complete.

The library takes a file truncated between two pieces for a smaller vocabulary; a complete file has
the fields that follow the pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from lmcore.data.tokenizer.file_tokenizer import read_bounded
from lmcore.errors import DataError, MissingPackageError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Processor", "load_model"]

_MAX_BYTES = 256 * 1024 * 1024
_PIECES, _TRAINING, _NORMALIZATION = 1, 2, 3
_HINT = "`--tokenizer-model` is a SentencePiece `.model` file"


class Processor(Protocol):
    """Used part of the interface of `sentencepiece.SentencePieceProcessor`."""

    def encode(self, text: list[str], /, *, num_threads: int) -> list[list[int]]:
        """Return the ids of each text."""

    def decode(self, ids: list[int], /) -> str:
        """Return the text."""

    def get_piece_size(self) -> int:
        """Return the size of the vocabulary."""

    def id_to_piece(self, i: int, /) -> str:
        """Return the spelling of an id."""

    def pad_id(self) -> int:
        """Return an id, or -1 if there is none."""

    def bos_id(self) -> int:
        """Return an id, or -1 if there is none."""

    def eos_id(self) -> int:
        """Return an id, or -1 if there is none."""

    def unk_id(self) -> int:
        """Return an id."""


def load_model(path: str) -> Processor:
    """Load the model of a file.

    Raises:
        DataError: missing, damaged or truncated.
        MissingPackageError: `sentencepiece` is not installed.
    """
    content = read_bounded(path, _MAX_BYTES, flag="--tokenizer-model")
    try:
        parts = set(_top_level_fields(content))
    except (IndexError, ValueError) as error:
        raise DataError(
            f"`{path}` is not a SentencePiece model",
            why=str(error) if isinstance(error, ValueError) else "it ends inside a field",
            hint=_HINT,
        ) from None
    if not {_PIECES, _TRAINING, _NORMALIZATION} <= parts:
        raise DataError(
            f"`{path}` is not a complete SentencePiece model",
            why="the pieces or the training and normalization settings are missing: it may be "
            "truncated",
            hint=_HINT,
        )
    try:
        import sentencepiece
    except ImportError:
        raise MissingPackageError(
            "sentencepiece",
            needed_for="a SentencePiece model",
            install="pip install sentencepiece",
        ) from None
    try:
        processor: Processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    except (RuntimeError, ValueError) as error:
        raise DataError(
            f"`{path}` is not a SentencePiece model", why=str(error), hint=_HINT
        ) from None
    return processor


def _top_level_fields(content: bytes) -> Iterator[int]:
    """Yield the number of every field of a protocol buffer, in order."""
    i = 0
    while i < len(content):
        key, i = _varint(content, i)
        match key & 7:
            case 0:
                _, i = _varint(content, i)
            case 1:
                i += 8
            case 2:
                length, i = _varint(content, i)
                i += length
            case 5:
                i += 4
            case other:
                raise ValueError(f"byte {i} begins a field of the unknown kind {other}")
        if i > len(content):
            raise IndexError
        yield key >> 3


def _varint(content: bytes, i: int) -> tuple[int, int]:
    """Return the number at offset *i* and the offset after it."""
    value = shift = 0
    while True:
        byte = content[i]
        i += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, i
        shift += 7
        if shift > 63:
            raise ValueError(f"byte {i} is inside a number without an end")
