"""GPT-2's byte-level BPE from `vocab.json` and `merges.txt`.

A regular expression splits a text into words, and the ids of each word come from a cache; only
words that are not cached run through BPE.  Most words of a text repeat, so that this is several
times faster than the pipeline of a library, which makes offsets and strings for every token.  The
C++ extension (`native.py`) does all of it, if it was built; else the code here does, with the
merges of the `tokenizers` package or of `python_bpe`.  All three give the same ids; see
docs/explanation/tokenizer-engines.md for the comparison.
Text that spells a special token is ordinary text, as in Megatron: a document cannot end itself.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Literal, assert_never

import numpy as np
import numpy.typing as npt

from lmcore.base.errors import ConfigError, MissingPackageError
from lmcore.contract.tokenizer import Tokenizer
from lmcore.data.gpt2_preload import END, MAX_BYTES, BpeContents, BpePreload
from lmcore.data.native import reason as native_reason
from lmcore.data.tokenizer.bpe_files import (
    Merge,
    byte_alphabet,
    read_merges,
    read_vocabulary,
    require_match,
)
from lmcore.data.tokenizer.file_tokenizer import read_bounded
from lmcore.data.tokenizer.native import (
    BlockTokens,
    NativeEncoder,
    native_bpe,
)
from lmcore.data.tokenizer.word_cache import WordCache

__all__ = ["Engine", "GPT2BPETokenizer", "python_bpe", "split_words"]

Engine = Literal["auto", "native", "tokenizers", "python"]
WordEncoder = Callable[[str], Sequence[int]]

# On ASCII text.  re.ASCII: `\s` must not match 0x1c-0x1f, which GPT-2's does not match.  The
# possessive forms match the same, since nothing follows that could backtrack.
_ASCII_PATTERN = r"'(?:[sdmt]|ll|re|ve)| ?[A-Za-z]++| ?[0-9]++| ?[^\sA-Za-z0-9]++|\s+(?!\S)|\s+"
_PATTERN = r"'(?:[sdmt]|ll|re|ve)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s+(?!\S)|\s+"


def split_words(text: str) -> list[str]:
    """Return the words of *text* by GPT-2's pattern; their concatenation is *text*."""
    return _words(ascii_only=text.isascii())(text)


@functools.cache
def _words(*, ascii_only: bool) -> Callable[[str], list[str]]:
    """Return the function that splits a text; compiled on demand, since C++ does not need it."""
    if ascii_only:
        return re.compile(_ASCII_PATTERN, re.ASCII).findall
    import regex

    return regex.compile(_PATTERN).findall


class GPT2BPETokenizer(Tokenizer):
    """Byte-level BPE tokenizer with GPT-2's word pattern.

    Args:
        vocab_file: `vocab.json`, token to id.
        merge_file: `merges.txt`, merge rules by priority.
        engine: `native`, `tokenizers`, `python`, or `auto` for the first one available; the ids are
            the same.
        preload: reader of the two files, if one was started.

    Raises:
        DataError: a file that is missing or broken, or two that do not belong together.
        ConfigError: `native` was requested and not built.
        MissingPackageError: `tokenizers` was requested and is not installed.
    """

    name = "GPT2BPETokenizer"

    def __init__(
        self,
        vocab_file: str,
        merge_file: str,
        *,
        engine: Engine = "auto",
        preload: BpePreload | None = None,
    ) -> None:
        # Absolute: metadata and workers find them from any directory.
        self.vocab_file, self.merge_file = (
            str(Path(file).absolute()) for file in (vocab_file, merge_file)
        )
        self._requested: Engine = engine
        contents = preload.contents(vocab_file, merge_file) if preload is not None else None
        if contents is None:
            contents = BpeContents.of(
                read_bounded(vocab_file, MAX_BYTES, flag="--vocab-file"),
                # A vocabulary of bytes alone has no merges.
                read_bounded(merge_file, MAX_BYTES, flag="--merge-file", may_be_empty=True),
            )
        self._content = contents.vocabulary
        if contents.native is None or engine not in {"auto", "native"}:
            self._read_in_python(vocab_file, merge_file, contents.merges)
        else:
            library, vocab_size, eod = contents.native
            self.engine: Engine = "native"
            self._native: NativeEncoder | None = NativeEncoder(library)
            self.vocab_size: int = vocab_size
            self.eod: int | None = eod

    def _read_in_python(self, vocab_file: str, merge_file: str, merges: bytes) -> None:
        """Check the files, raise a problem, and build the encoder if C++ refused the files."""
        self._vocabulary = vocabulary = read_vocabulary(vocab_file, self._content)
        rules = read_merges(merge_file, merges)
        require_match(vocabulary, rules, vocab_file=vocab_file, merge_file=merge_file)
        self.vocab_size, self.eod = max(vocabulary.values()) + 1, vocabulary.get(END)
        self.engine = "native"
        self._native = _native(self._requested, vocabulary, rules.merges)
        if self._native is None:
            self.engine, encode_word = _engine(self._requested, vocabulary, rules.merges)
            self._ids_of_word = WordCache(encode_word)

    @functools.cached_property
    def _vocabulary(self) -> dict[str, int]:
        """Token to id; files that C++ read are parsed here when ids are decoded."""
        return read_vocabulary(self.vocab_file, self._content)

    def __reduce__(self) -> tuple[Callable[..., GPT2BPETokenizer], tuple[str, str, Engine]]:
        """Pickle as the paths of the files: caches and engines stay in their process."""
        return _rebuild, (self.vocab_file, self.merge_file, self._requested)

    @property
    def threads(self) -> bool:
        """True if `encode_block` is available and releases the interpreter's lock."""
        return self._native is not None

    def encode(self, text: str) -> list[int]:
        """Return the ids of *text*."""
        if self._native is not None:
            (found,) = self._native.encode_texts([text])
            ids: list[int] = found.tolist()
            return ids
        return list(chain.from_iterable(map(self._ids_of_word.__getitem__, split_words(text))))

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Return the ids of each text, as int32 arrays."""
        if self._native is not None:
            return self._native.encode_texts(texts)
        ids_of = self._ids_of_word.__getitem__
        return [
            np.fromiter(chain.from_iterable(map(ids_of, split_words(text))), dtype=np.int32)
            for text in texts
        ]

    def encode_block(
        self, block: bytes, keys: Sequence[str], end: int | None, dtype: np.dtype[np.integer]
    ) -> BlockTokens | None:
        """Return the tokens of a block of JSON lines; None if the engine is not `native`."""
        if self._native is None:
            return None
        return self._native.encode_block(block, keys, end, dtype)

    def encode_flat(
        self, texts: Sequence[str], *, threads: int
    ) -> tuple[list[npt.NDArray[np.int32]], npt.NDArray[np.int64]]:
        """Return the concatenated ids of all texts, one array per thread, and the lengths.

        Raises:
            ConfigError: the engine is not `native`.
        """
        if self._native is None:
            raise ConfigError(f"the engine `{self.engine}` does not run in threads")
        return self._native.encode_flat(texts, threads)

    @property
    def tokens_by_id(self) -> tuple[str, ...]:
        """Spelling of each id in the alphabet of the files; empty for an id without a token.

        It has no mark for a piece that continues a word, unlike `FileTokenizer.spellings`.
        """
        by_id = {i: token for token, i in self._vocabulary.items()}
        return tuple(by_id.get(i, "") for i in range(self.vocab_size))

    @functools.cached_property
    def _bytes_of_id(self) -> dict[int, bytes]:
        return _bytes_by_id(self._vocabulary)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of *ids*, special tokens as their spelling.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        try:
            return b"".join([self._bytes_of_id[i] for i in ids]).decode(errors="replace")
        except KeyError as error:
            raise ValueError(
                f"id {error.args[0]} is outside the vocabulary of {self.vocab_size}"
            ) from None

    def describe(self) -> dict[str, str | int | None]:
        """Return the type and the paths of its files."""
        return {"type": self.name, "vocab_file": self.vocab_file, "merge_file": self.merge_file}

    def files(self) -> tuple[str, ...]:
        """Return the paths of `vocab.json` and `merges.txt`."""
        return (self.vocab_file, self.merge_file)


def _rebuild(vocab_file: str, merge_file: str, engine: Engine) -> GPT2BPETokenizer:
    return GPT2BPETokenizer(vocab_file, merge_file, engine=engine)


def _bytes_by_id(vocabulary: dict[str, int]) -> dict[int, bytes]:
    byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}

    def bytes_of(token: str) -> bytes:
        try:
            return bytes([byte_of[character] for character in token])
        except KeyError:  # a special token outside the byte alphabet
            return token.encode()

    return {i: bytes_of(token) for token, i in vocabulary.items()}


def _native(
    requested: Engine, vocabulary: dict[str, int], merges: list[Merge]
) -> NativeEncoder | None:
    if requested not in {"auto", "native"}:
        return None
    native = native_bpe(vocabulary, merges)
    if native is None and requested == "native":
        raise ConfigError(
            "the engine `native` was not built",
            why=native_reason,
            hint="install a C++ compiler and reinstall lmcore, or use another engine",
        )
    return native


def _engine(
    requested: Engine, vocabulary: dict[str, int], merges: list[Merge]
) -> tuple[Engine, WordEncoder]:
    match requested:
        case "python":
            return "python", python_bpe(vocabulary, merges)
        case "tokenizers":
            return "tokenizers", _library_bpe(vocabulary, merges)
        case "auto" | "native":
            try:
                return "tokenizers", _library_bpe(vocabulary, merges)
            except MissingPackageError:
                return "python", python_bpe(vocabulary, merges)
        case _:
            assert_never(requested)


def _library_bpe(vocabulary: dict[str, int], merges: list[Merge]) -> WordEncoder:
    try:
        import tokenizers
    except ImportError:
        raise MissingPackageError(
            "tokenizers", needed_for="the engine `tokenizers`", install="pip install tokenizers"
        ) from None
    # No cache: each word comes here once.  The model alone: its pipeline takes half as long again.
    model = tokenizers.models.BPE(vocab=vocabulary, merges=merges, cache_capacity=0)
    character_of = dict(enumerate(byte_alphabet()))

    def encode_word(word: str) -> Sequence[int]:
        spelt = word.encode().decode("latin-1").translate(character_of)
        return tuple([token.id for token in model.tokenize(spelt)])

    return encode_word


def python_bpe(
    vocabulary: Mapping[str, int], merges: Sequence[Merge]
) -> Callable[[str], tuple[int, ...]]:
    """Return a function from a word to its token ids.

    It is the fallback engine and the reference of the tests.

    Source: Sennrich et al. 2016, on bytes as in GPT-2: take the adjacent pair with the highest
    priority, merge all its occurrences from the left, repeat.

    Args:
        vocabulary: token to id.
        merges: merge rules, highest priority first.
    """
    alphabet = byte_alphabet()
    rank = {merge: i for i, merge in enumerate(merges)}
    last = len(merges)

    def encode_word(word: str) -> tuple[int, ...]:
        parts = [alphabet[byte] for byte in word.encode()]
        while len(parts) > 1:
            best = min(pairwise(parts), key=lambda pair: rank.get(pair, last))
            if best not in rank:
                break
            parts = _merged(parts, best)
        return tuple(vocabulary[part] for part in parts)

    return encode_word


def _merged(parts: list[str], pair: Merge) -> list[str]:
    result: list[str] = []
    i = 0
    while i < len(parts):
        if i + 1 < len(parts) and (parts[i], parts[i + 1]) == pair:
            result.append(parts[i] + parts[i + 1])
            i += 2
        else:
            result.append(parts[i])
            i += 1
    return result
