"""SIGTERM as an exception, for commands that write files."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

__all__ = ["clean_termination"]


@contextmanager
def clean_termination() -> Iterator[None]:
    """Let SIGTERM end the block as an exception does, so that no temporary file stays."""

    def end(number: int, _frame: object) -> NoReturn:
        raise SystemExit(128 + number)  # as a shell reports it

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
