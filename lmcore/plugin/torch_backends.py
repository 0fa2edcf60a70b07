"""Backends that other packages add to torch, which loads them when it is imported.

A backend that cannot be loaded makes `import torch` fail.  This module names the package, so that
neither lmcore nor a plugin of lmcore is blamed.  Torch-free.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Mapping

from lmcore.base.errors import PluginError

__all__ = ["AUTOLOAD", "backend_error", "installed_backends"]

_GROUP = "torch.backends"
"""Group of torch's entry points."""
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Variable of torch: 0 leaves all of these backends out."""
_FAILED = re.compile(r"Failed to load the backend extension: (\S+?)\.(\s|$)")
_TAKEN = "register_privateuse1_backend() has already been set"
"""Words of torch's error for a second backend under its device type for other packages."""
_MOST_CAUSES = 20


def backend_error(error: BaseException) -> PluginError | None:
    """Return the message for a backend that torch could not load; None if this is not the cause.

    Args:
        error: Exception of `import torch`, or one that it caused.
    """
    link: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if link is None:
            return None
        found = _FAILED.match(str(link)) if isinstance(link, RuntimeError) else None
        if found is not None:
            cause = link.__cause__
            return _message(found[1], "" if cause is None else f"{type(cause).__name__}: {cause}")
        link = link.__cause__ or link.__context__
    return None


def _message(name: str, why: str) -> PluginError:
    points = [point for point in _points() if point.name == name]
    distributions = [point.dist for point in points if point.dist is not None]
    packages = " and ".join(f"`{one.name}` {one.version}" for one in distributions)
    owner = f" of {packages}" if packages else ""
    if _TAKEN in why:
        return PluginError(
            f"torch cannot load the backend `{name}`{owner} beside another one",
            why="torch has one place for a device type that another package brings; "
            + " ".join(why.split()),
            hint=f"set {AUTOLOAD}=0: the plugin of the chosen device loads its backend alone then; "
            "or uninstall one of the packages",
        )
    remedy = f", or repair or uninstall {packages}" if packages else ""
    return PluginError(
        f"torch cannot load the backend `{name}`{owner}",
        why=" ".join(why.split()) or None,
        hint=f"set {AUTOLOAD}=0 to use torch without such backends{remedy}",
    )


def installed_backends(env: Mapping[str, str] = os.environ) -> list[str]:
    """Return the backends that torch loads when it is imported, each with package and version."""
    if env.get(AUTOLOAD, "1") != "1":
        return []
    return [
        f"{point.name} ({point.dist.name} {point.dist.version})" if point.dist else point.name
        for point in _points()
    ]


def _points() -> list[importlib.metadata.EntryPoint]:
    return sorted(importlib.metadata.entry_points(group=_GROUP), key=lambda point: point.name)
