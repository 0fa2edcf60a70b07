"""Logging of the command line: text on stderr in one format, below WARNING from rank 0 only.

Modules use `logging.getLogger(__name__)` and never configure logging; `lmcore.cli.main` calls
`configure`.  Metrics are not logged: they go to `metrics.jsonl` and the progress line.
"""

from __future__ import annotations

import logging
import sys

from lmcore.base.errors import printable

__all__ = ["ALL_RANKS", "configure", "info_once", "warn_once"]

ALL_RANKS = {"all_ranks": True}
"""Argument *extra* of a warning that every rank logs: only rank 0 shows it."""

_warned: set[tuple[str, str]] = set()


class _RankFilter(logging.Filter):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        repeated = getattr(record, "all_ranks", False)
        return self.rank == 0 or (record.levelno >= logging.WARNING and not repeated)


class _Formatter(logging.Formatter):
    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.prefix = f"[rank {rank}] " if world_size > 1 and rank else ""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        text = printable(f"{self.prefix}{level}{record.getMessage()}")
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def configure(*, level: int = logging.INFO, rank: int = 0, world_size: int = 1) -> None:
    """Send records of the `lmcore` loggers to stderr; may be called again.

    Args:
        level: Lowest level shown on rank 0.
        rank: Rank of this process; ranks other than 0 show only warnings and errors.
        world_size: Number of processes; with several, the lines of ranks other than 0 begin with
            the rank.
    """
    root = logging.getLogger("lmcore")
    for handler in list(root.handlers):
        root.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_RankFilter(rank))
    handler.setFormatter(_Formatter(rank, world_size))
    root.addHandler(handler)
    root.setLevel(level)
    root.propagate = False


def warn_once(logger: logging.Logger, message: str, *args: object, all_ranks: bool = False) -> None:
    """Log a warning once for each logger, message and arguments.

    Args:
        logger: Logger of the module.
        message: Message with places for the arguments.
        *args: Arguments of the message.
        all_ranks: True if every rank logs it, so that only rank 0 shows it.
    """
    if _is_new(logger, message, *args):
        logger.warning(message, *args, extra=ALL_RANKS if all_ranks else None)


def info_once(logger: logging.Logger, message: str, *args: object) -> None:
    """Log a line once for each logger, message and arguments.

    Args:
        logger: Logger of the module.
        message: Message with places for the arguments.
        *args: Arguments of the message.
    """
    if _is_new(logger, message, *args):
        logger.info(message, *args)


def _is_new(logger: logging.Logger, message: str, *args: object) -> bool:
    key = (logger.name, message % args if args else message)
    if key in _warned:
        return False
    _warned.add(key)
    return True
