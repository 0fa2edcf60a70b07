"""Classification of a device's errors by their messages, for plugins; torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["first_line", "hint_by_words"]


def hint_by_words(message: str, hints: Iterable[tuple[str, str]]) -> str:
    """Return what to do about an error: the hint of the first pattern that its message has.

    Args:
        message: message of the error.
        hints: Regular expressions, whatever the case, each with its hint.
    """
    for pattern, hint in hints:
        if re.search(pattern, message, re.IGNORECASE):
            return hint
    return "run `lmcore doctor`"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the exception's type if it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
