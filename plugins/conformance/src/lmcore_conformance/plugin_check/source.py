"""Check of a plugin's imports from lmcore: the contract has each name.

Part of `lmcore plugin check`.  Imports inside functions count: they fail when the hook runs.  Reads
files and imports nothing.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import Version

import lmcore
from lmcore.base.errors import counted, nearest
from lmcore.contract.probe import API_VERSION, Check, CheckStatus
from lmcore.old_paths import current_path
from lmcore_conformance.contract.diff import new_path
from lmcore_conformance.contract.surface import PUBLIC_MODULES
from lmcore_conformance.plugin_check.package_uses import Use, uses_of

__all__ = ["check_imports", "check_source", "private_name", "source_files"]

Modules = Mapping[str, Collection[str]]

_OF_PYTHON = ("__doc__", "__file__", "__name__", "__path__", "__spec__")
"""Attributes of modules that Python itself sets."""


def source_files(module: str) -> list[Path]:
    """Return the Python files of the top-level package that *module* is in."""
    spec = importlib.util.find_spec(module.partition(".")[0])
    if spec is None:
        return []
    folders = spec.submodule_search_locations
    if folders is None:
        return [Path(spec.origin)] if spec.origin and spec.origin.endswith(".py") else []
    return sorted(path for folder in folders for path in Path(folder).rglob("*.py"))


def check_source(
    files: Iterable[Path], contract: Mapping[str, Any], *, allow_private: bool = False
) -> Iterator[Check]:
    """Yield a check for each name of lmcore that the files use and the contract does not have.

    Args:
        files: The plugin's Python files.
        contract: The version of the contract that the plugin is held against.
        allow_private: True if private names of lmcore are warnings, not failures.
    """
    count, found = 0, False
    moved = contract.get("moved", {})
    for path in files:
        count += 1
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, OSError) as error:
            found = True
            yield Check("source", CheckStatus.FAILED, f"{_shown(path)} cannot be read: {error}")
            continue
        for use in _violations(tree, contract):
            found = True
            place = f"{_shown(path)}, line {use.line}"
            yield _violation(use.path, place, contract, allow_private=allow_private)
        former = [use for use in _uses(tree) if new_path(use.path, moved) != use.path]
        if former:
            found = True
            yield _former(path, former, moved)
    if count == 0:
        detail = "it has no Python files to read imports from"
        yield Check("source", CheckStatus.SKIPPED, detail)
    elif not found:
        uses = "uses" if count == 1 else "use"
        detail = f"{counted(count, 'file')} {uses} no name of lmcore but the contract's"
        yield Check("source", CheckStatus.OK, detail)


def check_imports(
    uses: Iterable[tuple[Use, str]], contract: Mapping[str, Any], *, allow_private: bool = False
) -> Iterator[Check]:
    """Yield a check for each name of lmcore that a plugin's code imported against the contract.

    Args:
        uses: The names, with the line and the file of each.
        contract: The version of the contract that the plugin is held against.
        allow_private: True if private names of lmcore are warnings, not failures.
    """
    reported: set[tuple[str, str]] = set()
    for use, file in uses:
        path = new_path(use.path, contract.get("moved", {}))
        name = private_name(path, contract["modules"])
        if name is not None and (name, file) not in reported:
            reported.add((name, file))
            place = f"{_shown(Path(file))}, line {use.line}"
            yield _violation(name, place, contract, allow_private=allow_private)


def private_name(path: str, modules: Modules) -> str | None:
    """Return the part of a dotted name that makes it private; None if the name is public.

    A name of a public module is public with all its attributes, and so is a package that has
    public modules.
    """
    parts = path.split(".")
    starts = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    module = next(
        start for start in starts if any(f"{public}.".startswith(f"{start}.") for public in modules)
    )
    rest = parts[module.count(".") + 1 :]
    if not rest or rest[0] in {*modules.get(module, ()), *_OF_PYTHON}:
        return None
    below = f"{module}.{rest[0]}"
    return path if _is_module(below) else below


def _uses(tree: ast.Module) -> list[Use]:
    return uses_of("lmcore", tree, lambda module: _names_in(module)[1])


def _violations(tree: ast.Module, contract: Mapping[str, Any]) -> Iterator[Use]:
    """Yield the private names that a file uses; attributes of a reported name are not repeated."""
    reported: set[str] = set()
    for use in _uses(tree):
        path = new_path(use.path, contract.get("moved", {}))
        name = private_name(path, contract["modules"])
        if name is None or any(f"{name}.".startswith(f"{known}.") for known in reported):
            continue
        reported.add(name)
        yield Use(name, use.line)


def _former(file: Path, uses: Sequence[Use], moved: Mapping[str, str]) -> Check:
    """Return the warning for a file that uses former names of modules."""
    first = uses[0]
    names = [
        f"`{new}` for `{old}`"
        for old, new in moved.items()
        if any(f"{use.path}.".startswith(f"{old}.") for use in uses)
    ]
    detail = f"`{first.path}` ({_shown(file)}, line {first.line}) is a former name, which contract "
    detail += f"{Version(API_VERSION).major + 1}.0 will not have"
    fix = f"{', '.join(names)}; versions of lmcore that lack these leave `PluginInfo.api` then"
    return Check("source", CheckStatus.WARNING, detail, fix)


def _violation(path: str, place: str, contract: Mapping[str, Any], *, allow_private: bool) -> Check:
    owner, _, name = path.rpartition(".")
    version = contract["api"]
    fix = _replacement(path, contract["modules"])
    status = CheckStatus.FAILED
    if private_name(current_path(path), PUBLIC_MODULES) is None:
        why = f"came after version {version} of the contract"
    elif not _exists(path):
        why = f"is not in lmcore {lmcore.__version__}"
        fix = fix or _meant(owner, name, contract["modules"])
    else:
        why = f"is private: version {version} of the contract does not have it, and any release "
        why += "may change it"
        status = CheckStatus.WARNING if allow_private else status
        fix = fix or "docs/reference/hooks.md lists the names that a plugin may import"
    return Check("source", status, f"`{path}` ({place}) {why}", fix)


def _replacement(path: str, modules: Modules) -> str | None:
    """Return the advice that names the public module of a name that has one."""
    name = path.rpartition(".")[2]
    for module, names in modules.items():
        if name in names:
            return f"`from {module} import {name}`"
    return None


def _meant(owner: str, name: str, modules: Modules) -> str | None:
    close = nearest(name, modules.get(owner, ()))
    return f"did you mean `{owner}.{close}`?" if close else None


def _exists(path: str) -> bool:
    owner, _, name = path.rpartition(".")
    return _is_module(path) or name in _names_in(owner)[0]


def _is_module(path: str) -> bool:
    return _file_of(path) is not None


def _file_of(module: str) -> Path | None:
    """Return the file of a module of lmcore, without an import of its package."""
    inside = Path(lmcore.__file__).parent.joinpath(*current_path(module).split(".")[1:])
    candidates = (inside / "__init__.py", inside.with_suffix(".py"))
    return next((path for path in candidates if path.is_file()), None)


@cache
def _names_in(module: str) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the names that a module of lmcore binds, and its `__all__`."""
    file = _file_of(module)
    if file is None:
        return frozenset(), ()
    bound: set[str] = set()
    exported: tuple[str, ...] = ()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.alias(name=name, asname=other):
                bound.add(other or name.partition(".")[0])
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                exported = tuple(ast.literal_eval(value))
            case ast.Name(id=name, ctx=ast.Store()):
                bound.add(name)
    return frozenset(bound), exported


def _shown(path: Path) -> str:
    """Return a file's path from its top-level package on."""
    top = path.parent
    while (top / "__init__.py").is_file() and top != top.parent:
        top = top.parent
    return str(path.relative_to(top))
