"""The entry points of plugins, and the device plugins named by lmcore's extras."""

from __future__ import annotations

import importlib.metadata

__all__ = ["GROUP", "device_packages"]

GROUP = "lmcore.plugins"
"""Group of the entry points that are plugins."""


def device_packages() -> dict[str, str]:
    """Return the package that brings each device which an extra of lmcore is named after.

    Such an extra requires `lmcore-NAME`, NAME being its own.  Run from its sources, lmcore has no
    metadata and returns no plugins.  Extras that bring engines or commands are left out.
    """
    from packaging.requirements import Requirement  # its parser is slow to load
    from packaging.utils import canonicalize_name

    from lmcore.model.known_plugins import APPLICATIONS, KNOWN_PLUGINS

    others = {*APPLICATIONS, *(one.extra for one in KNOWN_PLUGINS)}
    try:
        requires = importlib.metadata.requires("lmcore") or []
        extras = importlib.metadata.metadata("lmcore").get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    wanted = [Requirement(line) for line in requires]
    return {
        extra: one.name
        for extra in extras
        if extra not in others
        for one in wanted
        if canonicalize_name(one.name) == f"lmcore-{canonicalize_name(extra)}"
        and one.marker is not None
        and one.marker.evaluate({"extra": extra})
    }
