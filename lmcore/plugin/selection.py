"""Choice of the plugin whose device a run uses: once, in the launcher, by fixed rules.

In order: the user's choice wins; hardware that is present and unusable stops the run; the present
accelerator of the highest priority; the CPU only where every other plugin says ABSENT.  A plugin
that could not answer has not said ABSENT.  docs/explanation/plugins.md gives the reasons.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lmcore.base.errors import DeviceError, PluginError, nearest
from lmcore.contract.probe import Probe, ProbeState
from lmcore.plugin.known_packages import device_packages
from lmcore.plugin.record import CPU, PluginRecord, PluginSet, PluginState

__all__ = [
    "HANDED_DOWN",
    "REQUEST",
    "Selection",
    "UnknownDeviceError",
    "chosen_plugin",
    "select",
    "verify",
]

REQUEST = "LMCORE_DEVICE"
"""Environment variable: the device type (or plugin) to use; `--device` goes before it."""

HANDED_DOWN = "LMCORE_SELECTION"
"""Environment variable: the launcher's `Selection` as JSON, for the workers that it starts."""


@dataclass(frozen=True)
class Selection:
    """The decision, as the launcher hands it to every worker.

    Attributes:
        plugin: Name of the chosen plugin.
        distribution, version: The package that brings it.
        probe: Result of its probe.
        reason: Reason for the choice, one line.
        notice: One line for the user if the decision may be unexpected.
        warnings: Plugins that are installed and out of service, or slow, a line each.
    """

    plugin: str
    distribution: str
    version: str
    probe: Probe
    reason: str
    notice: str | None = None
    warnings: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the decision as one line of JSON, for a worker's environment."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Selection:
        """Return the decision that `to_json` wrote.

        Raises:
            PluginError: It is something else.
        """
        try:
            values = json.loads(text)
            values |= {
                "probe": Probe.from_dict(values["probe"]),
                "warnings": tuple(values["warnings"]),
            }
            return cls(**values)
        except (ValueError, KeyError, TypeError) as cause:
            raise PluginError(
                f"the launcher's device selection cannot be read: `{text:.80}`",
                why=f"{type(cause).__name__}: {cause}",
                hint="launcher and workers need the same version of lmcore",
            ) from cause


def select(
    plugins: PluginSet, *, requested: str | None = None, env: Mapping[str, str] = os.environ
) -> Selection:
    """Choose the plugin whose device the run uses.

    Args:
        plugins: Result of `discover`.
        requested: Value of `--device`: a device type, or a plugin's name.
        env: The process environment; `LMCORE_DEVICE` counts where `--device` is not given.

    Raises:
        DeviceError: The request cannot be met, a device is broken, two have the same priority, or
            an accelerator plugin failed to report, so the CPU is not chosen by default.
    """
    if requested is not None:
        return _requested(plugins, requested.strip(), f"--device {requested.strip()}")
    if env.get(REQUEST, "").strip():
        named = env[REQUEST].strip()
        return _requested(plugins, named, f"{REQUEST}={named}")
    return _detected(plugins)


class UnknownDeviceError(DeviceError):
    """A device that no installed plugin brings, on this host or elsewhere."""


def _requested(plugins: PluginSet, named: str, source: str) -> Selection:
    probed = [(one, one.probe) for one in plugins.usable if one.probe is not None]
    matching = [pair for pair in probed if pair[1].device_type == named]
    matching = matching or [pair for pair in probed if pair[0].name == named]
    if not matching:
        raise _unknown(plugins, named, source)
    present = [pair for pair in matching if pair[1].state is ProbeState.PRESENT]
    if not present:
        states = " and ".join(sorted({str(probe.state) for _, probe in matching}))
        raise DeviceError(
            f"`{source}`: this device is {states}",
            why=_evidence(matching),
            hint=_fix(matching) or _usable_devices(plugins),
        )
    record, probe = _highest(present, named)
    return _selection(record, probe, f"`{source}` asks for it", plugins)


def _detected(plugins: PluginSet) -> Selection:
    probed = [(one, one.probe) for one in plugins.usable if one.probe is not None]
    accelerators = [pair for pair in probed if pair[1].device_type != CPU]
    broken = [pair for pair in accelerators if pair[1].state is ProbeState.BROKEN]
    if broken:
        types = tuple(dict.fromkeys(probe.device_type for _, probe in broken))
        subject, it = _subject("device", types)
        raise DeviceError(
            f"{subject} there and cannot be used",
            why=_evidence(broken),
            hint=_join(_fix(broken), f"to continue without {it}: {_usable_device_flags(plugins)}"),
        )
    present = [pair for pair in accelerators if pair[1].state is ProbeState.PRESENT]
    if present:
        record, probe = _highest(present)
        rivals = [one.name for one, _ in present if one is not record]
        more = f", of higher priority than `{'`, `'.join(rivals)}`" if rivals else ""
        return _selection(record, probe, f"its device is present{more}", plugins)
    silent = [one for one in plugins.troubled if one.might_bring_device]
    if silent:
        subject, it = _subject("plugin", tuple(dict.fromkeys(one.name for one in silent)))
        device = "its device is" if it == "it" else "their devices are"
        ways = _usable_device_flags(plugins)
        raise DeviceError(
            f"{subject} installed and cannot say whether {device} here",
            why="\n".join(_problem_line(one) for one in silent),
            hint=f"fix or uninstall {it}; to continue without {it}: {ways}",
        )
    return _select_cpu(plugins, probed, accelerators)


def _select_cpu(
    plugins: PluginSet,
    probed: Sequence[tuple[PluginRecord, Probe]],
    absent: Sequence[tuple[PluginRecord, Probe]],
) -> Selection:
    """Return the CPU; every other plugin reports ABSENT."""
    hosts = [pair for pair in probed if pair[1].device_type == CPU]
    present = [pair for pair in hosts if pair[1].state is ProbeState.PRESENT]
    if not present:
        raise DeviceError(
            "no device can be used, not even the CPU",
            why=_evidence(hosts) or "no installed plugin brings one",
            hint=_fix(hosts) or "reinstall `lmcore`, whose package has the CPU plugin",
        )
    record, probe = _highest(present)
    if absent:
        said = "; ".join(
            f"`{one.name}`: {found.evidence[0] if found.evidence else 'absent'}"
            for one, found in absent
        )
        notice = f"no accelerator found, using the CPU ({said})"
        reason = "every other plugin says that its device is absent"
    else:
        notice = "using the CPU: no accelerator plugin is installed"
        reason = "no accelerator plugin is installed"
    return _selection(record, probe, reason, plugins, notice)


def chosen_plugin(plugins: PluginSet, record: PluginRecord, reason: str) -> Selection:
    """Return the decision for a plugin whose device is present, bypassing the selection rules.

    `lmcore doctor` tests every device in this way, not only the chosen one.
    """
    assert record.probe is not None
    return _selection(record, record.probe, reason, plugins)


def _selection(
    record: PluginRecord, probe: Probe, reason: str, plugins: PluginSet, notice: str | None = None
) -> Selection:
    return Selection(
        plugin=record.name,
        distribution=record.distribution,
        version=record.version,
        probe=probe,
        reason=reason,
        notice=notice,
        warnings=(
            *(_problem_line(one) for one in plugins.troubled),
            *(f"plugin {one.label} is slow: {one.slow}" for one in plugins if one.slow),
        ),
    )


def _highest(
    present: Sequence[tuple[PluginRecord, Probe]], named: str = ""
) -> tuple[PluginRecord, Probe]:
    """Return the plugin of the highest priority; of several, the one that is called *named*."""
    top = max(probe.priority for _, probe in present)
    best = [pair for pair in present if pair[1].priority == top]
    best = [pair for pair in best if pair[0].name == named] or best
    if len(best) == 1:
        return best[0]
    names = [record.name for record, _ in best]
    types = {probe.device_type for _, probe in best}
    flags = sorted(types) if len(types) == len(best) else names
    choose = " or ".join(f"`--device {name}`" for name in flags)
    raise DeviceError(
        f"plugins `{'`, `'.join(names)}` each have a device here, at equal priority {top}",
        why=_evidence(best),
        hint=f"choose with {choose}",
    )


def _unknown(plugins: PluginSet, named: str, source: str) -> UnknownDeviceError:
    """Return the error for a device that no usable plugin brings; name packages that might."""
    explained = [
        f"plugin {one.label}, which has it, {one.trouble}"
        for one in plugins.records
        if one.state is not PluginState.USABLE
        and (named in (one.name, one.entry_point) or (one.info and named in one.info.provides))
    ]
    known = {one.probe.device_type for one in plugins.usable if one.probe is not None}
    # `gpu` is no slip for `cpu`, whose name is suggested only for `CPU` or `cpu:0`.
    plain = named.lower().partition(":")[0]
    close = plain if plain in known else nearest(named, known - {CPU})
    meant = f"did you mean `{close}`? " if close else ""
    listed = f"{meant}known: `{'`, `'.join(sorted(known))}`" if known else ""
    return UnknownDeviceError(
        f"`{source}`: no usable plugin has this device",
        why="\n".join(explained) or None,
        hint=_join(listed, "" if explained else _install(named, known)),
    )


def _install(named: str, known: Collection[str]) -> str:
    """Return which package might bring the device *named*; *known* ones are here already."""
    packages = {name: one for name, one in device_packages().items() if name not in known}
    if named in packages:
        from lmcore.model.installation import installation  # only an error needs it

        package = packages[named]
        return f"`{named}` comes with the package `{package}`: {installation(package, named)}"
    others = [f"`{name}` (`{package}`)" for name, package in sorted(packages.items())]
    if not others:
        return "other devices come with plugins: `lmcore plugins` lists the installed ones"
    return f"not installed: {', '.join(others)}, from the index or folder that lmcore came from"


def _subject(noun: str, names: Sequence[str]) -> tuple[str, str]:
    """Return the beginning of a sentence about what has these names, and its pronoun."""
    quoted = ", ".join(f"`{name}`" for name in names)
    return (f"{noun} {quoted} is", "it") if len(names) == 1 else (f"{noun}s {quoted} are", "them")


def _problem_line(record: PluginRecord) -> str:
    return f"plugin {record.label} {record.trouble}"


def _evidence(pairs: Iterable[tuple[PluginRecord, Probe]]) -> str:
    lines = []
    for record, probe in pairs:
        found = "; ".join(probe.evidence) or "it gives no evidence"
        lines.append(f"plugin {record.label} says {probe.state}: {found}")
    return "\n".join(lines)


def _fix(pairs: Iterable[tuple[PluginRecord, Probe]]) -> str:
    return "; ".join(dict.fromkeys(probe.fix for _, probe in pairs if probe.fix))


def _usable_device_flags(plugins: PluginSet) -> str:
    """Return the flags by which a run can start here all the same."""
    types = {
        one.probe.device_type
        for one in plugins.usable
        if one.probe is not None and one.probe.state is ProbeState.PRESENT
    }
    return (
        " or ".join(f"`--device {name}`" for name in sorted(types)) or "no other device is usable"
    )


def _usable_devices(plugins: PluginSet) -> str:
    return f"what can be used here: {_usable_device_flags(plugins)}"


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def verify(selection: Selection, plugins: PluginSet) -> None:
    """Check in a worker that the launcher's choice holds here.

    Args:
        selection: The launcher's decision.
        plugins: Result of `discover` in this process.

    Raises:
        DeviceError: This process sees another plugin, another version, or no usable device.
        PluginError: The plugin is not usable here.
    """
    record = plugins.usable_record(selection.plugin)
    here = record.probe
    agrees = (
        here is not None
        and here.state is ProbeState.PRESENT
        and here.device_type == selection.probe.device_type
        and (record.distribution, record.version) == (selection.distribution, selection.version)
    )
    if not agrees:
        there = [f"launcher: `{selection.plugin}` ({selection.distribution} {selection.version})"]
        there += [f"launcher: {line}" for line in selection.probe.evidence]
        there.append(f"here: {record.label} {here.state if here else 'brings no device'}")
        there += [f"here: {line}" for line in (here.evidence if here else ())]
        raise DeviceError(
            f"this process would not choose device `{selection.probe.device_type}` as its launcher "
            "did",
            why="\n".join(there),
            hint="run `lmcore plugins` on both machines and make them alike",
        )
