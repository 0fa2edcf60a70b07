"""Check of a plugin's imports from lmcore: a version of the contract has them.

Part of `lmcore plugin check`.  Imports inside functions count: they fail when the hook runs.  Reads
files and imports nothing.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcore import accelerator
from lmcore.accelerator.probe import Check, CheckStatus
from lmcore.errors import nearest

__all__ = ["check_source", "source_files"]

_ALLOWED = ("lmcore.accelerator", "lmcore.config", "lmcore.hookspecs", "lmcore.errors")
_CONTRACT = "lmcore.accelerator"


@dataclass(frozen=True)
class _Import:
    """One imported name, and where."""

    module: str
    name: str | None
    place: str


def source_files(module: str) -> list[Path]:
    """Return the Python files of the top-level package that *module* is in."""
    spec = importlib.util.find_spec(module.partition(".")[0])
    if spec is None:
        return []
    folders = spec.submodule_search_locations
    if folders is None:
        return [Path(spec.origin)] if spec.origin and spec.origin.endswith(".py") else []
    return sorted(path for folder in folders for path in Path(folder).rglob("*.py"))


def check_source(files: Iterable[Path], contract: Mapping[str, Any]) -> Iterator[Check]:
    """Yield a check for each import of lmcore that is no part of the contract.

    Args:
        files: The plugin's Python files.
        contract: The version of the contract that the plugin is held against.
    """
    count, strange = 0, False
    for path in files:
        count += 1
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, OSError) as error:
            strange = True
            yield Check("source", CheckStatus.FAILED, f"{path.name} cannot be read: {error}")
            continue
        for imported in _imports(tree, path.name):
            check = _problem(imported, contract)
            if check is not None:
                strange = True
                yield check
    if count == 0:
        detail = "it has no Python files to read imports from"
        yield Check("source", CheckStatus.SKIPPED, detail)
    elif not strange:
        subject = "1 file imports" if count == 1 else f"{count} files import"
        yield Check("source", CheckStatus.OK, f"{subject} nothing of lmcore but the contract")


def _imports(tree: ast.AST, file: str) -> Iterator[_Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _Import(alias.name, None, f"{file}, line {node.lineno}")
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                yield _Import(node.module, alias.name, f"{file}, line {node.lineno}")


def _problem(imported: _Import, contract: Mapping[str, Any]) -> Check | None:
    if imported.module.partition(".")[0] != "lmcore":
        return None
    module = imported.module
    if module == "lmcore" and imported.name is not None:
        module = f"lmcore.{imported.name}"
    if module != "lmcore" and not any(f"{module}.".startswith(f"{own}.") for own in _ALLOWED):
        return Check(
            "source",
            CheckStatus.WARNING,
            f"imports `{module}` ({imported.place}), which is no part of the contract: any "
            "release may change it",
        )
    if module == _CONTRACT and imported.module == _CONTRACT and imported.name not in {None, "*"}:
        return _name_problem(str(imported.name), imported.place, contract)
    return None


def _name_problem(name: str, place: str, contract: Mapping[str, Any]) -> Check | None:
    known = {*contract["types"], *contract["functions"], *contract["names"]}
    is_current = name in accelerator.__all__
    if name in known or (_is_module(name) and not is_current):
        return None
    if is_current:
        why = f"which version {contract['api']} of the contract does not have; it came later"
    else:
        why = f"which version {contract['api']} of the contract does not have"
    close = nearest(name, known)
    fix = f"did you mean `{close}`?" if close else None
    detail = f"imports `{name}` from `{_CONTRACT}` ({place}), {why}"
    return Check("source", CheckStatus.FAILED, detail, fix)


def _is_module(name: str) -> bool:
    return importlib.util.find_spec(f"{_CONTRACT}.{name}") is not None
