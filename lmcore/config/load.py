"""Merge the sources of a run's settings: defaults < preset < YAML files < flags.

Where two settings exclude each other (`train_iters` and `train_samples`), one given by a higher
source replaces the other given by a lower one; only within one source is it a conflict, which
`validate` reports.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmcore.config.command_line import (
    ParsedFlags,
    Positional,
    UnsupportedFlagError,
    parse_flags,
)
from lmcore.config.megatron import train_flags
from lmcore.config.option import Option
from lmcore.config.preset import PRESETS, find_preset
from lmcore.config.section import SECTIONS, Config, run_options
from lmcore.config.yaml_file import Entry, read_file
from lmcore.errors import ConfigError, LmcoreError, nearest, suggestion

__all__ = ["EXCLUSIVE", "PRESET_OPTION", "LoadedConfig", "Source", "load_config", "preset_names"]

logger = logging.getLogger(__name__)

EXCLUSIVE: tuple[tuple[str, ...], ...] = (
    ("train_iters", "train_samples"),
    ("lr_decay_iters", "lr_decay_samples"),
    ("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples"),
)
"""Groups of options of which at most one counts."""

PRESET_OPTION = Option(
    name="preset",
    section="",
    type=str,
    repeated=False,
    optional=True,
    default=None,
    help="Named model to start from; files and flags override its values.",
    minimum=None,
    above=None,
    maximum=None,
    below=None,
    choices=tuple(PRESETS),
    metavar="NAME",
    short=None,
)
"""The one option that is no setting: it names a set of them."""

_BYTE_PAIR = "GPT2BPETokenizer"  # the one type that takes both files, and Megatron's for GPT

_CONFIG_FILES = Positional("config.yaml", "YAML file of settings", maximum=None)


@dataclass(frozen=True)
class Source:
    """Where a value comes from.

    Attributes:
        kind: "default", "preset", "file", "flag", or "derived" from other values.
        detail: The preset's name, "run.yaml:12", the flag as typed, or the formula.
    """

    kind: str
    detail: str = ""

    def __str__(self) -> str:
        if self.kind in {"file", "flag"} or not self.detail:
            return self.detail or self.kind
        return f"{self.kind}: {self.detail}"


@dataclass(frozen=True)
class LoadedConfig:
    """The settings as the user gave them, each with its source.

    Attributes:
        config: All sections.
        sources: Source of every option, by name.
        preset: Name of the preset, if any.
        files: YAML files, in the order given.
        notices: One line for each Megatron flag that was translated.
        texts: The flags as typed, by option name.
    """

    config: Config
    sources: Mapping[str, Source]
    preset: str | None = None
    files: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    texts: Mapping[str, str] | None = None

    def value(self, name: str) -> Any:
        """Return the value of the option called *name*."""
        return getattr(getattr(self.config, _SECTION_OF[name]), name)

    def shown(self, name: str) -> str:
        """Return an option as its user wrote it, in backticks, for messages."""
        source = self.sources[name]
        if source.kind == "flag" and self.texts and name in self.texts:
            return f"`{self.texts[name]}`"
        value = self.value(name)
        text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        where = f" ({source})" if source.kind != "default" else " (the default)"
        return f"`{name}: {text}`{where}"

    def given(self, name: str) -> bool:
        """Return whether the user or a preset set the option called *name*."""
        return self.sources[name].kind not in {"default", "derived"}


_SECTION_OF = {name: one.section for name, one in run_options().items()}

_Layer = dict[str, tuple[Any, Source]]


def load_config(
    argv: Sequence[str],
    *,
    check: Callable[[LoadedConfig], Iterable[LmcoreError]] = lambda _loaded: (),
) -> LoadedConfig:
    """Return the settings that the arguments of `lmcore train` describe.

    Translated Megatron flags are logged, one warning each.

    Args:
        argv: YAML files, flags, `--preset`.
        check: Finds problems of the settings, to be reported with those of the flags.  It is asked
            only where all settings could be read: a misspelt one has left its default there.

    Raises:
        ConfigError: Everything wrong in flags, files and preset, at once.
    """
    options = run_options()
    parsed = parse_flags(
        argv,
        {"preset": PRESET_OPTION, **options},
        positionals=(_CONFIG_FILES,),
        foreign=train_flags(),
    )
    problems = list(parsed.problems)
    preset = None
    layers: list[_Layer] = []
    files = parsed.positionals[_CONFIG_FILES.name]
    for path in files:
        layer, named = _file_layer(path, options, problems)
        layers.append(layer)
        preset = named or preset
    preset = parsed.values.get("preset") or preset
    if preset is not None and preset in PRESETS:
        layers.insert(0, _preset_layer(preset))
    layers.append(_flag_layer(parsed))
    config, sources = _merge(options, layers)
    loaded = LoadedConfig(config, sources, preset, files, parsed.notices, parsed.texts)
    if not problems:
        for notice in parsed.notices:
            logger.warning("%s", notice)
    if all(isinstance(problem, UnsupportedFlagError) for problem in problems):
        problems += check(loaded)
    if problems:
        raise ConfigError.collect(problems)
    return loaded


def preset_names() -> tuple[str, ...]:
    """Return the names that `--preset` takes."""
    return tuple(PRESETS)


def _preset_layer(name: str) -> _Layer:
    source = Source("preset", name)
    return {key: (value, source) for key, value in find_preset(name).values.items()}


def _flag_layer(parsed: ParsedFlags) -> _Layer:
    return {
        name: (value, Source("flag", parsed.texts[name].partition(" ")[0]))
        for name, value in parsed.values.items()
        if name != PRESET_OPTION.name
    }


def _file_layer(
    path: str, options: Mapping[str, Option], problems: list[LmcoreError]
) -> tuple[_Layer, str | None]:
    layer: _Layer = {}
    preset = None
    for entry in read_file(path, problems):
        where = f"{path}:{entry.line}"
        typed = " ".join(entry.value) if isinstance(entry.value, list) else str(entry.value or "")
        shown = f"{where}: `{entry.key}: {typed}`"
        try:
            if (entry.section, entry.key) == ("", PRESET_OPTION.name):
                preset = PRESET_OPTION.convert(entry.value, where=shown)
            elif one := _option_of(entry, options, where):
                layer[one.name] = (one.convert(entry.value, where=shown), Source("file", where))
        except ConfigError as problem:
            problems.append(problem)
    return layer, preset


def _option_of(entry: Entry, options: Mapping[str, Option], where: str) -> Option | None:
    """Return the option that a file's entry sets; None for a section itself."""
    name = entry.section or entry.key
    if entry.section and entry.key and name not in SECTIONS:
        return None  # reported at the section's own entry
    if name not in SECTIONS:
        if not entry.section and name in options:
            hint = f"move it below `{options[name].section}:`"
            raise ConfigError(f"{where}: `{name}` stands outside its section", hint=hint)
        hint = suggestion(name, [*SECTIONS, "preset"])
        raise ConfigError(f"{where}: unknown section `{name}`", hint=hint)
    if not entry.section:
        if entry.value is None:
            return None
        raise ConfigError(
            f"{where}: section `{name}` holds no settings",
            why="it is a value, not a mapping",
            hint="write its settings below it, indented",
        )
    if entry.key == "":
        return None
    one = options.get(entry.key)
    if one is None:
        raise ConfigError(f"{where}: unknown key `{entry.key}`", hint=_key_hint(entry, options))
    if one.section != entry.section:
        hint = f"move it below `{one.section}:`"
        raise ConfigError(f"{where}: `{entry.key}` is no key of `{entry.section}`", hint=hint)
    return one


def _key_hint(entry: Entry, options: Mapping[str, Option]) -> str:
    foreign = train_flags().get("--" + entry.key.replace("_", "-"))
    if foreign is not None and foreign.today:
        return f"today it is `{foreign.today.removeprefix('--').replace('-', '_')}`"
    own = [name for name, one in options.items() if one.section == entry.section]
    close = nearest(entry.key, own) or nearest(entry.key, options)
    if close is None:
        return suggestion(entry.key, own)
    section = options[close].section
    return f"did you mean `{close}`" + (f" of `{section}`?" if section != entry.section else "?")


def _merge(
    options: Mapping[str, Option], layers: Sequence[_Layer]
) -> tuple[Config, dict[str, Source]]:
    values = {name: one.default for name, one in options.items()}
    sources = {name: Source("default") for name in options}
    for layer in layers:
        for group in EXCLUSIVE:
            if any(layer[name][0] is not None for name in group if name in layer):
                for name in group:
                    values[name] = options[name].default
                    sources[name] = Source("default")
        for name, (value, source) in layer.items():
            values[name], sources[name] = value, source
    if values["tokenizer_type"] is None and values["vocab_file"] and values["merge_file"]:
        values["tokenizer_type"] = _BYTE_PAIR
        sources["tokenizer_type"] = Source("derived", "vocab_file and merge_file are given")
    sections = {
        section: kind(**{n: v for n, v in values.items() if options[n].section == section})
        for section, kind in SECTIONS.items()
    }
    return Config(**sections), sources
