"""`lmcore data weights`: how much of each dataset a run should see, from its tokens and epochs.

A corpus C of T_c tokens that is to be seen E_c times has the share E_c T_c / sum(E T) of a run, and
a file of t tokens in it t / T_c of that.  Tokens are counted in the `.idx` alone, which is small
enough to be copied from where the data lies.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from lmcore.config.data_source import without_ending
from lmcore.data.blend.file_list import DataFile, corpus_of
from lmcore.data.indexed.idx_reader import read_index
from lmcore.errors import DataError, suggestion

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
_MAX_BYTES = 1 << 26
_EPOCHS_SHAPE = "a line is `corpus epochs`, such as `wiki 3`"
_COUNTS_SHAPE = (
    "expected a list of objects with `data_prefix` and `total_num_tokens`, as "
    "`lmcore data weights --metadata-output` writes it"
)


@dataclass(frozen=True)
class DatasetTokens:
    """How many tokens a dataset has.

    Attributes:
        data_prefix: Its path without ending.
        total_num_tokens: Its tokens.
    """

    data_prefix: str
    total_num_tokens: int


@dataclass(frozen=True)
class Move:
    """A directory that data was in, and the one that it is in now."""

    old: str
    new: str


def count_tokens(prefixes: Iterable[str]) -> list[DatasetTokens]:
    """Return the tokens of datasets; only their `.idx` are read, and checked.

    Raises:
        DataError: An `.idx` is missing or damaged, or a dataset is given twice.
    """
    counts = [
        DatasetTokens(prefix, read_index(f"{prefix}.idx").tokens)
        for prefix in map(without_ending, prefixes)
    ]
    _require_once(counts, "the data sets given")
    return counts


def format_token_counts(counts: Sequence[DatasetTokens]) -> str:
    """Return counts as the JSON that `read_token_counts` reads."""
    return json.dumps([one.__dict__ for one in counts], indent=1, ensure_ascii=False) + "\n"


def read_token_counts(path: str | Path) -> list[DatasetTokens]:
    """Return the datasets of a metadata file: a JSON list of `{data_prefix, total_num_tokens}`.

    Raises:
        DataError: It cannot be read, or is not such a list.
    """
    try:
        records = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"`{path}` is not JSON", why=str(error), hint=_COUNTS_SHAPE) from None
    if not isinstance(records, list) or not records:
        raise DataError(f"`{path}` is no list of data sets", hint=_COUNTS_SHAPE)
    counts = []
    for number, record in enumerate(records):
        prefix = record.get("data_prefix") if isinstance(record, dict) else None
        tokens = record.get("total_num_tokens") if isinstance(record, dict) else None
        whole = isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 0
        if not isinstance(prefix, str) or not prefix or not whole:
            raise DataError(f"`{path}`: entry {number} is no data set", hint=_COUNTS_SHAPE)
        assert isinstance(tokens, int)
        counts.append(DatasetTokens(without_ending(prefix), tokens))
    _require_once(counts, f"`{path}`")
    return counts


def read_epochs(path: str | Path) -> dict[str, float]:
    """Return how often each corpus is to be seen: lines of `corpus epochs`, `#` comments.

    Raises:
        DataError: It cannot be read, or a line is none (names it).
    """
    epochs: dict[str, float] = {}
    for number, line in enumerate(_read(path).splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"`{path}` line {number}"
        if len(words) != 2:
            raise DataError(f"{where} has {len(words)} columns", hint=_EPOCHS_SHAPE)
        if words[0] in epochs:
            raise DataError(f"{where}: the corpus `{words[0]}` is there twice")
        try:
            value = float(words[1])
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise DataError(
                f"{where}: `{words[1]}` is no number of epochs",
                why="epochs are 0, which leaves the corpus out, or more",
                hint=_EPOCHS_SHAPE,
            )
        epochs[words[0]] = value
    if not epochs:
        raise DataError(f"`{path}` names no corpus", hint=_EPOCHS_SHAPE)
    return epochs


def rebase(counts: Sequence[DatasetTokens], moves: Sequence[Move]) -> list[DatasetTokens]:
    """Return the datasets with the directories that they lie in now.

    Whole directories are compared: a move of `/data` does not touch `/data2`.  Of several moves
    that fit a path, that of the longest directory counts.

    Raises:
        DataError: A move fits no dataset.
    """
    used = set()
    moved = []
    longest_first = sorted(moves, key=lambda move: -len(PurePath(move.old).parts))
    for one in counts:
        path = PurePath(one.data_prefix)
        for move in longest_first:
            if path != PurePath(move.old) and path.is_relative_to(move.old):
                used.add(move)
                path = PurePath(move.new) / path.relative_to(move.old)
                break
        moved.append(DatasetTokens(str(path), one.total_num_tokens) if moves else one)
    for move in moves:
        if move not in used:
            first = counts[0].data_prefix if counts else "none"
            raise DataError(
                f"no data set lies in `{move.old}`",
                why=f"the first one is `{first}`",
                hint="give `--rebase` the directory that the paths begin with, then the new one",
            )
    return moved


def weigh(
    counts: Sequence[DatasetTokens], epochs: Mapping[str, float] | None = None
) -> list[DataFile]:
    """Return the data file list of datasets; its weights sum to 1.

    Corpora are matched by their whole name.  What has no tokens, or belongs to a corpus of 0
    epochs, is left out with a warning.

    Args:
        counts: The datasets.
        epochs: How often each corpus is to be seen; None for once each.

    Raises:
        DataError: A corpus has no epochs in the file, or nothing is left.
    """
    corpora = [corpus_of(one.data_prefix) for one in counts]
    times = dict.fromkeys(corpora, 1.0) if epochs is None else epochs
    _check_epochs(corpora, times)
    totals: dict[str, int] = {}
    for one, corpus in zip(counts, corpora, strict=True):
        totals[corpus] = totals.get(corpus, 0) + one.total_num_tokens
    everything = math.fsum(times[corpus] * tokens for corpus, tokens in totals.items())
    if not 0 < everything < math.inf:
        raise DataError(
            "no tokens to weigh" if everything == 0 else "the epochs are too large",
            why="every data set is empty, or of a corpus of 0 epochs" if everything == 0 else None,
        )
    files = []
    for one, corpus in zip(counts, corpora, strict=True):
        tokens = one.total_num_tokens
        share = times[corpus] * totals[corpus] / everything
        weight = share * (tokens / totals[corpus]) if tokens else 0.0
        if weight > 0:
            files.append(DataFile(weight, one.data_prefix, corpus))
        else:
            reason = f"the corpus `{corpus}` has 0 epochs" if tokens else "it has no tokens"
            _log.warning("left out `%s`: %s", one.data_prefix, reason)
    return files


def _check_epochs(corpora: Sequence[str], epochs: Mapping[str, float]) -> None:
    present = set(corpora)
    unknown = sorted(present - epochs.keys())
    if unknown:
        named = ", ".join(f"`{corpus}`" for corpus in unknown[:5])
        raise DataError(
            f"no epochs for the corpus {named}" + (" and others" if len(unknown) > 5 else ""),
            why="a corpus is the name of a file up to its first `-`, and is matched exactly",
            hint=f"add a line for it; {suggestion(unknown[0], epochs)}. If the names should be "
            "divided elsewhere, see `lmcore data repair --hyphens`",
        )
    unused = sorted(epochs.keys() - present)
    if unused:
        _log.warning(
            "epochs for %s, of which there is no data set",
            ", ".join(f"`{corpus}`" for corpus in unused),
        )


def _require_once(counts: Sequence[DatasetTokens], where: str) -> None:
    seen = set()
    for one in counts:
        if one.data_prefix in seen:
            raise DataError(
                f"`{one.data_prefix}` is there twice in {where}",
                hint="give its corpus more epochs to see it more often",
            )
        seen.add(one.data_prefix)


def _read(path: str | Path) -> str:
    try:
        with Path(path).open("rb") as stream:
            content = stream.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise DataError(f"`{path}` is larger than {_MAX_BYTES >> 20} MiB")
        return content.decode().removeprefix("\ufeff")
    except OSError as error:
        raise DataError(f"cannot read `{path}`", why=error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise DataError(f"`{path}` is not UTF-8 text") from None
