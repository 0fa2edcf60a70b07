"""`lmcore config show`: every setting and its provenance, or every problem of the settings."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import ConfigError, DeviceError, LmcoreError, printable
from lmcore.cli.commands import known_commands
from lmcore.cli.group import run_group
from lmcore.cli.selection import find_plugins
from lmcore.config.continued import is_continued
from lmcore.config.derived.layout import ParallelLayout
from lmcore.config.file.yaml_file import written_value
from lmcore.config.load import load_config
from lmcore.config.options.command_line import wants_help
from lmcore.config.options.help import render_run_help
from lmcore.config.rules.needs import note_without_effect
from lmcore.config.settings import LoadedConfig, Provenance, UnreadSettingError, readable
from lmcore.config.validate import problems_of, settled
from lmcore.plugin import REQUEST, select
from lmcore.plugin.registrations import plugin_sections
from lmcore.plugin.selection import UnknownDeviceError
from lmcore.train.resume.foreign import ForeignModels, not_a_run
from lmcore.train.resume.saved_run import read_saved_settings
from lmcore.train.torch_needs import torch_problems

if TYPE_CHECKING:
    from lmcore.plugin import PluginSet

__all__ = ["run", "show"]

logger = logging.getLogger(__name__)

_SUMMARY = known_commands()["config"].summary


def run(argv: list[str]) -> int:
    """Run `lmcore config ...` and return the exit status."""
    return run_group("config", argv)


def show(argv: list[str]) -> int:
    """Run `lmcore config show` and return the exit status."""
    if wants_help(argv):
        epilog = "--json prints values and sources as JSON."
        sections = plugin_sections(find_plugins(argv, probe=False))
        print(render_run_help("lmcore config show", _SUMMARY, plugins=sections, epilog=epilog))
        return 0
    rest = [word for word in argv if word != "--json"]
    plugins, foreign = find_plugins(rest), ForeignModels()
    loaded = load_config(
        rest,
        plugins=plugin_sections(plugins),
        saved_settings=read_saved_settings,
        foreign_settings=foreign.settings,
        foreign_run=not_a_run,
        check=lambda loaded: _problems(loaded, plugins),
    )
    if problems := _problems(loaded, plugins):
        raise ConfigError.collect(problems)
    _require_checkpoint(loaded, foreign)
    processes = loaded.config.parallel.nproc_per_node
    loaded = settled(loaded, processes) if processes else loaded
    layout = ParallelLayout.of(loaded.config, processes) if processes else None
    note = note_without_effect(loaded, layout=layout)
    if note is not None:
        logger.info("%s", note)
    shown = _with_environment(loaded)
    print(_as_json(shown) if len(rest) < len(argv) else _as_text(shown))
    return 0


def _problems(loaded: LoadedConfig, plugins: PluginSet) -> list[LmcoreError]:
    """Return every problem of the settings that could be read."""
    processes = None
    with contextlib.suppress(UnreadSettingError):
        # Without `--nproc-per-node` the number of processes is not known before a run.
        processes = loaded.config.parallel.nproc_per_node
    return [
        *problems_of(loaded, world_size=processes),
        *readable(_data_problems(loaded, plugins)),
        *readable(_device_problems(loaded, plugins)),
        *readable(torch_problems(loaded)),
    ]


def _require_checkpoint(loaded: LoadedConfig, foreign: ForeignModels) -> None:
    """Raise the error of a run whose `--load` names no checkpoint that it can begin with."""
    from lmcore.train.resume.point import find_resume_point, refuse_other_family

    resume = find_resume_point(
        loaded.config.checkpoint,
        continued=is_continued(loaded.provenance),
        foreign=foreign,
    )
    refuse_other_family(loaded, resume)


def _data_problems(loaded: LoadedConfig, plugins: PluginSet) -> Iterator[LmcoreError]:
    """Yield the problems of data file lists, of the metadata of datasets, and of named texts."""
    from lmcore.data.blend.check import inspect_sources
    from lmcore.data.prepare.choose_texts import choose_texts
    from lmcore.data.prepare.named_text import named_texts

    sources, problems = inspect_sources(loaded.sources[0])
    yield from problems
    try:
        data = loaded.config.data
        texts = named_texts(plugins)
        choose_texts(sources, texts, data.corpora, may_be_gone=data.lazy_loader)
    except LmcoreError as problem:
        yield problem
        yield from getattr(problem, "others", ())


def _device_problems(loaded: LoadedConfig, plugins: PluginSet) -> Iterator[LmcoreError]:
    """Yield the problem of a device that no plugin has.

    Other obstacles are warnings: the device may be on another host than the one that checks.
    """
    accelerator = loaded.config.accelerator
    try:
        select(plugins.without(accelerator.plugin_off), requested=accelerator.device)
    except UnknownDeviceError as problem:
        yield problem
    except DeviceError as problem:
        logger.warning("a run cannot start on this host: %s", problem.what_and_why)


def _with_environment(loaded: LoadedConfig) -> LoadedConfig:
    """Return the settings with the device that the environment names, if no other source does."""
    named = os.environ.get(REQUEST, "").strip()
    if not named or loaded.config.accelerator.device is not None:
        return loaded
    accelerator = replace(loaded.config.accelerator, device=named)
    return replace(
        loaded,
        config=replace(loaded.config, accelerator=accelerator),
        provenance={**loaded.provenance, "device": Provenance("environment", REQUEST)},
    )


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
    lines += [
        "",
        "* is set by flag, file, preset or environment; `null` is off, or derived at the start",
    ]
    return "\n".join(lines)
