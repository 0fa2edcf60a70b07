"""The op table: chooses, for each use of an op, which kernel a model gets.

`OpTable.bind` runs when the model is built.  It returns a plain callable, which the module keeps;
nothing of this file runs in a training step.  Every bind leaves a `Resolution` with the kernel
chosen and the reason against each other kernel.  Torch-free until an op is bound.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lmcore.base.errors import ConfigError, PluginError, suggestion
from lmcore.contract.op.records import (
    REFERENCE,
    OpContext,
    OpImpl,
    OpSpec,
    Preference,
    Reject,
    Resolution,
    impl_problem,
    load_target,
    missing_packages,
)
from lmcore.contract.op.signature import signature_problem

__all__ = ["OpTable"]

logger = logging.getLogger(__name__)

_LACKS = {
    "score_bias": "adds no bias to the scores",
    "score_bias_gradient": "gives no gradient of a bias of the scores",
}
"""Reason against a kernel without a trait, for a case with the attribute of the same name."""


class OpTable:
    """The ops of one process: the core's specs, the plugins' kernels, the user's preferences."""

    def __init__(
        self,
        specs: Iterable[OpSpec],
        impls: Iterable[OpImpl] = (),
        *,
        preferences: Preference | None = None,
        strict: bool = False,
        traits: Iterable[str] = (),
        device_plugin: str = "",
    ) -> None:
        """Check the kernels against the specs.

        Args:
            specs: The core's ops.
            impls: Kernels on offer.
            preferences: Ids that the user prefers, by op.
            strict: True to fail if the reference would be bound.
            traits: Traits that every bound kernel must claim.
            device_plugin: Name of the plugin that brings the device.  Its kernels go first among
                kernels of equal priority, and a failure to load one stops the run; another plugin's
                kernel that cannot be loaded is passed over.

        Raises:
            PluginError: A kernel is malformed, names an unknown op, or its id is taken.
            ConfigError: A preference names an unknown op or kernel.
        """
        self.specs = {spec.name: spec for spec in specs}
        self.strict = strict
        self.traits = frozenset(traits)
        self.preferences: Preference = {}
        self.device_plugin = device_plugin
        self.resolutions: list[Resolution] = []
        self._impls: dict[str, dict[str, OpImpl]] = {name: {} for name in self.specs}
        self._bound: dict[str, Callable[..., Any]] = {}
        self._unloadable: dict[tuple[str, str], str] = {}
        self._forbidden_references: list[Resolution] = []
        self._depth = 0
        self.register(impls)
        self.prefer(preferences or {})

    @property
    def impls(self) -> tuple[OpImpl, ...]:
        """The registered kernels, in the order of the ops."""
        return tuple(impl for by_id in self._impls.values() for impl in by_id.values())

    def register(self, impls: Iterable[OpImpl]) -> None:
        """Add kernels: all of them, or none if one is wrong.

        Raises:
            PluginError: A kernel is malformed, names an unknown op, or its id is taken.
        """
        added: dict[tuple[str, str], OpImpl] = {}
        for impl in impls:
            self._check(impl, added)
            added[impl.op, impl.id] = impl
        for impl in added.values():
            self._impls[impl.op][impl.id] = impl

    def _check(self, impl: OpImpl, added: Mapping[tuple[str, str], OpImpl]) -> None:
        problem = impl_problem(impl)
        if problem is not None:
            raise PluginError(
                f"plugin `{impl.plugin}` brings a malformed kernel `{impl.id}` for op `{impl.op}`",
                why=problem,
            )
        if impl.op not in self.specs:
            raise PluginError(
                f"plugin `{impl.plugin}` brings kernel `{impl.id}` for an unknown op `{impl.op}`",
                hint=suggestion(impl.op, self.specs),
            )
        other = self._impls[impl.op].get(impl.id) or added.get((impl.op, impl.id))
        if other or impl.id == REFERENCE:
            owner = other.plugin if other else "lmcore"
            raise PluginError(
                f"kernel id `{impl.id}` of op `{impl.op}` is taken",
                why=f"plugins `{owner}` and `{impl.plugin}` both bring it",
            )

    def prefer(self, preferences: Preference) -> None:
        """Set the ids that the user prefers, by op.

        Raises:
            ConfigError: A name is of an unknown op or kernel.
        """
        self.preferences = dict(preferences)
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

        def rank(impl: OpImpl) -> tuple[Any, ...]:
            foreign = impl.plugin != self.device_plugin
            return (-impl.priority, foreign, impl.plugin, impl.id)

        wanted = self.preferences.get(op, ())
        place = {name: at for at, name in enumerate(wanted)}
        by_rank = sorted(self._impls[op].values(), key=rank)
        return sorted(by_rank, key=lambda impl: place.get(impl.id, len(place)))

    def resolve(self, op: str, context: OpContext) -> Resolution:
        """Return the choice of a kernel for *op* in *context*, with all reasons; loads nothing."""
        unknown = context.attributes.keys() - set(self.specs[op].attributes)
        assert not unknown, f"op `{op}` declares no attribute {sorted(unknown)}"
        wanted = self.preferences.get(op, ())
        # If the reference is among the preferences, only the kernels before it may be chosen.
        allowed = wanted[: wanted.index(REFERENCE)] if REFERENCE in wanted else None
        candidates = self.candidates(op)
        reasons: dict[str, str] = {}
        for impl in candidates:
            reason = self._reject(impl, context)
            if reason is None and allowed is not None and impl.id not in allowed:
                reason = "`reference` is preferred by --ops"
            if reason is not None:
                reasons[impl.id] = reason
        supporting = [impl for impl in candidates if impl.id not in reasons]
        if not supporting:
            source = REFERENCE if allowed is None else "preference"
            return Resolution(op, REFERENCE, "lmcore", source, tuple(reasons.items()), context)
        chosen, *alternatives = supporting
        reasons |= {impl.id: self._outranked(impl, chosen) for impl in alternatives}
        rejected = [(impl.id, reasons[impl.id]) for impl in candidates if impl is not chosen]
        rejected.append((REFERENCE, f"`{chosen.id}` supports the case"))
        if chosen.id in wanted:
            source = "preference"
        elif any(impl.priority == chosen.priority for impl in alternatives):
            source = "tie"
        else:
            source = "priority"
        return Resolution(op, chosen.id, chosen.plugin, source, tuple(rejected), context)

    def _outranked(self, impl: OpImpl, chosen: OpImpl) -> str:
        """Return why *chosen* goes before *impl*, which supports the case as well."""
        if chosen.id in self.preferences.get(impl.op, ()):
            return f"`{chosen.id}` is preferred by --ops"
        if impl.priority != chosen.priority:
            return f"`{chosen.id}` has priority {chosen.priority}, this {impl.priority}"
        if chosen.plugin == impl.plugin:
            decided = "its id comes first"
        elif chosen.plugin == self.device_plugin:
            decided = f"plugin `{chosen.plugin}` brings the device"
        else:
            decided = f"plugin `{chosen.plugin}` comes before `{impl.plugin}` by name"
        return f"`{chosen.id}` has the same priority, {impl.priority}, and goes first: {decided}"

    def _reject(self, impl: OpImpl, context: OpContext) -> str | None:
        if (impl.op, impl.id) in self._unloadable:
            return self._unloadable[impl.op, impl.id]
        lacking = missing_packages(impl)
        if lacking:
            return f"needs `{'`, `'.join(lacking)}`, not installed"
        untrue = sorted(self.traits - impl.traits)
        if untrue:
            return f"does not claim to be {', '.join(untrue)}"
        for name, lack in _LACKS.items():
            if context.attributes.get(name) and name not in impl.traits:
                return f"{lack}: it does not claim the trait `{name}`"
        return self._unsupported(impl, context)

    def _unsupported(self, impl: OpImpl, context: OpContext) -> str | None:
        """Return why *impl* does not support the case; a failing `supports` is one, and logged."""
        if impl.supports is None:
            return None
        try:
            verdict: object = impl.supports(context)
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything
            if problem := self._unanswered(impl, context, error):
                return f"asks for `{problem}`, which is not given"
            reason = f"its `supports` raised {type(error).__name__}: {error}"
        else:
            if verdict is None:
                return None
            if isinstance(verdict, Reject):
                return str(verdict.reason)
            reason = f"its `supports` returned {verdict!r:.80}, not None or a `Reject`"
        logger.warning("kernel `%s` of op `%s` (%s): %s", impl.id, impl.op, impl.plugin, reason)
        return reason

    def _unanswered(self, impl: OpImpl, context: OpContext, error: Exception) -> str | None:
        """Return the attribute that *error* is about, if the op has it and the case does not."""
        if not isinstance(error, KeyError) or not error.args:
            return None
        open_ones = set(self.specs[impl.op].attributes) - context.attributes.keys()
        return next((name for name in open_ones if name == error.args[0]), None)

    def bind(self, op: str, context: OpContext) -> Callable[..., Any]:
        """Choose, load and return the callable for *op* in *context*; keep the `Resolution`.

        Raises:
            PluginError: The chosen kernel is the device's own and cannot be used: its target does
                not exist, or takes other arguments than the op passes.
            ConfigError: `strict`, and only the reference supports the case; raised at the end of
                `bind_all`, if within it.
        """
        case = _case(op, context)
        if case not in self._bound:
            resolution, self._bound[case] = self._choose(op, context)
            if resolution not in self.resolutions:
                self.resolutions.append(resolution)
                self._warn_unmet_preferences(resolution)
            if self.strict and resolution.chosen == REFERENCE:
                self._forbidden_references.append(resolution)
        if not self._depth:
            self._raise_forbidden()
        return self._bound[case]

    @contextmanager
    def bind_all(self) -> Iterator[None]:
        """Delay the errors of `--strict-ops` until all is bound, to name every op at once.

        Raises:
            ConfigError: At the end, where a reference was bound and `strict` forbids it.
        """
        self._depth += 1
        try:
            yield
        except BaseException:
            self._take_forbidden()
            raise
        finally:
            self._depth -= 1
        if not self._depth:
            self._raise_forbidden()

    def _choose(self, op: str, context: OpContext) -> tuple[Resolution, Callable[..., Any]]:
        while True:
            resolution = self.resolve(op, context)
            try:
                return resolution, self._load(op, resolution.chosen)
            except PluginError as error:
                if resolution.chosen == REFERENCE:
                    raise
                why = ": ".join(part for part in (error.what, error.why) if part)
                if not self.device_plugin or resolution.plugin == self.device_plugin:
                    self._unloadable[op, resolution.chosen] = f"cannot be used: {why}"
                    other = self.resolve(op, context).chosen
                    raise PluginError(
                        f"kernel `{resolution.chosen}` of op `{op}` cannot be used",
                        why=f"plugin `{resolution.plugin}`: {why}",
                        hint="repair the package that it needs, update the plugin, or continue "
                        f"without the kernel: `--ops {op}={other}`",
                    ) from error
                reason = " ".join(f"cannot be used: {why}".split())
                logger.warning(
                    "kernel `%s` of op `%s` (%s) %s",
                    *(resolution.chosen, op, resolution.plugin, reason),
                )
                self._unloadable[op, resolution.chosen] = reason

    def _load(self, op: str, chosen: str) -> Callable[..., Any]:
        reference = load_target(self.specs[op].reference)
        if chosen == REFERENCE:
            return reference
        target = self._impls[op][chosen].load
        function = load_target(target)
        problem = signature_problem(function, reference)
        if problem is not None:
            raise PluginError(f"kernel target `{target}` cannot be called as the op is: {problem}")
        return function

    def _take_forbidden(self) -> list[Resolution]:
        """Return the references that were bound in spite of `strict`, and forget that they were."""
        unmet, self._forbidden_references = self._forbidden_references, []
        for resolution in unmet:
            self._bound.pop(_case(resolution.op, resolution.context), None)
        return unmet

    def _raise_forbidden(self) -> None:
        unmet = self._take_forbidden()
        if not unmet:
            return
        ops = list(dict.fromkeys(resolution.op for resolution in unmet))
        named = f"op `{ops[0]}` has" if len(ops) == 1 else f"ops `{'`, `'.join(ops)}` have"
        raise ConfigError(
            f"`--strict-ops`: {named} no kernel for this case",
            why="\n".join(dict.fromkeys(_why_reference(resolution) for resolution in unmet)),
            hint="leave `--strict-ops` out, or install a plugin whose kernels support the case; "
            f"`lmcore ops explain {ops[0]}` says more",
        )

    def _warn_unmet_preferences(self, resolution: Resolution) -> None:
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

    def choices(self) -> dict[str, str]:
        """Return kernel and plugin by case, of all that was bound; reasons are left out."""
        return {
            _case(resolution.op, resolution.context): f"{resolution.plugin}:{resolution.chosen}"
            for resolution in self.resolutions
        }

    def fingerprint(self) -> str:
        """Return a digest of `choices`: equal for equal choices, in whatever order they were made.

        The reasons against other kernels are no part of it: a reason may name a path or a host.
        """
        import hashlib  # here: it takes two milliseconds, and no `--help` needs it

        text = json.dumps(self.choices(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: the preferences, the fingerprint, and every resolution."""
        return {
            "fingerprint": self.fingerprint(),
            "strict": self.strict,
            "traits": sorted(self.traits),
            "preferences": {op: list(ids) for op, ids in self.preferences.items()},
            "ops": [resolution.to_dict() for resolution in self.resolutions],
        }


def _case(op: str, context: OpContext) -> str:
    """Return a case as text that is equal on every rank."""
    attributes = dict(sorted(context.attributes.items()))
    return json.dumps([op, context.device_type, context.dtype, attributes])


def _why_reference(resolution: Resolution) -> str:
    reasons = "; ".join(f"`{name}`: {why}" for name, why in resolution.rejected)
    case = f"{resolution.op} ({resolution.context.device_type}, {resolution.context.dtype})"
    return f"{case}: {reasons or 'no plugin brings one'}"
