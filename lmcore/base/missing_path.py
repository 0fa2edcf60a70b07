"""Nearest existing path in place of one that does not exist, for hints of errors."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from lmcore.base.errors import begun, did_you_mean, nearest

__all__ = ["missing_path_hint", "nearest_paths"]

_MOST_NAMES = 10_000
"""Names of a directory that are compared, at most."""


def nearest_paths(path: str | Path) -> list[str]:
    """Return the existing paths that one which does not exist is likely to mean; most often none.

    The first part of the path that does not exist is compared with the names in its directory; what
    follows it must exist below them.  `web` means `web.jsonl`, and `web.jsonl` `web.jsonl.gz`.
    """
    parts = Path(path).parts
    known = next(n for n in range(len(parts), -1, -1) if n == 0 or Path(*parts[:n]).exists())
    if known == len(parts):
        return []
    directory, wrong, rest = Path(*parts[:known]), parts[known], parts[known + 1 :]
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in itertools.islice(entries, _MOST_NAMES)]
    except OSError:
        return []
    close = nearest(wrong, names)
    meant = [close] if close is not None else begun(f"{wrong}.", names)
    return [str(one) for name in meant if (one := directory.joinpath(name, *rest)).exists()]


def missing_path_hint(
    path: str | Path, otherwise: str | None = "check the path", *, ending: str = ""
) -> str | None:
    """Return the hint for a path that does not exist: the nearest ones that do, or *otherwise*.

    Args:
        path: The path, as the user gave it.
        otherwise: Hint if none is near.
        ending: Ending of the files whose paths without it are meant, such as `.idx`.
    """
    found = [one for one in nearest_paths(f"{path}{ending}") if one.endswith(ending)]
    return did_you_mean([one.removesuffix(ending) for one in found]) if found else otherwise
