"""Documents of random tokens for `--mock-data`, with which the speed of training can be tried.

They are an indexed dataset like any other, in the place of a run's prepared texts: a run reads,
divides and shuffles it as real data.  Its tokens follow from the seed and the tokenizer alone, so
that a run which continues anywhere has the same.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lmcore.base.errors import DataError
from lmcore.data.cache.build_lock import build_or_wait
from lmcore.data.indexed.dataset import token_dtype
from lmcore.data.indexed.metadata import commit, read_metadata
from lmcore.data.indexed.writer import IndexedDatasetWriter

if TYPE_CHECKING:
    from lmcore.contract.tokenizer import Tokenizer

__all__ = ["prepare_mock_data"]

_DOCUMENTS = 512
_LONGEST = 4096
"""Most tokens of a document, as Megatron's mock data has."""
_LONGEST_SENTENCE = 64


def prepare_mock_data(
    tokenizer: Tokenizer, directory: Path, *, seed: int, sentences: bool = False
) -> str:
    """Write random documents into *directory*, unless that was done before.

    512 documents have 1 to 4096 tokens each, and end with the end-of-document token if the
    tokenizer has one, which is nowhere else in them.  If several processes share the directory, one
    process does it and the other processes wait.

    Args:
        tokenizer: Tokenizer of the run; all of its tokens are as likely.
        directory: Directory of the dataset.
        seed: Seed of the run.
        sentences: True to divide the documents into sequences of 1 to 64 tokens.

    Returns:
        The prefix of the indexed dataset.

    Raises:
        DataError: The disk is full or not writable.
    """
    level = "sentence" if sentences else "document"
    prefix = str(directory / f"mock_data_{seed}_text_{level}")

    def find() -> str | None:
        try:
            made_with = read_metadata(prefix)
        except DataError:
            return None
        same = made_with is not None and made_with.fingerprint == tokenizer.fingerprint()
        complete = all(Path(prefix + ending).is_file() for ending in (".bin", ".idx"))
        return prefix if same and complete else None

    def make() -> None:
        # The stream of `RandomState` is the same in every version of numpy.
        random = np.random.RandomState(seed)
        writer = IndexedDatasetWriter(prefix, token_dtype(tokenizer.vocab_size))
        with closing(writer):
            for length in random.randint(1, _LONGEST + 1, size=_DOCUMENTS):
                tokens = _tokens(random, int(length), tokenizer)
                writer.add_document(tokens, _lengths(random, len(tokens)) if sentences else None)
            commit(writer, tokenizer, append_eod=tokenizer.eod is not None)

    try:
        directory.mkdir(parents=True, exist_ok=True)
        return build_or_wait(Path(f"{prefix}.lock"), find, make, what="mock data")
    except OSError as error:
        raise DataError(
            f"mock data cannot be written to `{directory}`",
            why=f"{error.strerror}: `{error.filename}`",
            hint="check the directory and its permissions",
        ) from error


def _tokens(
    random: np.random.RandomState, length: int, tokenizer: Tokenizer
) -> npt.NDArray[np.int64]:
    """Return the tokens of a document, the end of the document included."""
    size, eod = tokenizer.vocab_size, tokenizer.eod
    if eod is None:
        return random.randint(0, size, size=length, dtype=np.int64)
    tokens = random.randint(0, max(size - 1, 1), size=length, dtype=np.int64)
    tokens += tokens >= eod
    tokens[-1] = eod
    return tokens


def _lengths(random: np.random.RandomState, total: int) -> list[int]:
    """Return random lengths of sentences whose sum is *total*."""
    found = []
    while total:
        found.append(min(total, int(random.randint(1, _LONGEST_SENTENCE + 1))))
        total -= found[-1]
    return found
