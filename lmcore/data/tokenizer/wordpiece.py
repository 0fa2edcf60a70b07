"""BERT's WordPiece: `BertWordPieceLowerCase` and `BertWordPieceCase`.

`bert_pretokenizer` splits a text into words; the pieces of a word, longest match from the left,
come from a cache before the model of the `tokenizers` library.  The C++ extension (`native.py`)
does all of it, if it was built, with the same ids.  Text that spells a special token is ordinary
text: brackets are words.

The library's whole pipeline (`BertNormalizer`, `BertPreTokenizer`) is not used: on 9.9 MiB of web
pages, Wikipedia and plays it took 2.2 to 3.4 times the CPU time, and its ids differ from Megatron's
for a final sigma and for private-use characters.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import Literal

import numpy as np
import numpy.typing as npt

from lmcore.base.errors import DataError
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.data.tokenizer.bert_pretokenizer import character_page, word_splitter
from lmcore.data.tokenizer.file_tokenizer import (
    FileTokenizer,
    SpecialIds,
    read_bounded,
    refuse_surrogates,
)
from lmcore.data.tokenizer.native import BlockTokens, native_wordpiece
from lmcore.data.tokenizer.word_cache import WordCache

__all__ = ["BertWordPieceTokenizer"]

_MAX_BYTES = 256 * 1024 * 1024
_MAX_WORD = 200  # characters; a longer word is [UNK], as in Megatron (elsewhere the limit is 100)
_NEEDED = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_HINT = "for WordPiece `--vocab-file` is a `vocab.txt` with one token per line"


class BertWordPieceTokenizer(FileTokenizer):
    """WordPiece tokenizer with BERT's pre-tokenization.

    `[BOS]`, `[EOS]` and `<extra_id_0>` on follow the vocabulary, unless it has them; `[EOS]` ends a
    document.  Without `add_special_tokens` the first two do not, as in the original BERT.

    Args:
        settings: type, `vocab_file`, `vocab_extra_ids` and `add_special_tokens`.
        engine: `python`, or `auto` for C++ if it was built; the ids are the same.

    Raises:
        DataError: the file is missing, broken, or not a BERT vocabulary.
    """

    def __init__(
        self, settings: TokenizerSettings, *, engine: Literal["auto", "python"] = "auto"
    ) -> None:
        if settings.tokenizer_type is None or settings.vocab_file is None:
            raise TypeError("type and vocabulary must be given")
        self.settings = settings
        self.name = settings.tokenizer_type
        vocabulary = _read_vocabulary(settings.vocab_file)
        sentinels = [f"<extra_id_{i}>" for i in range(settings.vocab_extra_ids)]
        added = () if settings.add_special_tokens is False else ("[BOS]", "[EOS]")
        for token in (*added, *sentinels):
            vocabulary.setdefault(token, len(vocabulary))
        self.vocab_size: int = len(vocabulary)
        self.spellings = tuple(vocabulary)
        self.special = SpecialIds(
            cls=vocabulary["[CLS]"],
            sep=vocabulary["[SEP]"],
            pad=vocabulary["[PAD]"],
            mask=vocabulary["[MASK]"],
            bos=vocabulary.get("[BOS]"),
            eos=vocabulary.get("[EOS]"),
            unk=vocabulary["[UNK]"],
            sentinels=tuple(vocabulary[token] for token in sentinels),
        )
        self.eod: int | None = self.special.eos
        self._lower_case = self.name == "BertWordPieceLowerCase"
        self._native = None
        if engine == "auto":
            self._native = native_wordpiece(
                self.spellings,
                vocabulary["[UNK]"],
                page=partial(character_page, lower_case=self._lower_case),
                encode_left=self._encode_in_python,
            )

    @cached_property
    def _python_encoder(self) -> Callable[[str], list[int]]:
        """Encoder in Python, built on demand."""
        import tokenizers

        split = word_splitter(lower_case=self._lower_case)
        model = tokenizers.models.WordPiece(
            vocab={token: i for i, token in enumerate(self.spellings)},
            unk_token="[UNK]",
            max_input_chars_per_word=_MAX_WORD,
        )
        cache = WordCache(lambda word: tuple([t.id for t in model.tokenize(word)]))
        ids_of_word = cache.__getitem__

        def encode(text: str) -> list[int]:
            refuse_surrogates(text)
            return list(chain.from_iterable(map(ids_of_word, split(text))))

        return encode

    def _encode_in_python(self, text: str) -> list[int]:
        return self._python_encoder(text)

    @property
    def threads(self) -> bool:
        """True if `encode_block` is available and releases the interpreter's lock."""
        return self._native is not None

    def encode(self, text: str) -> list[int]:
        """Return the ids of *text*, without `[CLS]` and `[SEP]`."""
        if self._native is None:
            return self._encode_in_python(text)
        (found,) = self._native.encode_texts([text])
        ids: list[int] = found.tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Return the ids of each text, as int32 arrays."""
        if self._native is not None:
            return self._native.encode_texts(texts)
        return [np.array(self._encode_in_python(text), dtype=np.int32) for text in texts]

    def encode_block(
        self, block: bytes, keys: Sequence[str], end: int | None, dtype: np.dtype[np.integer]
    ) -> BlockTokens | None:
        """Return the tokens of a block of JSON lines; None without C++."""
        if self._native is None:
            return None
        return self._native.encode_block(block, keys, end, dtype)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the words of *ids*, separated by spaces, also before punctuation."""
        self.check_ids(ids)
        words: list[str] = []
        for i in ids:
            piece = self.spellings[i]
            if piece.startswith("##") and words:
                words[-1] += piece[2:]
            else:
                words.append(piece)
        return " ".join(words)

    def files(self) -> tuple[str, ...]:
        """Return the path of `vocab.txt`."""
        return (self.settings.vocab_file,) if self.settings.vocab_file else ()


def _read_vocabulary(path: str) -> dict[str, int]:
    """Return token to id of a `vocab.txt`: the line number from 0, for the stripped line."""
    content = read_bounded(path, _MAX_BYTES, flag="--vocab-file")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        number = content[: error.start].count(b"\n") + 1
        raise DataError(f"`{path}` line {number} is not UTF-8", hint=_HINT) from None
    vocabulary: dict[str, int] = {}
    for i, line in enumerate(io.StringIO(text, newline=None)):
        token = line.strip()
        if token in vocabulary:
            raise DataError(
                f"`{path}` line {i + 1}: the token `{token[:60]}` repeats line "
                f"{vocabulary[token] + 1}",
                why="the id of a token is the number of its line",
                hint=_HINT,
            )
        vocabulary[token] = i
    missing = [token for token in _NEEDED if token not in vocabulary]
    if missing:
        raise DataError(
            f"`{path}` has no token `{missing[0]}`",
            why=f"a BERT vocabulary has {', '.join(f'`{token}`' for token in _NEEDED)}",
            hint=_HINT,
        )
    return vocabulary
