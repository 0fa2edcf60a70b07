"""`lmcore config show`: every setting with its source."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from lmcore.config.command_line import wants_help
from lmcore.config.load import LoadedConfig, load_config
from lmcore.config.run_help import render_run_help
from lmcore.config.section import SECTIONS
from lmcore.config.yaml_file import written_value
from lmcore.errors import ConfigError, suggestion

__all__ = ["SUMMARY", "run"]

SUMMARY = "Show every setting of a run and where it comes from."

_USAGE = f"""{SUMMARY}

usage: lmcore config show [config.yaml ...] [--flags] [--json]

`lmcore config show --help` lists the flags."""


def run(argv: list[str]) -> int:
    """Run `lmcore config ...` and return the exit status."""
    if not argv or argv[0] in {"-h", "--help"}:
        print(_USAGE)
        return 0
    if argv[0] != "show":
        raise ConfigError(
            f"unknown command `lmcore config {argv[0]}`", hint=suggestion(argv[0], ["show"])
        )
    return _show(argv[1:])


def _show(argv: list[str]) -> int:
    if wants_help(argv):
        epilog = "--json prints values and sources as JSON."
        print(render_run_help("lmcore config show", SUMMARY, epilog=epilog))
        return 0
    rest = [word for word in argv if word != "--json"]
    loaded = load_config(rest)
    print(_as_json(loaded) if len(rest) < len(argv) else _as_text(loaded))
    return 0


def _as_json(loaded: LoadedConfig) -> str:
    sections: dict[str, dict[str, Any]] = {}
    for section in SECTIONS:
        values = dataclasses.asdict(getattr(loaded.config, section))
        sections[section] = {
            name: {
                "value": value,
                "source": loaded.sources[name].kind,
                "detail": loaded.sources[name].detail,
            }
            for name, value in values.items()
        }
    files = list(loaded.files)
    return json.dumps({"preset": loaded.preset, "files": files, "sections": sections}, indent=2)


def _as_text(loaded: LoadedConfig) -> str:
    rows = [
        (section, field.name, written_value(loaded.value(field.name)))
        for section, kind in SECTIONS.items()
        for field in dataclasses.fields(kind)
    ]
    names = max(len(name) for _, name, _ in rows)
    values = min(max(len(value) for _, _, value in rows), 40)
    bold, plain = ("\x1b[1m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
    lines: list[str] = []
    last = None
    for section, name, value in rows:
        if section != last:
            lines += ([""] if lines else []) + [f"{section}:"]
            last = section
        given = loaded.given(name)
        text = f"{'*' if given else ' '} {name:<{names}}  {value:<{values}}  {loaded.sources[name]}"
        lines.append(f"{bold}{text}{plain}" if given else text)
    lines += ["", "* differs in source from the defaults; `null` is derived when the run starts"]
    return "\n".join(lines)
