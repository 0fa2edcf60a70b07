"""MinHash signatures: their fraction of equal values estimates the Jaccard similarity of two texts.

Shingles are all runs of 5 characters.  The 100 values of a signature form 10 bands, and texts with
an equal band are a candidate pair: a pair of similarity 0.9 is found with a probability of
1 - (1 - 0.9**10)**10 = 98.6%, one of 0.5 with 1%.

Source: Broder 1997, On the resemblance and containment of documents; Leskovec, Rajaraman and
Ullman, Mining of massive datasets, section 3.4, for the bands (LSH).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lmcore.base.errors import ConfigError
from lmcore.data.native import builders

__all__ = ["MinHash", "jaccard", "shingle_set"]

# Shingles at a time: 100 functions of 128 shingles fit into a processor's L1 cache.
_CHUNK = 128
_MOST = np.uint32(0xFFFFFFFF)

Signatures = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class MinHash:
    """Family of hash functions, determined by its seed on every machine.

    Attributes:
        seed: seed of the functions.
        hashes: number of functions, the size of a signature.
        bands: number of bands of a signature; divides `hashes`.
        shingle: number of characters of a shingle.
    """

    seed: int = 1234
    hashes: int = 100
    bands: int = 10
    shingle: int = 5

    def __post_init__(self) -> None:
        if self.hashes % self.bands:
            raise ConfigError(
                f"`--bands {self.bands}` does not divide `--hashes {self.hashes}`",
                why="every band has the same number of hashes",
            )

    def __getstate__(self) -> tuple[int, ...]:
        return (self.seed, self.hashes, self.bands, self.shingle)

    def __setstate__(self, state: tuple[int, ...]) -> None:
        for name, value in zip(("seed", "hashes", "bands", "shingle"), state, strict=True):
            object.__setattr__(self, name, value)

    def signatures(self, texts: Sequence[str], *, native: bool = True) -> Signatures:
        """Return the minimum of each hash function over the shingles of each text.

        Args:
            texts: the texts; one shorter than a shingle is one shingle.
            native: use C++ if it is available; the result is the same.

        Returns:
            (texts, hashes).
        """
        if builders is None or not native:
            return np.stack([self._signature(text) for text in texts])
        characters = [text.encode("utf-32-le", "surrogatepass") for text in texts]
        factors, terms = self._functions
        return builders.minhash_signatures(
            np.frombuffer(b"".join(characters), np.uint32),
            np.cumsum([len(raw) // 4 for raw in characters], dtype=np.int64),
            self._shingle_factors,
            factors.ravel(),
            terms.ravel(),
        )

    def _signature(self, text: str) -> Signatures:
        values = _mixed(self._shingles(text))
        factors, terms = self._functions
        least = np.full((self.hashes, _CHUNK), _MOST)
        made = np.empty_like(least)
        whole = len(values) // _CHUNK * _CHUNK
        for start in range(0, whole, _CHUNK):
            np.multiply(factors, values[start : start + _CHUNK], out=made)
            made += terms
            np.minimum(least, made, out=least)
        rest = values[whole:]
        if len(rest):
            np.multiply(factors, rest, out=made[:, : len(rest)])
            made[:, : len(rest)] += terms
            np.minimum(least[:, : len(rest)], made[:, : len(rest)], out=least[:, : len(rest)])
        signature: Signatures = least.min(axis=1)
        return signature

    def band_keys(self, signatures: Signatures) -> npt.NDArray[np.uint64]:
        """Return a hash of each band's values and index: its LSH bucket.

        Args:
            signatures: (texts, hashes).

        Returns:
            (texts, bands).
        """
        rows = signatures.reshape(len(signatures), self.bands, -1).astype(np.uint64)
        places = np.arange(1, self.bands + 1, dtype=np.uint64)
        keys = np.broadcast_to(places, rows.shape[:2]).copy()
        for column in range(rows.shape[2]):
            keys ^= rows[:, :, column]
            keys *= np.uint64(0x9E3779B97F4A7C15)
            keys ^= keys >> np.uint64(29)
        return keys

    def _shingles(self, text: str) -> npt.NDArray[np.uint32]:
        characters = _characters(text, self.shingle)
        factors = self._shingle_factors
        count = len(characters) - self.shingle + 1
        values: npt.NDArray[np.uint32] = characters[:count] * factors[0]
        for at in range(1, self.shingle):
            values += characters[at : at + count] * factors[at]
        return values

    @cached_property
    def _functions(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        numbers = np.random.Generator(np.random.Philox(self.seed))
        factors = numbers.integers(0, 1 << 32, size=(self.hashes, 1), dtype=np.uint32)
        terms = numbers.integers(0, 1 << 32, size=(self.hashes, 1), dtype=np.uint32)
        return factors | np.uint32(1), terms

    @cached_property
    def _shingle_factors(self) -> npt.NDArray[np.uint32]:
        numbers = np.random.Generator(np.random.Philox([self.seed, 1]))
        factors = numbers.integers(0, 1 << 32, size=self.shingle, dtype=np.uint32)
        odd: npt.NDArray[np.uint32] = factors | np.uint32(1)
        return odd


def shingle_set(text: str, size: int) -> npt.NDArray[np.uint64]:
    """Return the distinct shingles of *text* as 64-bit hashes, sorted."""
    characters = _characters(text, size).astype(np.uint64)
    count = len(characters) - size + 1
    values = np.zeros(count, np.uint64)
    for at in range(size):
        values = (values + characters[at : at + count]) * np.uint64(0xD6E8FEB86659FD93)
        values ^= values >> np.uint64(32)
    return np.unique(values)


def jaccard(first: npt.NDArray[np.uint64], second: npt.NDArray[np.uint64]) -> float:
    """Return the Jaccard similarity of two sets, given as sorted arrays of distinct values."""
    shared = np.intersect1d(first, second, assume_unique=True).size
    return shared / (first.size + second.size - shared)


def _characters(text: str, size: int) -> npt.NDArray[np.uint32]:
    """Return the code points of *text*, padded with zeros to *size*."""
    characters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    if len(characters) < size:
        characters = np.pad(characters, (0, size - len(characters)))
    return characters


def _mixed(values: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Mix the bits of *values* in place: the finalizer of MurmurHash3."""
    values ^= values >> np.uint32(16)
    values *= np.uint32(0x85EBCA6B)
    values ^= values >> np.uint32(13)
    values *= np.uint32(0xC2B2AE35)
    values ^= values >> np.uint32(16)
    return values
