"""Functions of Python, torch and lmcore that a plugin replaces, in modules or in classes.

    known = Functions()
    ...                            # the plugin's code runs
    for one in known.replaced(files): ...

Part of `lmcore plugin check`.  A function counts as replaced if its name has another object, other
code or other defaults, or if a class gets its own of a function that it inherited.  New names are
no fault: a package that brings a device to torch adds some.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Functions", "Replaced"]

_DESCRIPTORS = (staticmethod, classmethod, property)
_Key = tuple[str, str]
"""Module, or module and class, and the name in it."""


@dataclass(frozen=True)
class Replaced:
    """A function that is not what it was.

    Attributes:
        path: Its dotted name, "torch.nn.functional.dropout".
        place: File and line of what it is now; empty if that is not known.
        by_plugin: False if another package than the plugin's has replaced it.
    """

    path: str
    place: str
    by_plugin: bool


class Functions:
    """The functions and classes of the modules that are loaded."""

    def __init__(self, package: str = "", *, left_out: Collection[str] = ()) -> None:
        """Take the present functions.

        Args:
            package: Top-level package of the modules; default: any.
            left_out: Top-level packages that are left out: the plugin's.
        """
        no = {*left_out, "lmcore_conformance", "__main__"}
        tops = {name: name.partition(".")[0] for name in sys.modules}
        self._modules = {
            name for name, top in tops.items() if top not in no and package in {"", top}
        }
        self._known = dict(_functions(self._modules))
        self._code = {id(value): _inside(value) for value in self._known.values()}

    def replaced(self, files: Collection[Path]) -> Iterator[Replaced]:
        """Yield what is replaced now, each function once.

        Args:
            files: The plugin's files.
        """
        own = {str(path) for path in files}
        now = dict(_functions(self._modules))
        seen: set[int] = set()
        for key, value in now.items():
            if id(value) in seen or not self._is_replaced(key, value, now):
                continue
            file, line = _place(value)
            by_library = file is not None and _top(file) == key[0].partition(".")[0]
            if by_library and id(value) not in self._code:
                continue  # a library that completes itself when it is first used
            seen.add(id(value))
            name = Path(file).name if file else ""
            by_plugin = file is None or file in own or by_library
            yield Replaced(".".join(key), f"{name}, line {line}" if name else "", by_plugin)

    def _is_replaced(self, key: _Key, value: Any, now: Mapping[_Key, Any]) -> bool:
        if key not in self._known:
            return _overrides(key, self._known, now)
        before = self._known[key]
        return before is not value or self._code[id(before)] != _inside(value)


def _functions(modules: Collection[str]) -> Iterator[tuple[_Key, Any]]:
    """Yield the functions and classes of modules, and the functions of their classes."""
    for path in modules:
        module = sys.modules.get(path)
        if not isinstance(module, types.ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if not callable(value):
                continue
            yield (path, name), value
            if isinstance(value, type) and value.__module__ == path:
                for member, function in list(vars(value).items()):
                    if callable(function) or isinstance(function, _DESCRIPTORS):
                        yield (f"{path}.{name}", member), function


def _inside(value: Any) -> Any:
    """Return what a function can be changed by in its place: its code and defaults."""
    function = getattr(value, "__func__", value)
    if not isinstance(function, types.FunctionType):
        return None
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _overrides(key: _Key, known: Mapping[_Key, Any], now: Mapping[_Key, Any]) -> bool:
    """Return True if a known class has got its own of a function that it inherits."""
    owner, name = key
    module, _, attribute = owner.rpartition(".")
    one = known.get((module, attribute))
    if not isinstance(one, type) or now.get((module, attribute)) != one:
        return False
    return any(name in vars(base) for base in one.__mro__[1:])


def _place(value: Any) -> tuple[str | None, int]:
    """Return file and line of a function or class; no file if that is not known."""
    for _ in range(8):
        if isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, types.MethodType | staticmethod | classmethod):
            value = value.__func__
        else:
            break
    if isinstance(value, types.FunctionType):
        return value.__code__.co_filename, value.__code__.co_firstlineno
    if isinstance(value, type):
        return getattr(sys.modules.get(value.__module__), "__file__", None), 1
    owner = sys.modules.get(type(value).__module__)
    return getattr(owner, "__file__", None), 1


def _top(file: str) -> str:
    """Return the top-level package of a module's file; empty if none is loaded from it."""
    path = Path(file)
    for folder in path.parents:
        module = sys.modules.get(folder.name)
        found = getattr(module, "__file__", None)
        if found and Path(found).parent == folder:
            return folder.name
    return path.stem
