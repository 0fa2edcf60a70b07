"""Text for terminals: wrapped lines from which commands can be copied, sizes of files."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Mapping

from lmcore.base.errors import printable

__all__ = ["counts_text", "output_width", "size_text", "speed_text", "wrapped"]

_PLAIN_WIDTH = 120  # columns if the output is not a terminal
_NARROWEST = 40
_GLUE = "\N{NO-BREAK SPACE}"


def output_width() -> int:
    """Return the number of columns of standard output."""
    return max(_NARROWEST, shutil.get_terminal_size((_PLAIN_WIDTH, 24)).columns)


def size_text(count: float) -> str:
    """Return a number of bytes in a readable unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} bytes" if unit == "bytes" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def counts_text(counts: Mapping[str, int]) -> str:
    """Return the count of each kind, separated by commas."""
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.items())


def speed_text(documents: int, megabytes_per_second: float, seconds: float) -> str:
    """Return documents and megabytes a second."""
    return f"{documents / max(seconds, 1e-9):,.0f} documents/s, {megabytes_per_second:.1f} MB/s"


def wrapped(text: str, width: int, *, first: str = "", rest: str = "") -> str:
    """Return *text* with each of its lines wrapped separately.

    Text in backticks is not broken: a terminal breaks it without changing it.  Control characters
    are replaced.

    Args:
        text: Text to wrap.
        width: Number of columns.
        first: Beginning of the first line.
        rest: Beginning of the other lines.
    """
    lines: list[str] = []
    for number, line in enumerate(printable(text).splitlines()):
        glued = re.sub(r"`[^`]*`", lambda found: found[0].replace(" ", _GLUE), line)
        lines += textwrap.wrap(
            glued,
            width,
            initial_indent=rest if number else first,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines).replace(_GLUE, " ") or first
