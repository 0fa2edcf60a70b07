"""Base of the tokenizers built from settings and files; special ids and spellings of any tokenizer.

BERT and T5 need more than the ids of text: special tokens, sentinels, and the pieces that continue
a word.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.errors import ConfigError, DataError
from lmcore.base.missing_path import missing_path_hint
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.contract.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "FileTokenizer",
    "SpecialIds",
    "added_around",
    "plain_batch",
    "plain_ids",
    "read_bounded",
    "refuse_surrogates",
    "special_ids",
    "spellings",
]


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the special tokens of a vocabulary; None if it does not have one.

    Attributes:
        cls: begin of a sequence or of a pair of sequences.
        sep: end of each sequence of a pair.
        pad: padding.
        mask: masked token.
        bos: begin of a text.
        eos: end of a text.
        unk: unknown token.
        sentinels: sentinel tokens (`--vocab-extra-ids`), in order.
    """

    cls: int | None = None
    sep: int | None = None
    pad: int | None = None
    mask: int | None = None
    bos: int | None = None
    eos: int | None = None
    unk: int | None = None
    sentinels: tuple[int, ...] = ()


class FileTokenizer(Tokenizer):
    """Tokenizer that is fully described by its settings and files.

    Attributes:
        settings: type and options, with absolute paths.
        special: ids of its special tokens.
        spellings: spelling of each id; empty for an id without a token.
        added: ids that it puts before each text, and after it.
    """

    settings: TokenizerSettings
    special: SpecialIds
    spellings: tuple[str, ...]
    added: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def __reduce__(self) -> tuple[Callable[[TokenizerSettings], Self], tuple[TokenizerSettings]]:
        """Pickle as the settings: a worker process builds the library's objects itself."""
        return type(self), (self.settings,)

    def describe(self) -> dict[str, str | int | None]:
        """Return the settings that differ from their defaults."""
        return self.settings.describe()

    def fingerprint(self) -> str:
        """Return a sha256 of the type, size, options that change ids, and file contents."""
        options = [
            self.settings.vocab_extra_ids,
            self.settings.add_special_tokens,
            self.settings.parse_special_tokens,
        ]
        identity = [self.name, self.vocab_size, self.eod, self.content_digests(), options]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def content_digests(self) -> list[str]:
        """Return the sha256 of each file."""
        return [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in self.files()]

    def special_tokens(self) -> set[int]:
        """Return the ids that are no text."""
        values = vars(self.special).values()
        single = {one for one in values if isinstance(one, int)}
        return single | set(self.special.sentinels)

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise `ValueError` if an id is outside the vocabulary."""
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"id {i} is outside the vocabulary of {self.vocab_size}")


def special_ids(tokenizer: Tokenizer) -> SpecialIds:
    """Return the special ids of any tokenizer.

    A plugin's type may have an attribute `special` with the same fields; else only its end of a
    document is known.
    """
    found = getattr(tokenizer, "special", None)
    return found if isinstance(found, SpecialIds) else SpecialIds(eos=tokenizer.eod)


def added_around(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that a tokenizer puts before each text, and after it."""
    return tokenizer.added if isinstance(tokenizer, FileTokenizer) else ((), ())


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text without the ids that the tokenizer puts around every text."""
    before, after = added_around(tokenizer)
    ids = list(tokenizer.encode(text))
    return ids[len(before) : len(ids) - len(after)]


def plain_batch(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return `plain_ids` of each text; many are encoded faster together."""
    before, after = added_around(tokenizer)
    encoded = tokenizer.encode_batch(list(texts))
    return [ids[len(before) : len(ids) - len(after)].tolist() for ids in encoded]


def spellings(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the spelling of each id; a piece that continues a word has its mark (`##`).

    Raises:
        ConfigError: the tokenizer type has no spellings.
    """
    found = getattr(tokenizer, "spellings", None)
    if not isinstance(found, tuple):
        raise ConfigError(
            f"tokenizer `{tokenizer.name}` does not provide the spelling of its ids",
            why="whole-word masking needs it to find where a word starts",
            hint="use `--tokenizer-type BertWordPieceLowerCase`",
        )
    return found


def refuse_surrogates(text: str) -> None:
    """Raise `UnicodeEncodeError` for a lone surrogate, which libraries would replace silently."""
    if not text.isascii():
        text.encode()


def read_bounded(path: str, limit: int, *, flag: str, may_be_empty: bool = False) -> bytes:
    """Return the content of a tokenizer's file.

    Args:
        path: the file.
        limit: largest valid size, in bytes.
        flag: option that named the file, for messages.
        may_be_empty: accept an empty file.

    Raises:
        DataError: missing, unreadable, empty, or too large.
    """
    try:
        content = read_bounded_file(path, limit)
    except OSError as error:
        raise DataError(
            f"cannot read `{path}`",
            why=error.strerror or str(error),
            hint=missing_path_hint(path, f"check `{flag}`"),
        ) from None
    if not content and not may_be_empty:
        raise DataError(f"`{path}` is empty", hint=f"check `{flag}`")
    return content
