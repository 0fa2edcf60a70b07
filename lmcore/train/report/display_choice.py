"""Choice of the display of a run: `--progress`."""

from __future__ import annotations

import sys

from lmcore.train.report.display import Display, PlainDisplay, SilentDisplay

__all__ = ["open_display"]


def open_display(kind: str) -> Display:
    """Return the display that `--progress` names; "auto" is live on a terminal.

    Args:
        kind: "auto", "live", "plain" or "none".
    """
    if kind == "none":
        return SilentDisplay()
    if kind == "plain" or (kind == "auto" and not sys.stderr.isatty()):
        return PlainDisplay()
    from lmcore.train.report.live_display import LiveDisplay

    return LiveDisplay()
