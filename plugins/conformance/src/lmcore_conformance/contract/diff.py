"""Differences of two versions of the plugin contract, and the version number that they require.

A breaking change may affect a plugin written for the old contract, which can ignore a compatible
change; a change of wording leaves the meaning as it was.  Works on the dictionaries of
`snapshot.describe_contract`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from packaging.version import Version

__all__ = ["Change", "ChangeKind", "compare", "needed_version", "new_path", "version_problem"]

Described = Mapping[str, Any]


class ChangeKind(StrEnum):
    """Effect of a change on an existing plugin."""

    BREAKING = "breaking"
    COMPATIBLE = "compatible"
    WORDING = "wording"


@dataclass(frozen=True)
class Change:
    """One difference: its kind, and a description that names the place."""

    kind: ChangeKind
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def compare(old: Described, new: Described) -> list[Change]:
    """Return how *new* differs from *old*; the version and `frozen` are not compared.

    What moved to another module, and still has its former name, is no difference but an addition.
    """
    old = _with_new_names(old, new.get("moved", {}))
    return [
        *_names("former name of a module", old.get("moved", {}), new.get("moved", {})),
        *_entries("hook", old["hooks"], new["hooks"], _hook),
        *_entries("type", old["types"], new["types"], _type),
        *_entries("function", old["functions"], new["functions"], _function),
        *_names("name", old["names"], new["names"]),
        *_entries("module", old["modules"], new["modules"], _module),
        *_entries("op", old["ops"], new["ops"], _op),
        *(_torch(old["torch"], new["torch"]) if "torch" in old else ()),
    ]


def _with_new_names(old: Described, moved: Mapping[str, str]) -> Described:
    """Return *old* with the names of today for the modules that *moved*."""

    def renamed(entries: Described) -> dict[str, Any]:
        return {new_path(name, moved): entry for name, entry in entries.items()}

    return {**old, "modules": renamed(old["modules"]), "functions": renamed(old["functions"])}


def new_path(path: str, moved: Mapping[str, str]) -> str:
    """Return the name of today for a dotted name that may begin with a module that *moved*."""
    for before, now in moved.items():
        if f"{path}.".startswith(f"{before}."):
            return now + path[len(before) :]
    return path


def needed_version(old: Described, changes: Sequence[Change]) -> Version:
    """Return the lowest version that a contract with these changes to *old* may have."""
    was = Version(old["api"])
    kinds = {change.kind for change in changes}
    if ChangeKind.BREAKING in kinds:
        return Version(f"{was.major + 1}.0")
    if ChangeKind.COMPATIBLE in kinds:
        return Version(f"{was.major}.{was.minor + 1}")
    return was


def version_problem(old: Described, new: Described) -> str | None:
    """Return why *new* may not have the version it has, given the earlier *old*; None if it may."""
    changes = compare(old, new)
    needed = needed_version(old, changes)
    if Version(new["api"]) >= needed:
        return None
    listed = "\n".join(f"  {change}" for change in changes if change.kind != ChangeKind.WORDING)
    return (
        f"the plugin contract {new['api']} differs from {old['api']}:\n{listed}\n"
        f"take this back, or raise `API_VERSION` in lmcore/contract/probe.py to {needed}"
    )


def _breaking(text: str) -> Change:
    return Change(ChangeKind.BREAKING, text)


def _compatible(text: str) -> Change:
    return Change(ChangeKind.COMPATIBLE, text)


def _entries(
    what: str,
    old: Described,
    new: Described,
    inside: Callable[[str, Any, Any], Iterator[Change]],
) -> Iterator[Change]:
    """Yield removed and added entries, and the changes *inside* the remaining ones."""
    for name in old:
        if name not in new:
            yield _breaking(f"{what} `{name}` is gone")
        else:
            yield from inside(f"{what} `{name}`", old[name], new[name])
    for name in new:
        if name not in old:
            yield _compatible(f"{what} `{name}` is new")


def _names(kind: str, old: Sequence[str], new: Sequence[str]) -> Iterator[Change]:
    """Yield the names that were removed from, and added to, a list."""
    for name in old:
        if name not in new:
            yield _breaking(f"{kind} `{name}` is gone")
    for name in new:
        if name not in old:
            yield _compatible(f"{kind} `{name}` is new")


def _module(place: str, old: Sequence[str], new: Sequence[str]) -> Iterator[Change]:
    yield from _names(f"{place}: name", old, new)


def _hook(place: str, old: Described, new: Described) -> Iterator[Change]:
    for name, annotation in old["arguments"].items():
        if name not in new["arguments"]:
            yield _breaking(f"{place}: argument `{name}` is gone")
        else:
            yield from _same(f"{place}: type of `{name}`", annotation, new["arguments"][name])
    for name in new["arguments"]:
        if name not in old["arguments"]:
            yield _compatible(f"{place}: argument `{name}` is new")
    yield from _same(f"{place}: result", old["result"], new["result"])
    for key in ("summary", "called_by", "when", "ranks", "returns"):
        if old[key] != new[key]:
            yield Change(ChangeKind.WORDING, f"{place}: `{key}`")


def _type(place: str, old: Described, new: Described) -> Iterator[Change]:
    if old["kind"] != new["kind"]:
        yield _breaking(f"{place}: it was {old['kind']}, it is {new['kind']}")
    elif old["kind"] == "enum":
        yield from _values(place, old["values"], new["values"])
    else:
        yield from _fields(place, old["fields"], new["fields"], ordered=old["kind"] == "record")
        yield from _methods(place, old["methods"], new["methods"])


def _values(place: str, old: Described, new: Described) -> Iterator[Change]:
    for name, value in old.items():
        if name not in new:
            yield _breaking(f"{place}: `{name}` is gone")
        else:
            yield from _same(f"{place}: value of `{name}`", value, new[name])
    for name in new:
        if name not in old:
            yield _compatible(f"{place}: `{name}` is new")


def _fields(
    place: str, old: Sequence[Described], new: Sequence[Described], *, ordered: bool
) -> Iterator[Change]:
    """Yield the changes of fields; *ordered*: they can be given by their position."""
    now = {entry["name"]: entry for entry in new}
    before = {entry["name"]: entry for entry in old}
    for name, was in before.items():
        if name not in now:
            yield _breaking(f"{place}: field `{name}` is gone")
            continue
        yield from _same(f"{place}: type of `{name}`", was["type"], now[name]["type"])
        if was["default"] and not now[name]["default"]:
            yield _breaking(f"{place}: field `{name}` has no default any more")
        elif now[name]["default"] and not was["default"]:
            yield _compatible(f"{place}: field `{name}` has a default")
    for name, entry in now.items():
        if name not in before:
            added = f"{place}: field `{name}` is new"
            yield (
                _compatible(added) if entry["default"] else _breaking(f"{added}, without a default")
            )
    if ordered:
        yield from _order(place, "fields", list(before), list(now))


def _order(place: str, kind: str, old: list[str], new: list[str]) -> Iterator[Change]:
    """Yield a change where what can be given by position has another position."""
    kept = [name for name in old if name in new]
    if new[: len(kept)] != kept:
        yield _breaking(f"{place}: {kind} have another order: {', '.join(new)}")


def _methods(place: str, old: Described, new: Described) -> Iterator[Change]:
    for name, was in old.items():
        if name not in new:
            yield _breaking(f"{place}: method `{name}` is gone")
            continue
        now, member = new[name], f"{place}: method `{name}`"
        yield from _same(f"{member}: kind", was["kind"], now["kind"])
        if now["abstract"] and not was["abstract"]:
            yield _breaking(f"{member} has to be written now")
        for change in _function(member, was, now):
            # A plugin that wrote the method for the old call cannot take the new one.
            written = now["abstract"] and change.kind is ChangeKind.COMPATIBLE
            yield _breaking(change.text) if written else change
    for name, now in new.items():
        if name not in old:
            added = f"{place}: method `{name}` is new"
            yield _breaking(f"{added}, to be written") if now["abstract"] else _compatible(added)


def _function(place: str, old: Described, new: Described) -> Iterator[Change]:
    """Yield the changes of something that a plugin calls."""
    before = {parameter["name"]: parameter for parameter in old["parameters"]}
    now = {parameter["name"]: parameter for parameter in new["parameters"]}
    for name, was in before.items():
        if name not in now:
            yield _breaking(f"{place}: parameter `{name}` is gone")
            continue
        member = f"{place}: parameter `{name}`"
        yield from _same(f"{member}: type", was["type"], now[name]["type"])
        yield from _same(f"{member}: kind", was["kind"], now[name]["kind"])
        if was["default"] is not None and now[name]["default"] is None:
            yield _breaking(f"{member} has no default any more")
        elif was["default"] != now[name]["default"]:
            yield _compatible(f"{member}: its default is {now[name]['default']}")
    for name, parameter in now.items():
        if name not in before:
            added = f"{place}: parameter `{name}` is new"
            optional = parameter["default"] is not None or parameter["kind"].startswith("var_")
            yield _compatible(added) if optional else _breaking(f"{added}, without a default")
    placed = [_placed(parameters) for parameters in (old["parameters"], new["parameters"])]
    yield from _order(place, "parameters", *placed)
    yield from _same(f"{place}: result", old["result"], new["result"])


def _placed(parameters: Sequence[Described]) -> list[str]:
    return [
        parameter["name"] for parameter in parameters if parameter["kind"].startswith("positional")
    ]


def _op(place: str, old: Described, new: Described) -> Iterator[Change]:
    """Yield the changes of an op; each one of its call breaks a kernel, which gets all of it."""
    shapes = [
        [
            (parameter["name"], parameter["kind"], parameter["type"], parameter["default"])
            for parameter in op["parameters"]
        ]
        for op in (old, new)
    ]
    if shapes[0] != shapes[1] or old["schema"] != new["schema"]:
        yield _breaking(
            f"{place}: its call was {_call(old)}, it is {_call(new)}"
            if _call(old) != _call(new)
            else f"{place}: types or kinds of its parameters changed"
        )
    for name in new["gradients"]:
        if name not in old["gradients"]:
            yield _breaking(f"{place}: gradients have to flow to `{name}` now")
    for name in old["gradients"]:
        if name not in new["gradients"]:
            yield _compatible(f"{place}: gradients need not flow to `{name}` any more")
    yield from _names(f"{place}: attribute", old["attributes"], new["attributes"])
    if old["summary"] != new["summary"]:
        yield Change(ChangeKind.WORDING, f"{place}: `summary`")


def _torch(old: Described, new: Described) -> Iterator[Change]:
    """Yield the changes of the torch functions that the core needs; version 1.0 lists none."""
    for name, was in old.items():
        if name not in new:
            yield _compatible(f"torch's `{name}` is not needed any more")
            continue
        now = new[name]
        needed = [(need["optional"], need["abilities"]) for need in (was, now)]
        if needed[0] != needed[1]:
            change = f"torch's `{name}` was {_needed_by(was)}, is {_needed_by(now)}"
            yield _compatible(change) if now["optional"] else _breaking(change)
        elif was["instead"] and not now["instead"]:
            yield _breaking(f"torch's `{name}` is not replaced by `{was['instead']}` any more")
        elif was != now:
            yield Change(ChangeKind.WORDING, f"torch's `{name}`")
    for name, need in new.items():
        if name not in old:
            change = f"torch's `{name}` is {_needed_by(need)}"
            yield _compatible(change) if need["optional"] else _breaking(change)


def _needed_by(need: Described) -> str:
    if need["optional"]:
        return "optional"
    named = " and ".join(f"`{ability}`" for ability in need["abilities"])
    return f"needed by devices with {named}" if named else "needed by every device"


def _call(op: Described) -> str:
    shown = [
        parameter["name"]
        if parameter["default"] is None
        else f"{parameter['name']}={parameter['default']}"
        for parameter in op["parameters"]
    ]
    return f"({', '.join(shown)}) with the schema `{op['schema']}`"


def _same(place: str, old: object, new: object) -> Iterator[Change]:
    if old != new:
        yield _breaking(f"{place} was `{old}`, is `{new}`")
