"""Imports and forks that a plugin's code makes while it runs, with the line of each.

Part of `lmcore plugin check`, in the process that tries a plugin.  The files of the plugin are read
by `source`; what is imported by a name that is computed shows only here.
"""

from __future__ import annotations

import builtins
import importlib
import sys
import traceback
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from lmcore_conformance.plugin_check.package_uses import Use

__all__ = ["ForkWatch", "ImportWatch"]


class ImportWatch:
    """Names of lmcore that a plugin's code imports, and the first import of torch.

    Attributes:
        uses: The names, with the line and the file of each.
        torch_place: File and line of the first import of torch; empty if there was none.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        """Watch the imports of *files*, from now until the process ends."""
        self.uses: list[tuple[Use, str]] = []
        self.torch_place = ""
        self._files = {str(path) for path in files}
        self._import, self._import_module = builtins.__import__, importlib.import_module
        builtins.__import__ = self._statement
        importlib.import_module = self._call

    def _statement(
        self,
        name: str,
        globals: Any = None,  # noqa: A002 - as `__import__` has it
        locals: Any = None,  # noqa: A002 - the same
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        if level == 0:
            self._note(name, [part for part in fromlist or () if part != "*"])
        return self._import(name, globals, locals, fromlist or (), level)

    def _call(self, name: str, package: str | None = None) -> Any:
        self._note(name, ())
        return self._import_module(name, package)

    def _note(self, name: str, parts: Sequence[str]) -> None:
        top = name.partition(".")[0]
        if top not in {"lmcore", "torch"} or (top == "torch" and self.torch_place):
            return
        if top == "torch" and "torch" not in sys.modules:
            self.torch_place = _innermost()
        place = plugin_line(self._files) if top == "lmcore" else None
        if place is not None:
            file, line = place
            paths = [f"{name}.{part}" for part in parts] or [name]
            self.uses += [(Use(path, line), file) for path in paths]


class ForkWatch:
    """Copies of this process that a plugin's code makes.

    Attributes:
        places: File and line of each fork.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        """Watch the forks of *files*, from now until the process ends."""
        self.places: list[str] = []
        self._files = {str(path) for path in files}
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        del arguments
        if event in {"os.fork", "os.forkpty"}:
            place = plugin_line(self._files)
            if place is not None:
                self.places.append(f"{Path(place[0]).name}, line {place[1]}")


def plugin_line(files: Collection[str]) -> tuple[str, int] | None:
    """Return file and line of the plugin that called this; None if lmcore's own code comes first.

    Code without a file, as `exec` runs it, counts as part of what executes it.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way to the caller
    while frame is not None:
        file = frame.f_code.co_filename
        if file in files:
            return file, frame.f_lineno
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] == "lmcore" and Path(file).is_file():
            return None
        frame = frame.f_back
    return None


def _innermost() -> str:
    """Return file and line of the code that imports something now."""
    lines = [
        frame
        for frame in traceback.extract_stack()
        if not frame.filename.startswith("<frozen importlib") and frame.filename != __file__
    ]
    return f"{lines[-1].filename}, line {lines[-1].lineno}" if lines else ""
