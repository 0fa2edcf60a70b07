"""`lmcore data weights`: weights of datasets from their tokens and the epochs of their corpora.

A corpus of T_c tokens that is read E_c times has the share E_c T_c / sum(E T) of a run; a file of t
tokens has the fraction t / T_c of that.  Tokens are counted in the `.idx` alone, which is small
enough to copy from the host of the data.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from lmcore.base.errors import DataError, counted, suggestion
from lmcore.config.derived.data_source import without_ending
from lmcore.data.blend.file_list import DataFile, corpus_of, read_small_text
from lmcore.data.indexed.files import copies_among
from lmcore.data.indexed.idx_reader import read_index

__all__ = [
    "DatasetTokens",
    "Move",
    "count_tokens",
    "format_token_counts",
    "read_epochs",
    "read_token_counts",
    "rebase",
    "weigh",
]

_log = logging.getLogger(__name__)
_EPOCHS_SHAPE = "a line is `corpus epochs`, such as `wiki 3`"
_COUNTS_SHAPE = (
    "expected a list of objects with `data_prefix` and `total_num_tokens`, as "
    "`lmcore data weights --metadata-output` writes it"
)


@dataclass(frozen=True)
class DatasetTokens:
    """Number of tokens in a dataset.

    Attributes:
        data_prefix: Path of the dataset without `.bin` or `.idx`.
        total_num_tokens: Number of tokens.
    """

    data_prefix: str
    total_num_tokens: int


@dataclass(frozen=True)
class Move:
    """Old and new directory of datasets that were moved."""

    old: str
    new: str


def count_tokens(prefixes: Iterable[str]) -> list[DatasetTokens]:
    """Return the number of tokens in each dataset; only the `.idx` files are read, and checked.

    Args:
        prefixes: Paths of the datasets, with or without `.bin` or `.idx`.

    Raises:
        DataError: An `.idx` is missing or damaged, a dataset is given twice, or two have the same
            content.
    """
    counts = [
        DatasetTokens(prefix, read_index(f"{prefix}.idx").tokens)
        for prefix in map(without_ending, prefixes)
    ]
    _require_once(counts, "the datasets given")
    if (copies := copies_among(count.data_prefix for count in counts)) is not None:
        raise DataError(
            f"`{copies[0]}` and `{copies[1]}` have the same content",
            why="its tokens would count twice; `lmcore data repair --hyphens` leaves the dataset "
            "of the old name beside the new one",
            hint="move one of them to another directory, or name the others with `--datasets`; to "
            "read a corpus more often, give it more epochs",
        )
    return counts


def format_token_counts(counts: Sequence[DatasetTokens]) -> str:
    """Return counts as JSON for `read_token_counts`."""
    return json.dumps([vars(count) for count in counts], indent=1, ensure_ascii=False) + "\n"


def read_token_counts(path: str | Path) -> list[DatasetTokens]:
    """Return the datasets of a metadata file: a JSON list of `{data_prefix, total_num_tokens}`.

    Raises:
        DataError: The file cannot be read, or is not such a list.
    """
    try:
        records = json.loads(read_small_text(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"`{path}` is not JSON", why=str(error), hint=_COUNTS_SHAPE) from None
    if not isinstance(records, list) or not records:
        raise DataError(f"`{path}` is not a list of datasets", hint=_COUNTS_SHAPE)
    counts = []
    for number, record in enumerate(records):
        prefix = record.get("data_prefix") if isinstance(record, dict) else None
        tokens = record.get("total_num_tokens") if isinstance(record, dict) else None
        whole = isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 0
        if not isinstance(prefix, str) or not prefix or not whole:
            raise DataError(f"`{path}`: entry {number} is not a dataset", hint=_COUNTS_SHAPE)
        assert isinstance(tokens, int)
        counts.append(DatasetTokens(without_ending(prefix), tokens))
    _require_once(counts, f"`{path}`")
    return counts


def read_epochs(path: str | Path) -> dict[str, float]:
    """Return the epochs of each corpus, from lines of `corpus epochs` and `#` comments.

    Raises:
        DataError: The file cannot be read, or a line is invalid.
    """
    epochs: dict[str, float] = {}
    for number, line in enumerate(read_small_text(path).splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        location = f"`{path}` line {number}"
        if len(words) != 2:
            raise DataError(f"{location} has {counted(len(words), 'column')}", hint=_EPOCHS_SHAPE)
        if words[0] in epochs:
            raise DataError(f"{location}: the corpus `{words[0]}` is listed twice")
        try:
            value = float(words[1])
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise DataError(
                f"{location}: `{words[1]}` is not a number of epochs",
                why="epochs are at least 0; 0 leaves the corpus out",
                hint=_EPOCHS_SHAPE,
            )
        epochs[words[0]] = value
    if not epochs:
        raise DataError(f"`{path}` names no corpus", hint=_EPOCHS_SHAPE)
    return epochs


def rebase(counts: Sequence[DatasetTokens], moves: Sequence[Move]) -> list[DatasetTokens]:
    """Return the datasets with the paths of their new directories.

    Whole directories are compared: a move of `/data` does not affect `/data2`.  If several moves
    match a path, the longest directory is used.

    Args:
        counts: The datasets.
        moves: Directories that were moved.

    Raises:
        DataError: A move matches no dataset.
    """
    used = set()
    moved = []
    longest_first = sorted(moves, key=lambda move: -len(PurePath(move.old).parts))
    for count in counts:
        path = PurePath(count.data_prefix)
        for move in longest_first:
            if path != PurePath(move.old) and path.is_relative_to(move.old):
                used.add(move)
                path = PurePath(move.new) / path.relative_to(move.old)
                break
        moved.append(DatasetTokens(str(path), count.total_num_tokens) if moves else count)
    for move in moves:
        if move not in used:
            first = counts[0].data_prefix if counts else "none"
            raise DataError(
                f"no dataset is in `{move.old}`",
                why=f"the first dataset is `{first}`",
                hint="give `--rebase` the directory that the paths begin with, then the new one",
            )
    return moved


def weigh(
    counts: Sequence[DatasetTokens], epochs: Mapping[str, float] | None = None
) -> list[DataFile]:
    """Return the data file list of datasets; its weights sum to 1.

    Corpora are matched by their whole name.  Datasets without tokens, or of a corpus of 0 epochs,
    are left out with a warning.

    Args:
        counts: The datasets.
        epochs: Number of epochs of each corpus; None for one epoch of each.

    Raises:
        DataError: *epochs* lacks a corpus, or no dataset is left.
    """
    corpora = [corpus_of(count.data_prefix) for count in counts]
    times = dict.fromkeys(corpora, 1.0) if epochs is None else epochs
    _check_epochs(corpora, times)
    totals: dict[str, int] = {}
    for count, corpus in zip(counts, corpora, strict=True):
        totals[corpus] = totals.get(corpus, 0) + count.total_num_tokens
    everything = math.fsum(times[corpus] * tokens for corpus, tokens in totals.items())
    if not 0 < everything < math.inf:
        raise DataError(
            "no tokens to weigh" if everything == 0 else "the epochs are too large",
            why="every dataset is empty or of a corpus of 0 epochs" if everything == 0 else None,
        )
    files = []
    for count, corpus in zip(counts, corpora, strict=True):
        tokens = count.total_num_tokens
        share = times[corpus] * totals[corpus] / everything
        weight = share * (tokens / totals[corpus]) if tokens else 0.0
        if weight > 0:
            files.append(DataFile(weight, count.data_prefix, corpus))
        else:
            reason = f"the corpus `{corpus}` has 0 epochs" if tokens else "it has no tokens"
            _log.warning("left out `%s`: %s", count.data_prefix, reason)
    return files


def _check_epochs(corpora: Sequence[str], epochs: Mapping[str, float]) -> None:
    present = set(corpora)
    unknown = sorted(present - epochs.keys())
    if unknown:
        named = ", ".join(f"`{corpus}`" for corpus in unknown[:5])
        raise DataError(
            f"no epochs for the corpus {named}" + (" and others" if len(unknown) > 5 else ""),
            why="a corpus is the name of a file up to its first `-`, and is matched exactly",
            hint=f"add a line for it; {suggestion(unknown[0], epochs)}. If the corpus ends "
            "elsewhere in the names, see `lmcore data repair --hyphens`",
        )
    unused = sorted(epochs.keys() - present)
    if unused:
        _log.warning(
            "epochs are given for %s, but there is no dataset of it",
            ", ".join(f"`{corpus}`" for corpus in unused),
        )


def _require_once(counts: Sequence[DatasetTokens], location: str) -> None:
    seen = set()
    for count in counts:
        if count.data_prefix in seen:
            raise DataError(
                f"`{count.data_prefix}` appears twice in {location}",
                hint="give its corpus more epochs to read it more often",
            )
        seen.add(count.data_prefix)
