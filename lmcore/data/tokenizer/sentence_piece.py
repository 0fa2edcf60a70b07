"""SentencePiece models: `SentencePieceTokenizer`, `GPTSentencePieceTokenizer`, `Llama2Tokenizer`.

The `sentencepiece` library encodes; the three types differ in the tokens that they add to its
vocabulary and to its ids, as Megatron's do.  A model, a protocol buffer, is checked to be
complete: the library takes a file truncated between two pieces for a smaller vocabulary; a complete
file has the fields that follow the pieces.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from lmcore.base.errors import DataError, MissingPackageError
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.data.tokenizer.file_tokenizer import (
    FileTokenizer,
    SpecialIds,
    read_bounded,
    refuse_surrogates,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["GPTSentencePieceTokenizer", "Llama2Tokenizer", "SentencePieceTokenizer"]

_MAX_BYTES = 256 * 1024 * 1024
_PIECES, _TRAINING, _NORMALIZATION = 1, 2, 3
_HINT = "`--tokenizer-model` is a SentencePiece `.model` file"


class _ModelTokenizer(FileTokenizer):
    """Base of the three types.

    Args:
        settings: type, `tokenizer_model`, and the options of the type.

    Raises:
        DataError: the model is missing or damaged.
        MissingPackageError: `sentencepiece` is not installed.
    """

    def __init__(self, settings: TokenizerSettings) -> None:
        if settings.tokenizer_type is None or settings.tokenizer_model is None:
            raise TypeError("type and model must be given")
        self.settings = settings
        self.name = settings.tokenizer_type
        self._model: _Processor = _load_model(settings.tokenizer_model)
        pieces = self._model.get_piece_size()
        self.spellings = tuple(map(self._model.id_to_piece, range(pieces)))
        self.special = SpecialIds(
            pad=_present(self._model.pad_id()),
            bos=_present(self._model.bos_id()),
            eos=_present(self._model.eos_id()),
            unk=_present(self._model.unk_id()),
        )
        self.vocab_size: int = pieces
        self.eod: int | None = self.special.eos

    def encode(self, text: str) -> list[int]:
        """Return the ids of *text*."""
        return self._encoded([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Return the ids of each text, as int32 arrays."""
        return [np.array(ids, dtype=np.int32) for ids in self._encoded(list(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of *ids*; the begin and end of a text add nothing."""
        self.check_ids(ids)
        return self._model.decode(list(ids))

    def files(self) -> tuple[str, ...]:
        """Return the path of the model."""
        return (self.settings.tokenizer_model,) if self.settings.tokenizer_model else ()

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        for text in texts:
            refuse_surrogates(text)
        # One thread: data preparation starts one process per core.
        return self._model.encode(texts, num_threads=1)


class GPTSentencePieceTokenizer(_ModelTokenizer):
    """Tokenizer with the ids of the model; its end-of-text id ends a document."""


class Llama2Tokenizer(_ModelTokenizer):
    """Tokenizer that adds the model's begin-of-text id, unless `add_special_tokens` is off."""

    def __init__(self, settings: TokenizerSettings) -> None:
        super().__init__(settings)
        if settings.add_special_tokens is not False and self.special.bos is not None:
            self.added = ((self.special.bos,), ())

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        return [[*self.added[0], *ids] for ids in super()._encoded(texts)]


class SentencePieceTokenizer(_ModelTokenizer):
    """Tokenizer for T5: with tokens for pairs, masks, the end of a document, and sentinels.

    After the model's pieces come `<CLS>`, `<SEP>`, `<EOD>`, `<MASK>`, then each of `<PAD>`,
    `<BOS>`, `<EOS>` that the model does not have, then `<extra_id_0>` on; a token that is a piece
    of the model keeps its id.
    """

    def __init__(self, settings: TokenizerSettings) -> None:
        super().__init__(settings)
        pieces = {piece: i for i, piece in enumerate(self.spellings)}
        added: dict[str, int] = {}

        def add(token: str) -> int:
            added[token] = pieces.setdefault(token, len(pieces))
            return added[token]

        def own(i: int | None, otherwise: str) -> int:
            return add(otherwise if i is None else self.spellings[i])

        known = self.special
        cls, sep, self.eod, mask = map(add, ("<CLS>", "<SEP>", "<EOD>", "<MASK>"))
        self.special = SpecialIds(
            cls=cls,
            sep=sep,
            mask=mask,
            pad=own(known.pad, "<PAD>"),
            bos=own(known.bos, "<BOS>"),
            eos=own(known.eos, "<EOS>"),
            unk=known.unk,
            sentinels=tuple(add(f"<extra_id_{i}>") for i in range(settings.vocab_extra_ids)),
        )
        self.spellings = tuple(pieces)
        self.vocab_size = len(pieces)
        self._spelling_of_id = {i: token for token, i in added.items()}
        self._id_of_spelling = added
        # Longest first: of two tokens with the same beginning the longer one matches.
        tokens = sorted(added, key=len, reverse=True)
        self._any_special = re.compile("|".join(map(re.escape, tokens)))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of *ids*, special tokens as their spelling between spaces."""
        self.check_ids(ids)
        parts: list[str] = []
        plain: list[int] = []
        for i in ids:
            if i in self._spelling_of_id:
                parts += [self._model.decode(plain), f" {self._spelling_of_id[i]} "]
                plain = []
            else:
                plain.append(i)
        return "".join([*parts, self._model.decode(plain)])

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        if not self.settings.parse_special_tokens:
            return super()._encoded(texts)
        return [self._parsed(text) for text in texts]

    def _parsed(self, text: str) -> list[int]:
        ids: list[int] = []
        start = 0
        for found in self._any_special.finditer(text):
            ids += super()._encoded([text[start : found.start()]])[0]
            ids.append(self._id_of_spelling[found.group()])
            start = found.end()
        return ids + super()._encoded([text[start:]])[0]


def _present(i: int) -> int | None:
    return i if i >= 0 else None


class _Processor(Protocol):
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


def _load_model(path: str) -> _Processor:
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
        processor: _Processor = sentencepiece.SentencePieceProcessor(model_proto=content)
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
