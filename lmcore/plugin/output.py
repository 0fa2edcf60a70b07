"""Standard output while a plugin's code runs: what it prints goes to standard error.

Standard output has the result of a command, such as JSON or generated text.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

__all__ = ["stdout_to_stderr"]

_STDOUT, _STDERR = 1, 2


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what is printed within the context to standard error, by native code too."""
    with contextlib.redirect_stdout(sys.stderr):
        kept = _redirect()
        try:
            yield
        finally:
            if kept is not None:
                _flush_native()
                os.dup2(kept, _STDOUT)
                os.close(kept)


def _redirect() -> int | None:
    """Give standard error's file the number of standard output; return the file that had it.

    None if a file is closed: there is nothing to redirect then.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        _flush_native()
        sys.__stdout__.flush()  # type: ignore[union-attr]  # None has no `flush`
        kept = os.dup(_STDOUT)
        os.dup2(_STDERR, _STDOUT)
        return kept
    return None


def _flush_native() -> None:
    """Write what C functions have printed; code that calls them has most often loaded `ctypes`."""
    if "ctypes" in sys.modules:
        sys.modules["ctypes"].CDLL(None).fflush(None)
