"""Step `fix`: repair of wrongly decoded text, with ftfy and its defaults.

ftfy works line by line and never changes a line of printable ASCII without `&`, so that only the
other lines are passed to it: the same result, several times faster.
"""

from __future__ import annotations

import importlib.util
import re

from lmcore.base.errors import MissingPackageError
from lmcore_data_tools.clean.document import Document, Replace, Verdict

__all__ = ["FixStep", "fixed"]

_MAY_CHANGE = re.compile(r"[^\n\t\x20-\x25\x27-\x7e]")
_LONGEST = 1_000_000  # ftfy splits longer lines into pieces of this size


class FixStep:
    """Document step that repairs texts and drops none.

    Raises:
        MissingPackageError: ftfy is not installed.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("ftfy") is None:
            raise MissingPackageError(
                "ftfy", needed_for="the step `fix`", install="pip install ftfy"
            )

    def judge(self, document: Document) -> Verdict:
        """Return `Replace` if ftfy changes the text."""
        text = fixed(document.text)
        return None if text == document.text else Replace((text,))


def fixed(text: str) -> str:
    """Return the result of `ftfy.fix_text` for *text*."""
    from ftfy import fix_text

    if not _MAY_CHANGE.search(text):
        return text
    lines = text.split("\n")
    last = len(lines) - 1
    tagged = False
    for at, line in enumerate(lines):
        # After a line with `<`, possibly source code, ftfy does not change character references.
        tagged = tagged or "<" in line
        if not _MAY_CHANGE.search(line):
            continue
        if len(line) >= _LONGEST:
            return str(fix_text(text))
        whole = line if at == last else f"{line}\n"
        repaired = str(fix_text(whole, unescape_html=False if tagged else "auto"))
        lines[at] = repaired if at == last else repaired.removesuffix("\n")
    return "\n".join(lines)
