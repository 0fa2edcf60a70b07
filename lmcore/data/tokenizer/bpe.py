"""Byte-pair encoding of one word in Python: the fallback engine and the reference of the tests.

Source: Sennrich et al. 2016, on bytes as in GPT-2: take the adjacent pair with the highest
priority, merge all its occurrences from the left, repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from lmcore.data.tokenizer.bpe_files import Merge, byte_alphabet

__all__ = ["python_bpe"]


def python_bpe(
    vocabulary: Mapping[str, int], merges: Sequence[Merge]
) -> Callable[[str], tuple[int, ...]]:
    """Return a function from a word to its token ids.

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
