"""Makes text that does not repeat from corpora that are small.

The corpora in hand are tens of megabytes; repeating them would fill every cache of words and make
all tokenizers look faster than they are.  Here each document has the lengths and the punctuation
of a real one while its words are newly drawn, by frequency, from the words of all corpora; one word
in fifty is replaced by one that nobody has written, two real words joined or one with a letter
exchanged: new words keep coming, as they do in web text.
"""

from __future__ import annotations

import bisect
import itertools
import random
import re
from collections import Counter

__all__ = ["unique_documents"]

_WORD = re.compile(r"[^\W\d_]+")
_NEW = 0.02
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def unique_documents(texts: list[str], size: int, *, seed: int = 1234) -> list[str]:
    """Return documents of *size* bytes or a little more: *texts* first, then texts of new words.

    The same arguments give the same documents.
    """
    documents: list[str] = []
    total = 0
    for text in texts:
        if total >= size:
            return documents
        documents.append(text)
        total += len(text.encode())
    counts = Counter(itertools.chain.from_iterable(_WORD.findall(text) for text in texts))
    words = list(counts)
    steps = list(itertools.accumulate(counts.values()))
    dice = random.Random(seed)
    pool: list[str] = []

    def draw(_: re.Match[str]) -> str:
        if not pool:
            pool.extend(
                words[bisect.bisect_right(steps, dice.random() * steps[-1])] for _ in range(4096)
            )
        word = pool.pop()
        if dice.random() < _NEW:
            return _unseen(word, words, dice)
        return word

    for text in itertools.cycle(texts):
        if total >= size:
            return documents
        made = _WORD.sub(draw, text)
        documents.append(made)
        total += len(made.encode())
    return documents


def _unseen(word: str, words: list[str], dice: random.Random) -> str:
    if dice.random() < 0.5:
        return word + dice.choice(words)
    at = dice.randrange(len(word))
    return word[:at] + dice.choice(_LETTERS) + word[at + 1 :]
