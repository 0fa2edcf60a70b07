"""The op table: what an op means, which kernels can do it, and which one a model gets.

`OpTable.bind` runs once per use of an op, when the model is built.  It returns a plain callable,
which the module keeps; nothing of this file runs in a training step.  Every bind leaves a
`Resolution` that says what was chosen and why each other kernel was not.

Torch-free: kernels and references are named as "package.module:function" and loaded when bound.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcore.errors import ConfigError, PluginError, suggestion

__all__ = [
    "REFERENCE",
    "OpContext",
    "OpImpl",
    "OpSpec",
    "OpTable",
    "Preference",
    "Reject",
    "Resolution",
    "Tolerance",
    "load_target",
    "parse_preferences",
]

logger = logging.getLogger(__name__)

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
        summary: What it computes.
        tolerances: Allowed difference by dtype name.
        has_backward: Whether gradients flow through it.
    """

    name: str
    reference: str
    schema: str
    summary: str
    tolerances: Mapping[str, Tolerance]
    has_backward: bool = True


@dataclass(frozen=True)
class OpContext:
    """The case an op is bound for.

    Attributes:
        device_type: torch's device type.
        dtype: Name of the dtype that the op's inputs have.
        attributes: What `supports` may ask for: head_dim, causal, dropout, vocab_size, compile.
    """

    device_type: str
    dtype: str
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reject:
    """Why a kernel does not do a case, in words for a person."""

    reason: str


@dataclass(frozen=True)
class OpImpl:
    """A kernel for an op, as a plugin offers it.

    Attributes:
        op: Name of the op.
        id: Unique among the op's kernels: "sdpa".
        load: Target of the callable, with the reference's signature.
        priority: The highest that supports the case is chosen; the reference has 0.
        requires: Top-level packages that must be importable.
        supports: Says None for a case it does, a `Reject` otherwise; None supports every case.
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
    """What one bind decided.

    Attributes:
        op: Name of the op.
        chosen: Id of the kernel, "reference" for the core's own.
        plugin: Plugin that brought it, "lmcore" for the core.
        source: "priority", "preference" or "reference".
        rejected: Ids with the reason each was not chosen, in the order they were considered.
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
"""For an op's name, the ids that the user would rather have, best first."""


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
    except Exception as cause:
        raise PluginError(
            f"kernel target `{target}` cannot be loaded", why=f"{type(cause).__name__}: {cause}"
        ) from cause
    if not callable(found):
        raise PluginError(f"kernel target `{target}` is not callable")
    return found  # type: ignore[no-any-return]


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # a parent is missing, or a module without a spec is loaded
        return False


class OpTable:
    """The ops of one process: the core's specs, the plugins' kernels, the user's wishes."""

    def __init__(
        self,
        specs: Iterable[OpSpec],
        impls: Iterable[OpImpl] = (),
        *,
        preferences: Preference | None = None,
        strict: bool = False,
        traits: Iterable[str] = (),
    ) -> None:
        """Check the kernels against the specs.

        Args:
            specs: The core's ops.
            impls: Kernels on offer.
            preferences: Ids the user would rather have, by op.
            strict: Fail where the reference would be bound.
            traits: Traits that every bound kernel must claim.

        Raises:
            PluginError: A kernel names an unknown op, or an id is taken.
            ConfigError: A preference names an unknown op or kernel.
        """
        self.specs = {spec.name: spec for spec in specs}
        self.strict = strict
        self.traits = frozenset(traits)
        self.preferences = dict(preferences or {})
        self.resolutions: list[Resolution] = []
        self._impls: dict[str, dict[str, OpImpl]] = {name: {} for name in self.specs}
        for impl in impls:
            self._add(impl)
        self._check_preferences()

    def _add(self, impl: OpImpl) -> None:
        if impl.op not in self.specs:
            raise PluginError(
                f"plugin `{impl.plugin}` brings kernel `{impl.id}` for an unknown op `{impl.op}`",
                hint=suggestion(impl.op, self.specs),
            )
        known = self._impls[impl.op]
        if impl.id in known or impl.id == REFERENCE:
            owner = known[impl.id].plugin if impl.id in known else "lmcore"
            raise PluginError(
                f"kernel id `{impl.id}` of op `{impl.op}` is taken",
                why=f"plugins `{owner}` and `{impl.plugin}` both bring it",
            )
        known[impl.id] = impl

    def _check_preferences(self) -> None:
        for op, ids in self.preferences.items():
            if op not in self.specs:
                raise ConfigError(f"`--ops {op}=...`: unknown op", hint=suggestion(op, self.specs))
            for wanted in ids:
                if wanted != REFERENCE and wanted not in self._impls[op]:
                    raise ConfigError(
                        f"`--ops {op}={wanted}`: no such kernel here",
                        hint=suggestion(wanted, [*self._impls[op], REFERENCE]),
                    )

    def candidates(self, op: str) -> list[OpImpl]:
        """Return the kernels of *op* in the order in which they are considered."""
        by_priority = sorted(self._impls[op].values(), key=lambda impl: (-impl.priority, impl.id))
        wanted = self.preferences.get(op, ())
        rank = {name: place for place, name in enumerate(wanted)}
        return sorted(by_priority, key=lambda impl: rank.get(impl.id, len(rank)))

    def resolve(self, op: str, context: OpContext) -> Resolution:
        """Say which kernel *op* gets in *context*, and why not the others; loads nothing."""
        wanted = self.preferences.get(op, ())
        rejected: list[tuple[str, str]] = []
        chosen: OpImpl | None = None
        for impl in self.candidates(op):
            if chosen is not None:
                rejected.append((impl.id, f"`{chosen.id}` is preferred"))
                continue
            if REFERENCE in wanted and impl.id not in wanted[: wanted.index(REFERENCE)]:
                rejected.append((impl.id, "`reference` is preferred by --ops"))
                continue
            reason = self._reject(impl, context)
            if reason is None:
                chosen = impl
            else:
                rejected.append((impl.id, reason))
        if chosen is None:
            source = "preference" if REFERENCE in wanted else REFERENCE
            return Resolution(op, REFERENCE, "lmcore", source, tuple(rejected), context)
        rejected.append((REFERENCE, f"`{chosen.id}` is preferred"))
        source = "preference" if chosen.id in wanted else "priority"
        return Resolution(op, chosen.id, chosen.plugin, source, tuple(rejected), context)

    def _reject(self, impl: OpImpl, context: OpContext) -> str | None:
        lacking = [name for name in impl.requires if not _is_installed(name)]
        if lacking:
            return f"needs `{'`, `'.join(lacking)}`, not installed"
        untrue = sorted(self.traits - impl.traits)
        if untrue:
            return f"does not claim to be {', '.join(untrue)}"
        return self._unsupported(impl, context)

    @staticmethod
    def _unsupported(impl: OpImpl, context: OpContext) -> str | None:
        """Return why *impl* does not do the case; one that cannot say is warned about and out."""
        if impl.supports is None:
            return None
        try:
            verdict: object = impl.supports(context)
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything
            reason = f"its `supports` raised {type(error).__name__}: {error}"
        else:
            if verdict is None:
                return None
            if isinstance(verdict, Reject):
                return verdict.reason
            reason = f"its `supports` returned {verdict!r:.80}, not None or a `Reject`"
        logger.warning("kernel `%s` of op `%s` (%s): %s", impl.id, impl.op, impl.plugin, reason)
        return reason

    def bind(self, op: str, context: OpContext) -> Callable[..., Any]:
        """Choose, load and return the callable for *op* in *context*; keep the `Resolution`.

        Raises:
            PluginError: The chosen kernel cannot be loaded.
            ConfigError: `strict`, and only the reference supports the case.
        """
        resolution = self.resolve(op, context)
        if resolution.chosen == REFERENCE:
            if self.strict:
                reasons = "; ".join(f"{name}: {why}" for name, why in resolution.rejected)
                raise ConfigError(
                    f"`--strict-ops`: op `{op}` has no kernel for this case",
                    why=reasons or "no plugin brings one",
                    hint="leave `--strict-ops` out, or install a kernel that supports it",
                )
            target = self.specs[op].reference
        else:
            target = self._impls[op][resolution.chosen].load
        function = self._load(resolution, target)
        if resolution not in self.resolutions:
            self.resolutions.append(resolution)
            self._tell_unmet(resolution)
        return function

    @staticmethod
    def _load(resolution: Resolution, target: str) -> Callable[..., Any]:
        try:
            return load_target(target)
        except PluginError as error:
            op = resolution.op
            raise PluginError(
                f"kernel `{resolution.chosen}` of op `{op}` cannot be loaded",
                why=f"plugin `{resolution.plugin}`: {error.what}: {error.why}",
                hint=f"mend the plugin, or go on without the kernel: `--ops {op}={REFERENCE}`",
            ) from error

    def _tell_unmet(self, resolution: Resolution) -> None:
        """Warn of kernels that the user wanted before the chosen one and did not get."""
        wanted = self.preferences.get(resolution.op, ())
        if resolution.chosen in wanted:
            wanted = wanted[: wanted.index(resolution.chosen)]
        reasons = dict(resolution.rejected)
        for name in wanted:
            logger.warning(
                "`--ops %s=%s` cannot be met: %s; using `%s`",
                *(resolution.op, name, reasons[name], resolution.chosen),
            )

    def fingerprint(self) -> str:
        """Return a digest of all choices so far: equal on ranks that run the same kernels."""
        choices = sorted(json.dumps(one.to_dict(), sort_keys=True) for one in self.resolutions)
        return hashlib.sha256("\n".join(choices).encode()).hexdigest()
