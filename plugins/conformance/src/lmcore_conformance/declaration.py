"""Declaration of the abilities that a device lacks: the file `conformance.toml`.

It is in the plugin's package, beside the module of its hooks, so that every user of the plugin
can run the suite; `--requirements=FILE` names another one.

    suite = ">=1,<2"                    # versions of the suite that it was written for

    [closed]                            # absent abilities, with the reason
    streams = "work is done when its call returns"

    [depends]                           # present or absent, depending on the hardware
    bfloat16 = "the first generation of chips lacks it"

An ability that it does not name is open: claimed, and checked.
"""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from lmcore.base.errors import ConfigError, suggestion
from lmcore_conformance import SUITE_VERSION
from lmcore_conformance.registry import Check
from lmcore_conformance.requirements import REQUIREMENTS
from lmcore_conformance.target import Target, module_of

__all__ = ["FILE_NAME", "Declaration", "declaration_of", "find_declaration", "read_declaration"]

FILE_NAME = "conformance.toml"
_PARTS = ("suite", "closed", "depends")
_COLLECTIVES = frozenset(
    {
        *("distributed", "all_to_all", "reduce_scatter", "gather_scatter", "send_recv"),
        *("barrier", "average"),
    }
)
"""Requirements of a communication backend."""


@dataclass(frozen=True)
class Declaration:
    """Abilities that are closed, or depend on the hardware, each with its reason.

    Attributes:
        source: The file; None: there is none, so that everything is open.
        closed: Reasons by requirement or id of a check.
        depends: Reasons by requirement.
    """

    source: Path | None = None
    closed: Mapping[str, str] = field(default_factory=dict)
    depends: Mapping[str, str] = field(default_factory=dict)

    def why_closed(self, check: Check) -> str | None:
        """Return the reason for which *check* is not made; None where it is."""
        for name in (check.id, *check.requires):
            if name in self.closed:
                return f"`{name}` is closed: {self.closed[name]}"
        return None

    def why_it_may_lack(self, check: Check) -> str | None:
        """Return the reason why the device may lack the ability that *check* is about."""
        reasons = [
            f"`{name}`: {self.depends[name]}" for name in check.requires if name in self.depends
        ]
        return "; ".join(reasons) or None


def declaration_of(target: Target, checks: Collection[Check]) -> Declaration:
    """Return the declarations of the plugins under test as one.

    A plugin without a device that is tried alone is excused by its device, but for its own
    communication backend; a plugin beside a device declares only what its backend lacks.

    Args:
        target: Plugins under test.
        checks: the suite's checks.

    Raises:
        ConfigError: One of the files is malformed.
    """
    found = read_declaration(find_declaration(target.module), checks)
    for record in target.others:
        other = read_declaration(find_declaration(module_of(record)), checks)
        extension = target.record if target.alone else record
        collectives = _COLLECTIVES if extension.implements("lmcore_comm_backends") else frozenset()
        kept = REQUIREMENTS.keys() - collectives if target.alone else collectives
        parts = ((found.closed, other.closed), (found.depends, other.depends))
        merged = (
            {name: reason for name, reason in part.items() if name in kept} | {**own}
            for own, part in parts
        )
        found = Declaration(found.source, *merged)
    return found


def find_declaration(module: str) -> Path | None:
    """Return the `conformance.toml` beside a plugin's *module*; imports nothing of it."""
    top, *inner = module.partition(":")[0].split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        return None
    for folder in spec.submodule_search_locations:
        found = Path(folder).joinpath(*inner[:-1], FILE_NAME)
        if found.is_file():
            return found
    return None


def read_declaration(path: Path | None, checks: Collection[Check]) -> Declaration:
    """Read a declaration; without a file everything is open.

    Args:
        path: The file.
        checks: the suite's checks, whose ids can be closed as well.

    Raises:
        ConfigError: The file is missing, malformed, for another version of the suite, or closes
            what there is not.
    """
    if path is None:
        return Declaration()
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise ConfigError(f"`{path}` cannot be read", why=f"{type(cause).__name__}: {cause}") from (
            cause
        )
    for name in values.keys() - set(_PARTS):
        raise _wrong(path, f"it has the unknown part `{name}`", suggestion(name, _PARTS))
    _check_version(path, values.get("suite"))
    known = [*REQUIREMENTS, *(check.id for check in checks)]
    closed = _reasons(path, "closed", values, known)
    depends = _reasons(path, "depends", values, list(REQUIREMENTS))
    for name in closed.keys() & depends.keys():
        raise _wrong(path, f"`{name}` is closed and depends", "keep one of them")
    return Declaration(path, closed, depends)


def _check_version(path: Path, suite: object) -> None:
    hint = f'write `suite = ">={SUITE_VERSION}"` at its top'
    if not isinstance(suite, str):
        raise _wrong(path, "it does not say which versions of the suite it is for", hint)
    try:
        fits = SpecifierSet(suite).contains(SUITE_VERSION)
    except InvalidSpecifier:
        raise _wrong(path, f"`suite` is `{suite}`, no version specifier", hint) from None
    if not fits:
        raise ConfigError(
            f"`{path}` is for the suite {suite}, and this is {SUITE_VERSION}",
            why="what it closes may be called otherwise now, and new checks are not in it",
            hint="install a suite of that version, or go through the checks that are new and "
            "change `suite` in the file",
        )


def _reasons(
    path: Path, part: str, values: Mapping[str, Any], known: Collection[str]
) -> dict[str, str]:
    table = values.get(part, {})
    if not isinstance(table, Mapping):
        raise _wrong(path, f"`{part}` is no table", f"write `[{part}]`, then `NAME = REASON`")
    for name, reason in table.items():
        if name not in known:
            kind = "requirement or check" if part == "closed" else "requirement"
            raise _wrong(path, f"`{part}` names `{name}`, no {kind}", suggestion(name, known))
        if not isinstance(reason, str) or len(reason.split()) < 2:
            raise _wrong(path, f"`{part}` gives no reason for `{name}`", "say why, in a few words")
    return dict(table)


def _wrong(path: Path, why: str, hint: str | None) -> ConfigError:
    return ConfigError(f"`{path}` is no valid declaration", why=why, hint=hint)
