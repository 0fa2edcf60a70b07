"""The hint that installs a package of lmcore's repository, from where lmcore itself came."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["installation", "sources"]

_FROM = "with the index or folder that lmcore came from"
"""Part of hints: what a public index has under a name need not be ours."""


def sources() -> Path | None:
    """Return the folder of the sources that lmcore was installed from or runs from, if any."""
    folders = [Path(__file__).parents[2]]  # in place
    with suppress(importlib.metadata.PackageNotFoundError, ValueError):
        text = importlib.metadata.distribution("lmcore").read_text("direct_url.json")  # PEP 610
        record = json.loads(text or "{}")
        url = urlsplit(record.get("url", ""))
        if "dir_info" in record and url.scheme == "file":
            folders.insert(0, Path(unquote(url.path)))
    return next((one for one in folders if _name_of(one) == "lmcore"), None)


def installation(package: str, extra: str = "") -> str:
    """Return the hint that installs a package of lmcore's repository.

    An extra is resolved from an index or a folder of wheels.  Sources have no index with the
    package: it is installed from its own folder in them, with what else the extra names.

    Args:
        package: Name of the distribution.
        extra: Extra of lmcore that needs it; empty: the package alone is wanted.
    """
    folder = sources()
    if folder is not None and _part_of(folder, package) is not None:
        return f"run `pip install {shlex.join(_from_sources(folder, package, extra))}`"
    wanted = f'"lmcore[{extra}]"' if extra else package
    return f"run `pip install {wanted}`, {_FROM}"


def _from_sources(sources: Path, package: str, extra: str) -> list[str]:
    """Return what pip installs for an extra, packages of the sources by their folders."""
    from packaging.requirements import Requirement  # its parser is slow to load

    lines: list[str] = []
    with suppress(importlib.metadata.PackageNotFoundError):
        lines = importlib.metadata.requires("lmcore") or []
    named = [
        one
        for one in map(Requirement, lines)
        if extra
        and one.marker is not None
        and one.marker.evaluate({"extra": extra})
        and not one.marker.evaluate({"extra": ""})
    ]
    found = []
    for one in named or [Requirement(package)]:
        extras = f"[{','.join(sorted(one.extras))}]" if one.extras else ""
        folder = _part_of(sources, one.name)
        found.append(f"{one.name if folder is None else folder}{extras}")
        if folder is None:
            found[-1] += str(one.specifier)
    return found


def _part_of(sources: Path, package: str) -> Path | None:
    """Return the folder of a distribution in lmcore's sources; None if it is not in them."""
    folders = (*sources.glob("plugins/*"), *sources.glob("plugins_*"))
    return next((one for one in folders if _name_of(one) == package), None)


def _name_of(folder: Path) -> str | None:
    """Return the name of the distribution whose sources a folder has; None if it has none."""
    import tomllib

    try:
        content = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    name = content.get("project", {}).get("name")
    return name if isinstance(name, str) else None
