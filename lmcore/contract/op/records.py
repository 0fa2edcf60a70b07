"""Records of ops, of the kernels that plugins offer for them, and of the choice among kernels.

The records of the contract; `lmcore.contract.op.table` chooses among kernels, `op_spec` lists
the ops and `op_context` the attributes of a case that a kernel may read.

Torch-free: kernels and references are named as "package.module:function" and loaded when bound.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcore.base.errors import ConfigError, PluginError

__all__ = [
    "REFERENCE",
    "OpContext",
    "OpImpl",
    "OpSpec",
    "Preference",
    "Reject",
    "Resolution",
    "Tolerance",
    "impl_problem",
    "load_target",
    "missing_packages",
    "parse_preferences",
]

REFERENCE = "reference"
"""The id under which the core's own implementation of an op is listed."""


@dataclass(frozen=True)
class Tolerance:
    """Largest difference from the reference in higher precision: absolute, and relative."""

    absolute: float
    relative: float


@dataclass(frozen=True)
class OpSpec:
    """An op as the core declares it.

    Attributes:
        name: "layer_norm".
        reference: Target of the function that is the op's semantics, default and oracle.
        schema: The call, with shapes, in one line.
        summary: the computation, in one line.
        tolerances: Allowed difference by dtype name.
        gradients: Arguments to which gradients flow; a kernel need not give any other one.
        attributes: names of `OpAttributes` that a case of the op has.
    """

    name: str
    reference: str
    schema: str
    summary: str
    tolerances: Mapping[str, Tolerance]
    gradients: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()

    @property
    def has_backward(self) -> bool:
        """True if gradients flow through the op."""
        return bool(self.gradients)


@dataclass(frozen=True)
class OpContext:
    """The case an op is bound for.

    Attributes:
        device_type: torch's device type.
        dtype: Name of the dtype that the op's inputs have.
        attributes: values of the attributes that the op's spec declares, by name.  A case of
            `lmcore ops explain` has only the given ones: read them with `.get` if you can.
    """

    device_type: str
    dtype: str
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reject:
    """The reason why a kernel does not do a case, for messages."""

    reason: str


@dataclass(frozen=True)
class OpImpl:
    """A kernel for an op, as a plugin offers it.

    Attributes:
        op: Name of the op.
        id: Unique among the op's kernels: "sdpa".
        load: Target of the callable, with the reference's signature.
        priority: the kernel of the highest priority that supports the case is chosen.  Of equal
            ones the device's own plugin goes first, then the plugin's name and the id decide.
            The reference comes last.
        requires: Packages that must be importable.
        supports: returns None for a case that the kernel does, else a `Reject`; None supports every
            case.  Also called if another kernel goes first, so that the choice can be explained.
        traits: Claims that a user may insist on: "deterministic", "fused".
        plugin: Name of the plugin; filled in by the core.
    """

    op: str
    id: str
    load: str
    priority: int = 10
    requires: tuple[str, ...] = ()
    supports: Callable[[OpContext], Reject | None] | None = None
    traits: frozenset[str] = frozenset()
    plugin: str = ""


@dataclass(frozen=True)
class Resolution:
    """The decision of one bind.

    Attributes:
        op: Name of the op.
        chosen: Id of the kernel, "reference" for the core's own.
        plugin: plugin that offers it, "lmcore" for the core.
        source: "preference" (the user's), "priority", "tie" (another kernel that supports the case
            has the same priority; its reason says what decided) or "reference".
        rejected: Ids with the reason each was not chosen, in the order of their rank.
        context: The case.
    """

    op: str
    chosen: str
    plugin: str
    source: str
    rejected: tuple[tuple[str, str], ...]
    context: OpContext

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, for `kernels.json`."""
        return {
            "op": self.op,
            "chosen": self.chosen,
            "plugin": self.plugin,
            "source": self.source,
            "rejected": [{"id": name, "reason": reason} for name, reason in self.rejected],
            "device_type": self.context.device_type,
            "dtype": self.context.dtype,
            "attributes": dict(self.context.attributes),
        }


Preference = Mapping[str, tuple[str, ...]]
"""Ids that the user prefers, best first, by the op's name."""


def parse_preferences(entries: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the preferences of `--ops attention=flash,sdpa layer_norm=reference`.

    Raises:
        ConfigError: An entry is not of the form `op=id,id`, or an op is named twice.
    """
    found: dict[str, tuple[str, ...]] = {}
    for entry in entries:
        op, separator, ids = entry.partition("=")
        names = tuple(part.strip() for part in ids.split(",") if part.strip())
        if not separator or not op.strip() or not names:
            raise ConfigError(
                f"`--ops {entry}` is not a preference",
                hint="write `--ops attention=sdpa,reference`",
            )
        if op.strip() in found:
            raise ConfigError(f"`--ops` names `{op.strip()}` twice")
        found[op.strip()] = names
    return found


def load_target(target: str) -> Callable[..., Any]:
    """Return the callable that "package.module:function" names.

    Raises:
        PluginError: The module or the attribute does not exist, or it is not callable.
    """
    module_name, _, attribute = target.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (Exception, SystemExit) as cause:
        raise PluginError(
            f"kernel target `{target}` cannot be loaded", why=f"{type(cause).__name__}: {cause}"
        ) from cause
    if not callable(found):
        raise PluginError(f"kernel target `{target}` is not callable")
    return found  # type: ignore[no-any-return]


def missing_packages(impl: OpImpl) -> list[str]:
    """Return the packages of `requires` that are not installed; imports none of them."""
    return [name for name in impl.requires if not _is_installed(name)]


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # a parent is missing, or a module without a spec is loaded
        return False


def impl_problem(impl: OpImpl) -> str | None:
    """Return the problem of the first field of a wrong type in a kernel's record, or None."""
    fields = {
        "op": (_is_word(impl.op), "a name"),
        "id": (_is_word(impl.id) and "=" not in impl.id and "," not in impl.id, "a word"),
        "load": (isinstance(impl.load, str), "text such as `package.module:function`"),
        "priority": (type(impl.priority) is int, "an integer"),
        "requires": (_are_words(impl.requires, (tuple, list)), "a tuple of names"),
        "supports": (impl.supports is None or callable(impl.supports), "a function or None"),
        "traits": (_are_words(impl.traits, (frozenset, set)), "a frozenset of names"),
    }
    for name, (right, wanted) in fields.items():
        if not right:
            return f"its `{name}` is {getattr(impl, name)!r:.80}, and {wanted} is wanted"
    return None


def _is_word(value: object) -> bool:
    return isinstance(value, str) and value != "" and not any(map(str.isspace, value))


def _are_words(values: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(values, kinds) and all(_is_word(value) for value in values)  # type: ignore[attr-defined]
