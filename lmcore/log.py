"""Logging set-up for the command line: prose on stderr, one format, rank 0 only below WARNING.

Modules use `logging.getLogger(__name__)` and never configure anything; `lmcore.cli.main` calls
`configure` once.  Metrics are not log lines: they go to `metrics.jsonl` and the training line.
"""

from __future__ import annotations

import logging
import sys

__all__ = ["configure", "warn_once"]

_warned: set[tuple[str, str]] = set()


class _RankFilter(logging.Filter):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        return self.rank == 0 or record.levelno >= logging.WARNING


class _Formatter(logging.Formatter):
    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.prefix = f"[rank {rank}] " if world_size > 1 else ""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        text = f"{self.prefix}{level}{record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def configure(*, level: int = logging.INFO, rank: int = 0, world_size: int = 1) -> None:
    """Send records of the `lmcore` loggers to stderr; idempotent.

    Args:
        level: Lowest level shown, on rank 0.
        rank: This process; other ranks than 0 show warnings and errors only.
        world_size: Processes in the run; above 1, lines carry their rank.
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


def warn_once(logger: logging.Logger, message: str, *args: object) -> None:
    """Log a warning the first time this logger is given this message with these arguments."""
    key = (logger.name, message % args if args else message)
    if key not in _warned:
        _warned.add(key)
        logger.warning(message, *args)
