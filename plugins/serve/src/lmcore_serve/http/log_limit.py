"""Limits of the log: lines that anybody's requests can cause are few, whatever the requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["REPEATS", "REPEATS_PER_SECOND", "Allowance", "RepeatFilter", "limited_logs"]

_MOST_KINDS = 1000
_ALLOWED = "is_allowed_repeat"
REPEATS, REPEATS_PER_SECOND = 5, 0.1
"""Lines of the same message: at once, and after them in a second."""


class Allowance:
    """Number of lines that may be written: some at once, then some each second."""

    def __init__(self, at_once: int, per_second: float) -> None:
        """Begin with all of *at_once*."""
        self._most, self._per_second = float(at_once), per_second
        self._left, self._at = self._most, time.monotonic()
        self._omitted = 0

    def take(self) -> int | None:
        """Return the number of lines that were omitted before this one; None to omit it."""
        now = time.monotonic()
        self._left = min(self._most, self._left + (now - self._at) * self._per_second)
        self._at = now
        if self._left < 1:
            self._omitted += 1
            return None
        self._left -= 1
        omitted, self._omitted = self._omitted, 0
        return omitted


class RepeatFilter(logging.Filter):
    """Filter of records: of the same message five, then one each ten seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, str], Allowance] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False to omit a record."""
        # The filter of a logger and that of a handler may both see a record.
        if (known := getattr(record, _ALLOWED, None)) is not None:
            return bool(known)
        kind = (record.name, str(record.msg).partition("\n")[0][:200])
        if kind not in self._kinds and len(self._kinds) >= _MOST_KINDS:
            kind = ("", "")
        omitted = self._kinds.setdefault(kind, Allowance(REPEATS, REPEATS_PER_SECOND)).take()
        if omitted:
            record.msg = f"{record.getMessage()} ({omitted} more like it were not logged)"
            record.args = ()
        setattr(record, _ALLOWED, omitted is not None)
        return omitted is not None


@contextmanager
def limited_logs() -> Iterator[None]:
    """Limit the log of the server, and of the libraries that it uses, within the context."""
    found = RepeatFilter()
    # The filter of a logger sees its own records only; that of a handler those of modules, too.
    targets: list[logging.Filterer] = [
        *logging.getLogger("lmcore").handlers,
        *(logging.getLogger(name) for name in ("asyncio", "uvicorn.error")),
    ]
    for one in targets:
        one.addFilter(found)
    try:
        yield
    finally:
        for one in targets:
            one.removeFilter(found)
