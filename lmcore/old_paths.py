"""Former names of public modules, which plugins for contracts before 1.3 import.

They hold until contract 2.0, as docs/reference/hooks.md promises.  An old name is the same module
object as the new one, so that classes are the same by either.  Imports nothing of lmcore.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

__all__ = ["MOVED", "current_path", "install"]

MOVED = {
    "lmcore.accelerator": "lmcore.contract",
    "lmcore.bounded_file": "lmcore.base.bounded_file",
    "lmcore.errors": "lmcore.base.errors",
}
"""The new name of each module, or package with all below it, that was public under another."""


def current_path(path: str) -> str:
    """Return the name of today for a dotted name that may begin with a former module name."""
    for old, new in MOVED.items():
        if f"{path}.".startswith(f"{old}."):
            return new + path[len(old) :]
    return path


def install() -> None:
    """Let `import` find modules by their former names, with a DeprecationWarning."""
    if not any(isinstance(finder, _OldPaths) for finder in sys.meta_path):
        # Before Python's own finder, which would load a file below an old package a second time.
        sys.meta_path.insert(0, _OldPaths())


class _OldPaths:
    """A finder and loader of modules by their former names."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if current_path(name) == name:
            return None
        from importlib.machinery import ModuleSpec

        # `importlib.abc.Loader`, whose import would take longer than that of lmcore, is not needed.
        return ModuleSpec(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None: Python makes a module, which `exec_module` replaces by the one of today."""

    def exec_module(self, module: ModuleType) -> None:
        import importlib
        import warnings

        old = module.__name__
        new = current_path(old)
        # Python leaves out the frames of its import system, so that 2 is the importing line.
        warnings.warn(f"`{old}` is `{new}` now", DeprecationWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(new)
