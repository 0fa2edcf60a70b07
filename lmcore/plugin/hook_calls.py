"""Typed functions for the hooks of a run's plugins; the results are checked here.

The chosen plugin's failure is the run's failure.  A plugin that brings no device and only adds to
others' (kernels, policies) is left out with a warning when it fails.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from lmcore.base.errors import DeviceError, LmcoreError, PluginError
from lmcore.contract.communication import CommBackend, registered_comm_backends
from lmcore.contract.device import Device
from lmcore.contract.op.records import OpImpl, Preference
from lmcore.contract.op.spec import OP_SPECS
from lmcore.contract.op.table import OpTable
from lmcore.contract.precision.policy import PrecisionPolicy, standard_precision_policies
from lmcore.contract.probe import Check, Problem
from lmcore.contract.recompute import RecomputePolicy, standard_recompute_policies
from lmcore.contract.transfer.staging import CheckpointStager
from lmcore.plugin.record import HookError, PluginRecord, PluginSet
from lmcore.plugin.selection import Selection

if TYPE_CHECKING:
    from lmcore.config.section import Config

__all__ = [
    "DEFAULT_OFFERS",
    "build_op_table",
    "checkpoint_stagers",
    "choose_comm_backend",
    "comm_backends",
    "create_device",
    "doctor_checks",
    "launch_env",
    "op_impls",
    "precision_policies",
    "recompute_policies",
    "run_end",
    "run_start",
    "validate_config",
    "within_dtypes",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")
Named = TypeVar("Named", PrecisionPolicy, RecomputePolicy, CheckpointStager)

DEFAULT_OFFERS: Mapping[str, Callable[[Device], list[Any]]] = {
    "lmcore_comm_backends": registered_comm_backends,
    "lmcore_precision_policies": standard_precision_policies,
    "lmcore_recompute_policies": standard_recompute_policies,
}
"""Offers of the core for a device whose plugin does not implement the hook."""

_OWNED = (CommBackend, OpImpl, PrecisionPolicy, RecomputePolicy, CheckpointStager)
"""Records whose field `plugin` the core fills in."""


def launch_env(
    plugins: PluginSet,
    selection: Selection,
    rank_info: Mapping[str, Any],
    env: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables to add to a worker's environment before torch is imported there.

    Variables that *env* already has keep their values; a plugin's other value for one is logged.

    Args:
        plugins: result of `discover`.
        selection: the choice of the device.
        rank_info: rank, local_rank, world_size and local_world_size.
        env: the environment that the worker inherits.

    Raises:
        PluginError: The chosen plugin failed, or two plugins set different values of a variable
            that the user has not set.
    """
    hook = "lmcore_launch_env"
    wanted: dict[str, tuple[str, PluginRecord]] = {}
    for record in _implementers(plugins, selection, hook):
        try:
            own = _launch_env_of(record, selection, rank_info)
        except LmcoreError as error:
            _skip_or_raise(record, selection, hook, error)
            continue
        for name, value in own.items():
            if name in env:
                if env[name] != value:
                    logger.info(
                        "environment variable `%s=%s` is kept; plugin `%s` would set `%s`",
                        *(name, env[name], record.name, value),
                    )
                continue
            other, owner = wanted.setdefault(name, (value, record))
            if other != value:
                raise PluginError(
                    f"plugins {owner.label} and {record.label} disagree about the environment",
                    why=f"`{name}` would be `{other}` for the one and `{value}` for the other",
                    hint=f"set `{name}` yourself, or leave one out with `--plugin-off`",
                )
    return {name: value for name, (value, _) in wanted.items()}


def _launch_env_of(
    record: PluginRecord, selection: Selection, rank_info: Mapping[str, Any]
) -> Mapping[str, str]:
    hook = "lmcore_launch_env"
    found = record.call(hook, probe=selection.probe, rank_info=dict(rank_info))
    if not isinstance(found, Mapping) or not all(
        isinstance(part, str) for pair in found.items() for part in pair
    ):
        raise _wrong(record, hook, found, "a mapping of strings to strings")
    return found


def create_device(plugins: PluginSet, selection: Selection, config: Config) -> Device:
    """Return the device of this process; once per process, torch is loaded from here on.

    Raises:
        PluginError: The plugin raised, returned something else, or a device of another type.
    """
    record = plugins.usable_record(selection.plugin)
    hook = "lmcore_create_device"
    if not record.implements(hook):
        raise PluginError(f"plugin {record.label} has no `{hook}`, and its device was chosen")
    try:
        device = record.call(hook, probe=selection.probe, config=config)
    except LmcoreError as error:
        _add_evidence(error, selection)
        raise
    if not isinstance(device, Device):
        raise _wrong(record, hook, device, "a `Device`")
    if device.type != selection.probe.device_type:
        raise PluginError(
            f"plugin {record.label} created a device of type `{device.type}`",
            why=f"its probe promised `{selection.probe.device_type}`",
        )
    return device


def _add_evidence(error: LmcoreError, selection: Selection) -> None:
    """Add the probe's result to an error: a device can vanish between probe and creation."""
    found = "; ".join(selection.probe.evidence) or "it gave no evidence"
    seen = f"its probe had reported {selection.probe.state}: {found}"
    error.why = f"{error.why}\n{seen}" if error.why else seen
    if error.hint is None or isinstance(error, HookError):
        error.hint = "`lmcore doctor` tries the device; see whether another process holds it"


def comm_backends(
    plugins: PluginSet, selection: Selection, device: Device
) -> tuple[CommBackend, ...]:
    """Return the ways in which processes on this device can exchange tensors."""
    return _collect(plugins, selection, "lmcore_comm_backends", CommBackend, device=device)


def op_impls(plugins: PluginSet, selection: Selection, device: Device) -> tuple[OpImpl, ...]:
    """Return the kernels on offer, each with the name of its plugin."""
    return build_op_table(plugins, selection, device).impls


def precision_policies(
    plugins: PluginSet, selection: Selection, device: Device
) -> tuple[PrecisionPolicy, ...]:
    """Return the precisions on offer; one in a dtype that the device lacks is unavailable."""
    hook = "lmcore_precision_policies"
    offered = _collect_named(plugins, selection, hook, PrecisionPolicy, device=device)
    return tuple(within_dtypes(policy, device) for policy in offered)


def within_dtypes(policy: PrecisionPolicy, device: Device) -> PrecisionPolicy:
    """Return the policy, unavailable if the device does not compute in its dtype."""
    if policy.compute in device.dtypes:
        return policy
    reason = (
        f"device `{device.type}` computes products in {', '.join(sorted(device.dtypes))}, "
        f"not in {policy.compute}"
    )
    return dataclasses.replace(policy, available=lambda: reason)


def recompute_policies(
    plugins: PluginSet, selection: Selection, device: Device
) -> tuple[RecomputePolicy, ...]:
    """Return the recompute policies on offer."""
    hook = "lmcore_recompute_policies"
    return _collect_named(plugins, selection, hook, RecomputePolicy, device=device)


def checkpoint_stagers(
    plugins: PluginSet, selection: Selection, device: Device
) -> tuple[CheckpointStager, ...]:
    """Return the ways on offer to bring tensors to the host before a checkpoint is written."""
    hook = "lmcore_checkpoint_stagers"
    return _collect_named(plugins, selection, hook, CheckpointStager, device=device)


def validate_config(
    plugins: PluginSet, selection: Selection, device: Device, config: Config
) -> tuple[Problem, ...]:
    """Return what of the configuration device and plugins cannot do; the caller reports it."""
    found = _collect(
        plugins, selection, "lmcore_validate_config", Problem, device=device, config=config
    )
    return (*_missing_abilities(device, config), *found)


def _missing_abilities(device: Device, config: Config) -> Iterator[Problem]:
    """Yield the settings that need an ability for whose absence the device gives a reason."""
    asked = {"compile": config.training.compile, "deterministic": config.accelerator.deterministic}
    for ability, is_set in asked.items():
        if is_set and ability in device.missing:
            yield Problem(
                f"`--{ability}` does not work on device `{device.type}`",
                why=device.missing[ability],
                hint=f"leave `--{ability}` out, or use another device",
            )


def doctor_checks(record: PluginRecord) -> tuple[Check, ...]:
    """Return one plugin's checks; none for a plugin without them."""
    if not record.implements("lmcore_doctor"):
        return ()
    found = record.call("lmcore_doctor", probe=record.probe)
    return tuple(_checked_list(record, "lmcore_doctor", found, Check))


def run_start(plugins: PluginSet, selection: Selection, run: Mapping[str, Any]) -> None:
    """Call `lmcore_run_start` of the run's plugins."""
    for record in _implementers(plugins, selection, "lmcore_run_start"):
        try:
            record.call("lmcore_run_start", run=dict(run))
        except LmcoreError as error:
            _skip_or_raise(record, selection, "lmcore_run_start", error)


def run_end(plugins: PluginSet, selection: Selection, run: Mapping[str, Any]) -> None:
    """Call `lmcore_run_end` of the run's plugins; a failure is logged and does not fail the run."""
    for record in _implementers(plugins, selection, "lmcore_run_end"):
        try:
            record.call("lmcore_run_end", run=dict(run))
        except LmcoreError as error:
            logger.warning("%s", error)


def build_op_table(
    plugins: PluginSet,
    selection: Selection,
    device: Device,
    *,
    preferences: Preference | None = None,
    strict: bool = False,
    deterministic: bool = False,
) -> OpTable:
    """Return the op table of this process.

    Args:
        plugins: result of `discover`.
        selection: the choice of the device.
        device: device that the kernels run on.
        preferences: value of `--ops`.
        strict: value of `--strict-ops`: True if a reference may not be bound.
        deterministic: value of `--deterministic`: True to bind only kernels that claim it.
    """
    table = OpTable(
        OP_SPECS,
        strict=strict,
        traits=["deterministic"] if deterministic else [],
        device_plugin=selection.plugin,
    )
    hook = "lmcore_op_impls"
    for record in plugins.participants(selection.plugin):
        offered = _offered(record, selection, hook, OpImpl, device=device)
        try:
            table.register(offered)
        except PluginError as error:
            _skip_or_raise(record, selection, hook, error)
    table.prefer(preferences or {})
    return table


def choose_comm_backend(backends: Iterable[CommBackend], wanted: str | None = None) -> CommBackend:
    """Return the available backend of the highest priority.

    Args:
        backends: backends of the device.
        wanted: name given by `--distributed-backend`; only this one is used.

    Raises:
        DeviceError: None is available, or the wanted one is not; with the reason of each.
    """
    ranked = sorted(backends, key=lambda backend: -backend.priority)
    reasons = []
    for backend in ranked:
        if wanted not in {None, backend.name}:
            continue
        reason = backend.available()
        if reason is None:
            return backend
        reasons.append(f"`{backend.name}`: {reason}")
    if wanted is not None:
        raise _no_such_backend(wanted, ranked, reasons)
    raise DeviceError(
        "processes on this device cannot exchange tensors",
        why="\n".join(reasons) or "its plugin brings no communication backend",
        hint="run one process: `--nproc-per-node 1`",
    )


def _no_such_backend(
    wanted: str, backends: Sequence[CommBackend], reasons: Sequence[str]
) -> DeviceError:
    usable = [backend.name for backend in backends if backend.available() is None]
    offered = ", ".join(f"`{backend.name}`" for backend in backends) or "none"
    return DeviceError(
        f"`--distributed-backend {wanted}` cannot be used on this device",
        why="\n".join(reasons) or f"its plugin does not have it; it offers {offered}",
        hint=f"leave it out: `{usable[0]}` is used then" if usable else "see `lmcore doctor`",
    )


def _implementers(plugins: PluginSet, selection: Selection, hook: str) -> list[PluginRecord]:
    return [record for record in plugins.participants(selection.plugin) if record.implements(hook)]


def _collect(
    plugins: PluginSet, selection: Selection, hook: str, kind: type[T], **arguments: Any
) -> tuple[T, ...]:
    """Return what all plugins of the run offer under a hook."""
    found: list[T] = []
    for record in plugins.participants(selection.plugin):
        found += _offered(record, selection, hook, kind, **arguments)
    return tuple(found)


def _collect_named(
    plugins: PluginSet, selection: Selection, hook: str, kind: type[Named], **arguments: Any
) -> tuple[Named, ...]:
    """Return what all plugins of the run offer, each name once; a second one fails its plugin."""
    found: list[Named] = []
    for record in plugins.participants(selection.plugin):
        offered: list[Named] = _offered(record, selection, hook, kind, **arguments)
        names = [policy.name for policy in (*found, *offered)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            error = PluginError(
                f"plugin {record.label} offers `{twice[0]}` from `{hook}`, which is there already",
                why="names are unique over all plugins of a run",
                hint=f"update or remove `{record.distribution}`",
            )
            _skip_or_raise(record, selection, hook, error)
        else:
            found += offered
    return tuple(found)


def _offered(
    record: PluginRecord, selection: Selection, hook: str, kind: type[T], **arguments: Any
) -> list[T]:
    if not record.implements(hook):
        default = DEFAULT_OFFERS.get(hook)
        is_device_plugin = record.name == selection.plugin
        found = default(arguments["device"]) if default and is_device_plugin else []
        return _owned(found, "lmcore")
    try:
        found = _checked_list(record, hook, record.call(hook, **arguments), kind)
        return _owned(found, record.name)
    except LmcoreError as error:
        _skip_or_raise(record, selection, hook, error)
        return []


def _owned(offers: list[T], plugin: str) -> list[T]:
    return [
        dataclasses.replace(offer, plugin=plugin) if isinstance(offer, _OWNED) else offer
        for offer in offers
    ]


def _skip_or_raise(
    record: PluginRecord, selection: Selection, hook: str, error: LmcoreError
) -> None:
    """Raise the chosen plugin's error; warn of any other plugin's and continue without it."""
    if record.name == selection.plugin:
        raise error
    logger.warning("plugin %s is left out at `%s`: %s", record.label, hook, error)


def _checked_list(record: PluginRecord, hook: str, found: object, kind: type[T]) -> list[T]:
    wanted = f"a list of `{kind.__name__}`"
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        raise _wrong(record, hook, found, wanted)
    for each in found:
        if not isinstance(each, kind):
            raise _wrong(record, hook, each, wanted)
    return list(found)


def _wrong(record: PluginRecord, hook: str, found: object, wanted: str) -> PluginError:
    return PluginError(
        f"plugin {record.label} returned `{type(found).__name__}` from `{hook}`",
        why=f"the hook returns {wanted}; it returned {found!r:.200}",
        hint=f"update or remove `{record.distribution}`, or report this to its authors",
    )
