"""`lmcore config show`: every setting and its provenance, or every problem of the settings."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from lmcore.cli.selection import find_plugins
from lmcore.config.derived.layout import ParallelLayout
from lmcore.config.file.yaml_file import written_value
from lmcore.config.load import load_config
from lmcore.config.options.command_line import wants_help
from lmcore.config.options.help import fitted, render_run_help
from lmcore.config.rules.needs import note_without_effect
from lmcore.config.settings import LoadedConfig
from lmcore.config.validate import problems_of
from lmcore.errors import ConfigError, printable, suggestion
from lmcore.plugin.registrations import plugin_sections
from lmcore.train.resume.foreign_run import not_a_run
from lmcore.train.resume.saved_settings import ForeignModels, read_saved_settings
from lmcore.train.torch_needs import torch_problems

__all__ = ["SUMMARY", "run"]

logger = logging.getLogger(__name__)

SUMMARY = "Show every setting of a run and its source; check them."

_USAGE = f"""{SUMMARY}

usage: lmcore config show [config.yaml ...] [--flags] [--json]

`lmcore config show --help` lists the flags."""


def run(argv: list[str]) -> int:
    """Run `lmcore config ...` and return the exit status."""
    if not argv or argv[0] in {"-h", "--help"}:
        print(fitted(_USAGE))
        return 0
    if argv[0] != "show":
        raise ConfigError(
            f"unknown command `lmcore config {argv[0]}`", hint=suggestion(argv[0], ["show"])
        )
    return _show(argv[1:])


def _show(argv: list[str]) -> int:
    if wants_help(argv):
        epilog = "--json prints values and sources as JSON."
        sections = plugin_sections(find_plugins(argv, probe=False))
        print(render_run_help("lmcore config show", SUMMARY, plugins=sections, epilog=epilog))
        return 0
    rest = [word for word in argv if word != "--json"]
    loaded = load_config(
        rest,
        plugins=plugin_sections(find_plugins(rest, probe=False)),
        saved_settings=read_saved_settings,
        foreign_settings=ForeignModels().settings,
        foreign_run=not_a_run,
    )
    # Without `--nproc-per-node` the number of processes is not known before a run.
    processes = loaded.config.parallel.nproc_per_node
    problems = [*problems_of(loaded, world_size=processes), *torch_problems(loaded)]
    if problems:
        raise ConfigError.collect(problems)
    layout = ParallelLayout.of(loaded.config, processes) if processes else None
    note = note_without_effect(loaded, layout=layout)
    if note is not None:
        logger.info("%s", note)
    print(_as_json(loaded) if len(rest) < len(argv) else _as_text(loaded))
    return 0


def _as_json(loaded: LoadedConfig) -> str:
    sections: dict[str, dict[str, Any]] = {}
    for option in loaded.options.values():
        source = loaded.provenance[option.name]
        sections.setdefault(option.section, {})[option.key] = {
            "value": loaded.value(option.name),
            "source": source.kind,
            "detail": source.detail,
            **({"origin": source.origin} if source.origin else {}),
        }
    files = list(loaded.files)
    return json.dumps({"preset": loaded.preset, "files": files, "sections": sections}, indent=2)


def _as_text(loaded: LoadedConfig) -> str:
    rows = [
        (option, written_value(loaded.value(option.name))) for option in loaded.options.values()
    ]
    names = max(len(option.key) for option, _ in rows)
    values = min(max(len(value) for _, value in rows), 40)
    bold, plain = ("\x1b[1m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
    lines: list[str] = []
    last = None
    for option, value in rows:
        if option.section != last:
            lines += ([""] if lines else []) + [f"{option.section}:"]
            last = option.section
        given, source = loaded.given(option.name), loaded.provenance[option.name]
        origin = f", from {source.origin}" if source.origin else ""
        text = f"{'*' if given else ' '} {option.key:<{names}}  {value:<{values}}  {source}{origin}"
        text = printable(text)
        lines.append(f"{bold}{text}{plain}" if given else text)
    lines += ["", "* is set by flag, file or preset; `null` is off, or derived when the run starts"]
    return "\n".join(lines)
