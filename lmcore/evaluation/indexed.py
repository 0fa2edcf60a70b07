"""Indexed data sets as tasks: the loss of their documents, whose tokens are predicted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from lmcore.base.errors import DataError
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.metadata import read_metadata
from lmcore.data.tokenizer import Tokenizer
from lmcore.evaluation.task import Task, Tokens

__all__ = ["indexed_task", "require_tokenizer"]

logger = logging.getLogger(__name__)


def indexed_task(prefix: str) -> Task:
    """Return the task of an indexed data set.

    Args:
        prefix: Path of its files without `.bin` and `.idx`.

    Raises:
        DataError: A file is missing, truncated or inconsistent.
    """
    IndexedDataset(prefix)
    metrics = ("loss", "token_perplexity")
    return Task(prefix, "An indexed data set.", (), _documents, metrics, "you")


def _documents(path: Path) -> Iterator[Tokens]:
    dataset = IndexedDataset(path)
    for number in range(dataset.document_count):
        place = f"document {number} of `{path}`"
        with dataset.reading(place):
            yield Tokens(place, dataset.document(number))


def require_tokenizer(path: Path, tokenizer: Tokenizer) -> None:
    """Raise if a data set is surely of another tokenizer.

    Args:
        path: Path of its files without `.bin` and `.idx`.
        tokenizer: The model's tokenizer.

    Raises:
        DataError: Its metadata name another vocabulary.
    """
    metadata = read_metadata(path)
    if metadata is None or metadata.fingerprint == tokenizer.fingerprint():
        return
    made, given = metadata.tokenizer.get("type"), tokenizer.name
    if (metadata.vocab_size, metadata.eod) != (tokenizer.vocab_size, tokenizer.eod):
        raise DataError(
            f"`{path}` was not prepared with the model's tokenizer",
            why=f"it was prepared with {made} of {metadata.vocab_size} tokens, the model has "
            f"{given} of {tokenizer.vocab_size}",
            hint="prepare the text again with the tokenizer of the model",
        )
    logger.warning(
        "`%s` was prepared with other files of a tokenizer (%s) than the model's (%s)",
        path,
        made,
        given,
    )
