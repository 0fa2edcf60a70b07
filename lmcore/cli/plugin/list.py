"""`lmcore plugins`: what is installed, what each plugin sees, and which device a run would use.

Loads no torch and cannot be taken down by a plugin: what failed is a row like any other.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lmcore.base.errors import DeviceError, LmcoreError, printable
from lmcore.cli.text.terminal import output_width, wrapped
from lmcore.config.option import option
from lmcore.config.options.command_line import parse_section
from lmcore.config.section.accelerator import plugin_off_option
from lmcore.contract.probe import API_VERSION
from lmcore.plugin import (
    REQUEST,
    PluginRecord,
    PluginSet,
    PluginState,
    Selection,
    discover,
    select,
)
from lmcore.plugin.known_packages import device_packages
from lmcore.runtime.torch_import import broken_backend

__all__ = ["installed_versions", "run", "wanted_versions"]

_EPILOG = """\
Environment: LMCORE_DEVICE chooses as --device does; LMCORE_PLUGINS lists the plugins to load beside
the CPU's (empty: the CPU alone), LMCORE_PLUGIN_OFF those to leave out."""

_VERSION_FACTS = {"driver": "driver", "runtime": "runtime", "torch_build": "torch build"}
"""Label of each fact of a probe that is a version."""

_STYLES = {
    "present": "green",
    "absent": "dim",
    "broken": "bold red",
    "refused": "bold red",
    "failed": "bold red",
    "off": "dim",
    "usable": "green",
}


@dataclass(frozen=True)
class PluginsSection:
    """List the installed accelerators, and why one is not used."""

    device: str | None = option(
        None, "Show what a run with this `--device` would use.", metavar="TYPE"
    )
    plugin_off: tuple[str, ...] = plugin_off_option()
    verbose: bool = option(False, "Show facts, and the tracebacks of plugins that failed.")
    json: bool = option(False, "Print JSON.")


def run(argv: list[str]) -> int:
    """Run `lmcore plugins` and return the exit status.

    A bad plugin is a finding, not a failure: the status is not 0 only if the device that
    `--device` or `LMCORE_DEVICE` asks for is refused.
    """
    wanted = parse_section(PluginsSection, argv, command="lmcore plugins", epilog=_EPILOG)
    plugins = discover(off=wanted.plugin_off)
    broken = broken_backend()
    selection: Selection | None = None
    refusal: DeviceError | None = None
    try:
        selection = select(plugins, requested=wanted.device, env=os.environ)
    except DeviceError as error:
        refusal = error
    if wanted.json:
        print(json.dumps(_as_dict(plugins, selection, refusal, broken), indent=2))
    else:
        _print_text(plugins, selection, refusal, broken, verbose=wanted.verbose)
    asked = wanted.device is not None or bool(os.environ.get(REQUEST, "").strip())
    return refusal.exit_status if refusal is not None and asked else 0


def _as_dict(
    plugins: PluginSet,
    selection: Selection | None,
    refusal: LmcoreError | None,
    broken: LmcoreError | None,
) -> dict[str, Any]:
    from lmcore.contract import API_VERSION

    return {
        "api": API_VERSION,
        "plugins": [_record_as_dict(one, selection) for one in plugins],
        "overlaps": _overlaps(plugins),
        "not_installed": _not_installed(plugins),
        "selection": json.loads(selection.to_json()) if selection else None,
        "error": _error_as_dict(refusal),
        "torch_error": _error_as_dict(broken),
    }


def _error_as_dict(error: LmcoreError | None) -> dict[str, str | None] | None:
    return None if error is None else {"what": error.what, "why": error.why, "hint": error.hint}


def _record_as_dict(record: PluginRecord, selection: Selection | None) -> dict[str, Any]:
    info, probe = record.info, record.probe
    return {
        "name": record.name,
        "entry_point": record.entry_point,
        "version": record.version,
        "distribution": record.distribution,
        "state": str(record.state),
        "reason": _reason(record, selection),
        "slow": record.slow or None,
        "traceback": record.traceback or None,
        "summary": info.summary if info else None,
        "api": str(info.api) if info else None,
        "torch": str(info.torch) if info else None,
        "provides": list(info.provides) if info else [],
        "device": probe.device_type if probe else None,
        "device_state": str(probe.state) if probe else None,
        "count": probe.count if probe else 0,
        "priority": probe.priority if probe else None,
        "evidence": list(probe.evidence) if probe else [],
        "fix": probe.fix if probe else None,
        "facts": dict(probe.facts) if probe else {},
        "selected": bool(selection and selection.plugin == record.name and not record.troubled),
    }


def _reason(record: PluginRecord, selection: Selection | None) -> str:
    """Return why the plugin is or is not used, in one line."""
    if record.state is not PluginState.USABLE:
        return record.reason
    if selection is not None and selection.plugin == record.name:
        return f"used: {selection.reason}"
    if record.probe is None:
        return "brings no device; what it adds serves every device"
    if selection is None and record.probe.state == "present":
        return "ready: its device is present"
    return f"not used: its device is {record.probe.state}" + (
        f", and `{selection.plugin}` goes before it"
        if selection is not None and record.probe.state == "present"
        else ""
    )


def _print_text(
    plugins: PluginSet,
    selection: Selection | None,
    refusal: LmcoreError | None,
    broken: LmcoreError | None,
    *,
    verbose: bool,
) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    width = output_width()
    head = ("plugin", "device", "package", "version")
    rows = [_cells(one) for one in plugins]
    states = [str(one.probe.state if one.probe else one.state) for one in plugins]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(4)]
    whole = len(_row("  ", head, widths)) + max(map(len, states), default=0) <= width
    widths = widths if whole else widths[:2]  # package and version are below the row then
    console.print(Text(_row("  ", head, widths) + "state", style="dim"))
    for record, cells, state in zip(plugins, rows, states, strict=True):
        used = selection is not None and selection.plugin == record.name
        line = Text(_row("* " if used else "  ", cells, widths))
        line.stylize("bold", 2, 2 + widths[0])
        line.append(state, style=_STYLES[state])
        console.print(line)
        if not whole:
            package = wrapped(f"package: {cells[2]} {cells[3]}", width, first="    ", rest="      ")
            console.print(Text(package, style="dim"))
        for text, style in _details(record, selection, verbose=verbose):
            console.print(Text(wrapped(text, width, first="    ", rest="      "), style=style))
        if verbose and record.traceback:
            console.print(
                Text(textwrap.indent(printable(record.traceback.rstrip()), "    "), style="dim")
            )
    packages = _not_installed(plugins)
    if packages:
        listed = ", ".join(f"`{device}` (`{package}`)" for device, package in packages.items())
        console.print(Text(f"\n{wrapped(f'not installed: {listed}', width)}", style="dim"))
    if selection:
        count = selection.probe.count
        many = f", {count} devices" if count > 1 else ""
        decision = f"A run uses `{selection.probe.device_type}`{many}: {selection.reason}."
        console.print(Text(f"\n{wrapped(decision, width)}"))
    for kind, names in _overlaps(plugins).items():
        listed = " and ".join(f"`{name}`" for name in names)
        text = f"{listed} bring the same device, `{kind}`: `--plugin-off NAME` leaves one out."
        console.print(Text(wrapped(text, width)))
    if broken:
        console.print("\nA run cannot start, as torch cannot be imported:", style="bold red")
        console.print(broken.render(), markup=False)
    if refusal:
        console.print("\nA run cannot start until you choose a device:", style="bold red")
        console.print(refusal.render(), markup=False)


def _row(mark: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    return mark + "".join(
        f"{cell.ljust(width)}  " for cell, width in zip(cells, widths, strict=False)
    )


def _cells(record: PluginRecord) -> tuple[str, str, str, str]:
    device = record.probe.device_type if record.probe else "-"
    if record.probe and record.probe.count > 1:
        device += f" x{record.probe.count}"
    cells = record.name, device, record.distribution, record.version
    name, device, distribution, version = map(printable, cells)
    return name, device, distribution, version


def _details(
    record: PluginRecord, selection: Selection | None, *, verbose: bool
) -> Iterator[tuple[str, str]]:
    """Yield the lines below a plugin's row with the style of each."""
    yield _reason(record, selection), ""
    if record.probe:
        for line in record.probe.evidence:
            yield f"found: {line}", "dim"
    if record.info:
        yield f"requires: {wanted_versions(record)}", "dim"
    versions = installed_versions(record)
    if versions:
        yield f"versions: {versions}", "dim"
    if record.slow:
        yield f"slow: {record.slow}", "yellow"
    if record.probe and record.probe.fix:
        yield f"fix: {record.probe.fix}", "yellow"
    elif record.troubled:
        yield f"fix: repair, update or uninstall `{record.distribution}`", "yellow"
    if verbose and record.probe:
        for key, value in record.probe.facts.items():
            yield f"{key}: {json.dumps(value)}", "dim"


def _overlaps(plugins: PluginSet) -> dict[str, list[str]]:
    """Return the plugins that bring a device of the same type, by the type."""
    owners: dict[str, list[str]] = {}
    for record in plugins.usable:
        if record.probe is not None and record.probe.state == "present":
            owners.setdefault(record.probe.device_type, []).append(record.name)
    return {kind: names for kind, names in owners.items() if len(names) > 1}


def _not_installed(plugins: PluginSet) -> dict[str, str]:
    """Return the device packages of lmcore's extras that are not installed, by device."""
    from packaging.utils import canonicalize_name

    here = {canonicalize_name(one.distribution) for one in plugins}
    return {
        device: package
        for device, package in device_packages().items()
        if canonicalize_name(package) not in here
    }


def wanted_versions(record: PluginRecord) -> str:
    """Return the plugin API and torch that a plugin needs, each with the installed version."""
    info = record.info
    assert info is not None
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    return f"plugin API {info.api} (here {API_VERSION}), torch {info.torch} (here {torch})"


def installed_versions(record: PluginRecord) -> str:
    """Return the versions of driver, runtime and torch build that the probe found, as text."""
    facts = record.probe.facts if record.probe else {}
    found = {label: facts.get(name) for name, label in _VERSION_FACTS.items()}
    return ", ".join(f"{label} {version}" for label, version in found.items() if version)
