"""What the built-in types that are made from settings share, and what models ask of them.

BERT and T5 need more of a tokenizer than ids of text: the ids of its special tokens, its
sentinels, and which pieces continue a word.  `special_ids` and `spellings` answer for any type.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.config.tokenizer import TokenizerSettings
from lmcore.data.tokenizer.base import Tokenizer
from lmcore.errors import ConfigError, DataError

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "FileTokenizer",
    "SpecialIds",
    "read_bounded",
    "refuse_surrogates",
    "special_ids",
    "spellings",
]


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the special tokens of a vocabulary; None: it has none.

    Attributes:
        cls: Begins a pair of sentences.
        sep: Ends each of the two.
        pad: Fills up a batch.
        mask: Stands for a token to be found out.
        bos: Begins a text.
        eos: Ends a text.
        unk: Stands for what the vocabulary cannot spell.
        sentinels: Those of `--vocab-extra-ids`, in order.
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
    """A tokenizer that its settings and their files describe whole.

    Attributes:
        settings: What it was built from; the paths are absolute.
        special: Its special tokens.
        spellings: The spelling of each id; empty where a vocabulary leaves an id out.
    """

    settings: TokenizerSettings
    special: SpecialIds
    spellings: tuple[str, ...]

    def __reduce__(self) -> tuple[Callable[[TokenizerSettings], Self], tuple[TokenizerSettings]]:
        """Pickle as the settings: what a library holds in memory stays in its process."""
        return type(self), (self.settings,)

    def describe(self) -> dict[str, str | int | None]:
        """Return the settings that were given."""
        return self.settings.describe()

    def fingerprint(self) -> str:
        """Return a hash of type, size, options that change ids, and file contents."""
        options = [
            self.settings.vocab_extra_ids,
            self.settings.add_special_tokens,
            self.settings.parse_special_tokens,
        ]
        identity = [self.name, self.vocab_size, self.eod, self.content_digests(), options]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def content_digests(self) -> list[str]:
        """Return a hash of each file's content."""
        return [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in self.files()]

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise `ValueError` where an id is outside the vocabulary."""
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"id {i} is outside the vocabulary of {self.vocab_size}")


def special_ids(tokenizer: Tokenizer) -> SpecialIds:
    """Return the special ids of any tokenizer; of a plugin's, the one that ends a document.

    A plugin's type may have an attribute `special` of the same fields.
    """
    found = getattr(tokenizer, "special", None)
    return found if isinstance(found, SpecialIds) else SpecialIds(eos=tokenizer.eod)


def spellings(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return how each id of the vocabulary is spelt; a piece that continues a word has its mark.

    Raises:
        ConfigError: The type does not say.
    """
    found = getattr(tokenizer, "spellings", None)
    if not isinstance(found, tuple):
        raise ConfigError(
            f"tokenizer `{tokenizer.name}` does not say how its ids are spelt",
            why="whole words are masked, and only the spelling tells where a word starts",
            hint="use `--tokenizer-type BertWordPieceLowerCase`",
        )
    return found


def refuse_surrogates(text: str) -> None:
    """Raise `UnicodeEncodeError` for half a surrogate pair, of which libraries make something."""
    if not text.isascii():
        text.encode()


def read_bounded(path: str, limit: int, *, flag: str, may_be_empty: bool = False) -> bytes:
    """Return the content of a tokenizer's file.

    Raises:
        DataError: It is missing, unreadable, empty where it may not be, or larger than *limit*
            bytes.
    """
    try:
        with Path(path).open("rb") as stream:
            content = stream.read(limit + 1)
    except OSError as error:
        raise DataError(
            f"cannot read `{path}`", why=error.strerror or str(error), hint=f"check `{flag}`"
        ) from None
    if len(content) > limit:
        raise DataError(
            f"`{path}` is no tokenizer", why=f"it has more than {limit:,} bytes, as none has"
        )
    if not content and not may_be_empty:
        raise DataError(f"`{path}` is empty", hint=f"check `{flag}`")
    return content
