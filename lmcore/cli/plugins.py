"""`lmcore plugins`: what is installed, what each plugin sees, and which device a run would use.

Loads no torch and cannot be taken down by a plugin: what failed is a row like any other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lmcore.config.command_line import parse_section
from lmcore.config.option import option
from lmcore.config.section.accelerator import plugin_off_option
from lmcore.errors import DeviceError, LmcoreError
from lmcore.plugins import PluginRecord, PluginSet, PluginState, Selection, discover, select

__all__ = ["SUMMARY", "run"]

SUMMARY = "List the installed accelerators, and why one is not used."

_EPILOG = """\
Environment: LMCORE_DEVICE chooses as --device does; LMCORE_PLUGINS lists the plugins to load beside
the CPU's (empty: the CPU alone), LMCORE_PLUGIN_OFF those to leave out."""

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
    """Run `lmcore plugins` and return 0: a bad plugin is a finding, not a failure."""
    wanted = parse_section(PluginsSection, argv, command="lmcore plugins", epilog=_EPILOG)
    plugins = discover(off=wanted.plugin_off)
    selection: Selection | None = None
    refusal: DeviceError | None = None
    try:
        selection = select(plugins, requested=wanted.device, env=os.environ)
    except DeviceError as error:
        refusal = error
    if wanted.json:
        print(json.dumps(_as_dict(plugins, selection, refusal), indent=2))
    else:
        _print_text(plugins, selection, refusal, verbose=wanted.verbose)
    return 0


def _as_dict(
    plugins: PluginSet, selection: Selection | None, refusal: LmcoreError | None
) -> dict[str, Any]:
    from lmcore.accelerator import API_VERSION

    return {
        "api": API_VERSION,
        "plugins": [_record_as_dict(one, selection) for one in plugins],
        "selection": json.loads(selection.to_json()) if selection else None,
        "error": {"what": refusal.what, "why": refusal.why, "hint": refusal.hint}
        if refusal
        else None,
    }


def _record_as_dict(record: PluginRecord, selection: Selection | None) -> dict[str, Any]:
    info, probe = record.info, record.probe
    return {
        "name": record.name,
        "entry_point": record.entry_point,
        "version": record.version,
        "distribution": record.distribution,
        "state": str(record.state),
        "reason": _reason(record, selection),
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
        return "brings no device; adds to every device's kernels and policies"
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
    *,
    verbose: bool,
) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=False)
    rows = [_cells(one) for one in plugins]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    for record, row in zip(plugins, rows, strict=True):
        line = Text("* " if selection and selection.plugin == record.name else "  ")
        for place, (cell, width) in enumerate(zip(row, widths, strict=True)):
            line.append(cell.ljust(width) + "  ", style="bold" if place == 0 else "")
        state = str(record.probe.state if record.probe else record.state)
        line.append(state, style=_STYLES[state])
        console.print(line, no_wrap=True, overflow="ignore", crop=False)
        for text, style in _details(record, selection, verbose=verbose):
            console.print(_indented(text, console.width), style=style, crop=False, no_wrap=True)
    if selection:
        count = selection.probe.count
        many = f", {count} devices" if count > 1 else ""
        console.print(f"\nA run uses `{selection.probe.device_type}`{many}: {selection.reason}.")
    if refusal:
        console.print("\nA run cannot start without a choice of yours:", style="bold red")
        console.print(refusal.render(), markup=False)


def _cells(record: PluginRecord) -> tuple[str, str, str, str]:
    device = record.probe.device_type if record.probe else "-"
    if record.probe and record.probe.count > 1:
        device += f" x{record.probe.count}"
    return record.name, device, record.distribution, record.version


def _details(
    record: PluginRecord, selection: Selection | None, *, verbose: bool
) -> Iterator[tuple[str, str]]:
    """Yield the lines below a plugin's row with the style of each."""
    yield _reason(record, selection), ""
    if record.probe:
        for line in record.probe.evidence:
            yield f"found: {line}", "dim"
        if record.probe.fix:
            yield f"fix: {record.probe.fix}", "yellow"
    if verbose and record.probe:
        for key, value in record.probe.facts.items():
            yield f"{key}: {json.dumps(value)}", "dim"
    if verbose and record.traceback:
        yield record.traceback.rstrip(), "dim"


def _indented(text: str, width: int) -> Any:
    import textwrap

    from rich.text import Text

    lines: list[str] = []
    for line in text.splitlines():
        indent = " " * (4 + len(line) - len(line.lstrip()))
        lines += textwrap.wrap(
            line.strip(),
            max(width, 40),
            initial_indent=indent,
            subsequent_indent=f"{indent}  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return Text("\n".join(lines))
