"""Step `fix`: mends text that was decoded wrongly on its way, with ftfy and its defaults.

ftfy takes a text line by line.  A line of plain ASCII without `&` or control characters is one that
it never changes, so only the others are given to it: the result is the same, several times sooner.
"""

from __future__ import annotations

import importlib.util
import re

from lmcore.data.clean.document import Document, Replace, Verdict
from lmcore.errors import MissingPackageError

__all__ = ["FixStep", "fixed"]

_MAY_CHANGE = re.compile(r"[^\n\t\x20-\x25\x27-\x7e]")
_LONGEST = 1_000_000  # ftfy cuts longer lines into pieces of this size


class FixStep:
    """Replaces a document's text by the mended one; drops none.

    Raises:
        MissingPackageError: ftfy is not installed.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("ftfy") is None:
            raise MissingPackageError(
                "ftfy", needed_for="the step `fix`", install="pip install ftfy"
            )

    def judge(self, document: Document) -> Verdict:
        """Return `Replace` where ftfy changes something."""
        text = fixed(document.text)
        return None if text == document.text else Replace((text,))


def fixed(text: str) -> str:
    """Return what `ftfy.fix_text` makes of *text*."""
    from ftfy import fix_text

    if not _MAY_CHANGE.search(text):
        return text
    lines = text.split("\n")
    last = len(lines) - 1
    tagged = False
    for at, line in enumerate(lines):
        # After a line with `<`, which may be source code, it leaves character references alone.
        tagged = tagged or "<" in line
        if not _MAY_CHANGE.search(line):
            continue
        if len(line) >= _LONGEST:
            return str(fix_text(text))
        whole = line if at == last else f"{line}\n"
        mended = str(fix_text(whole, unescape_html=False if tagged else "auto"))
        lines[at] = mended if at == last else mended.removesuffix("\n")
    return "\n".join(lines)
