"""Training of language models, and of any other model, with hardware support as plugins.

Imports next to nothing, so that `lmcore --help` and the launcher start without torch: the names
below are loaded when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmcore import old_paths

if TYPE_CHECKING:
    from lmcore.base.errors import (
        CheckpointError,
        ConfigError,
        DeviceError,
        LmcoreError,
        OtherRankError,
        PluginError,
        RunError,
    )
    from lmcore.library.session import Session
    from lmcore.library.start import start

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DeviceError",
    "LmcoreError",
    "OtherRankError",
    "PluginError",
    "RunError",
    "Session",
    "__version__",
    "start",
]

old_paths.install()

__version__ = "2026.11.0"

_LIBRARY = {"Session": "lmcore.library.session", "start": "lmcore.library.start"}


def __getattr__(name: str) -> Any:
    """Load a public name at its first use."""
    if name not in __all__:
        raise AttributeError(f"module `lmcore` has no attribute `{name}`")
    import importlib

    if name in _LIBRARY:
        _import_torch()
    value = getattr(importlib.import_module(_LIBRARY.get(name, "lmcore.base.errors")), name)
    globals()[name] = value
    return value


def _import_torch() -> None:
    """Import torch, or end the program with a message about the package that prevents it."""
    from lmcore.base.errors import PluginError
    from lmcore.runtime.torch_import import import_torch
    from lmcore.runtime.user_line import install_excepthook

    try:
        import_torch()
    except PluginError:
        install_excepthook()
        raise


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
