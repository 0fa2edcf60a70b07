"""Cache of the token ids of words: most words of a text repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["WordCache"]

_WORDS = 1 << 17
_LENGTH = 64


class WordCache(dict[str, Sequence[int]]):
    """Bounded map from word to ids, in two generations: words in use survive.

    Args:
        encode: returns the ids of a word that is not cached; long words are not kept.
    """

    def __init__(self, encode: Callable[[str], Sequence[int]]) -> None:
        super().__init__()
        self._encode = encode
        self._older: dict[str, Sequence[int]] = {}

    def __missing__(self, word: str) -> Sequence[int]:
        ids = self._older.get(word)
        if ids is None:
            ids = self._encode(word)
            if len(word) > _LENGTH:
                return ids
        if len(self) >= _WORDS:
            self._older = dict(self)
            self.clear()
        self[word] = ids
        return ids
