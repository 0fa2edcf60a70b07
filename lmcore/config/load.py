"""Merge the sources of a run's settings: defaults < preset < YAML files < flags.

Where two settings exclude each other (`train_iters` and `train_samples`), one given by a higher
source replaces the other given by a lower one; only within one source is it a conflict, which
`validate` reports.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmcore.config.data_source import RunSources, read_sources
from lmcore.config.foreign.deepspeed_file import DeepSpeedFile
from lmcore.config.foreign.megatron import train_flags
from lmcore.config.option import Option
from lmcore.config.options.command_line import (
    ParsedFlags,
    Positional,
    UnsupportedFlagError,
    parse_flags,
)
from lmcore.config.options.yaml_file import Entry, read_file
from lmcore.config.plugin_section import (
    NO_PLUGINS,
    PluginSections,
    PluginSettings,
    section_name,
)
from lmcore.config.preset import PRESETS, find_preset
from lmcore.config.section import SECTIONS, Config, run_options
from lmcore.errors import ConfigError, LmcoreError, nearest, suggestion

__all__ = ["EXCLUSIVE", "PRESET_OPTION", "LoadedConfig", "Provenance", "load_config"]

logger = logging.getLogger(__name__)

EXCLUSIVE: tuple[tuple[str, ...], ...] = (
    (
        "corpus",
        "data_path",
        "data_file_list",
        "train_data",
        "train_data_path",
        "train_weighted_split_paths",
    ),
    ("valid_data", "valid_data_path", "valid_weighted_split_paths"),
    ("test_data", "test_data_path", "test_weighted_split_paths"),
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
class Provenance:
    """Origin of a value.

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
    """Settings as the user gave them, each with its provenance.

    Attributes:
        config: All sections.
        provenance: Provenance of every option, by name.
        preset: Name of the preset, if any.
        files: YAML files, in the order given.
        notices: One line for each Megatron flag that was translated, and for each section of a
            file that was passed over.
        texts: The flags as typed, by option name.
        plugins: The sections of plugins among them.
        accumulation_steps: Micro-batches of a step, if DeepSpeed's file gives their number.
        problems: Flags of Megatron that are not supported; `validate` raises them together with
            the problems of the settings.
    """

    config: Config
    provenance: Mapping[str, Provenance]
    preset: str | None = None
    files: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    texts: Mapping[str, str] | None = None
    plugins: PluginSections = NO_PLUGINS
    accumulation_steps: int | None = None
    problems: tuple[LmcoreError, ...] = ()

    @functools.cached_property
    def sources(self) -> tuple[RunSources, list[LmcoreError]]:
        """The data sources that the flags name, and every problem of these flags."""
        return read_sources(self.config.data)

    @property
    def options(self) -> dict[str, Option]:
        """Every option by name: the core's, then the plugins'."""
        return {**_CORE_OPTIONS, **self.plugins.options}

    def value(self, name: str) -> Any:
        """Return the value of the option called *name*."""
        return self.config.value(_CORE_OPTIONS.get(name) or self.plugins.options[name])

    def shown(self, name: str) -> str:
        """Return an option as its user wrote it, in backticks, for messages."""
        source = self.provenance[name]
        if source.kind == "flag" and self.texts and name in self.texts:
            return f"`{self.texts[name]}`"
        value = self.value(name)
        text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        where = f" ({source})" if source.kind != "default" else " (the default)"
        return f"`{name}: {text}`{where}"

    def given(self, name: str) -> bool:
        """Return whether the user or a preset set the option called *name*."""
        return self.provenance[name].kind not in {"default", "derived"}


_CORE_OPTIONS = run_options()

_Layer = dict[str, tuple[Any, Provenance]]


def load_config(
    argv: Sequence[str],
    *,
    plugins: PluginSections = NO_PLUGINS,
) -> LoadedConfig:
    """Return the settings that the arguments of `lmcore train` describe; `validate` checks them.

    Translated Megatron flags are logged, one warning each.

    Args:
        argv: YAML files, flags, `--preset`.
        plugins: Sections that plugins add.

    Raises:
        ConfigError: Every setting that cannot be read, at once.  Flags of Megatron that are not
            supported leave all settings readable: `LoadedConfig.problems` holds them.
    """
    options = {**_CORE_OPTIONS, **plugins.options}
    parsed = parse_flags(
        argv,
        {"preset": PRESET_OPTION, **options},
        positionals=(_CONFIG_FILES,),
        foreign=train_flags(),
        reasons=plugins.reasons(),
    )
    problems, notices = list(parsed.problems), list(parsed.notices)
    preset = None
    layers: list[_Layer] = []
    files = parsed.positionals[_CONFIG_FILES.name]
    for path in files:
        file = _File(path, options, plugins)
        file.read(problems)
        layers.append(file.layer)
        notices += file.notices
        preset = file.preset or preset
    preset = parsed.values.get("preset") or preset
    if preset is not None and preset in PRESETS:
        layers.insert(0, _preset_layer(preset))
    layers.append(_flag_layer(parsed))
    foreign = _deepspeed_file(layers)
    accumulation = None
    if foreign is not None:
        layer = _deepspeed_layer(foreign, options, layers, parsed.texts, problems)
        layers.insert(1 if preset in PRESETS else 0, layer)
        notices += foreign.notices()
        accumulation = foreign.accumulation_steps
    config, provenance = _merge(options, layers, plugins, problems)
    if not all(isinstance(problem, UnsupportedFlagError) for problem in problems):
        raise ConfigError.collect(problems)
    if not problems:
        for notice in notices:
            logger.warning("%s", notice)
    return LoadedConfig(
        config,
        provenance,
        preset,
        files,
        tuple(notices),
        parsed.texts,
        plugins,
        accumulation,
        tuple(problems),
    )


def _preset_layer(name: str) -> _Layer:
    source = Provenance("preset", name)
    return {key: (value, source) for key, value in find_preset(name).values.items()}


def _flag_layer(parsed: ParsedFlags) -> _Layer:
    return {
        name: (value, Provenance("flag", parsed.texts[name].partition(" ")[0]))
        for name, value in parsed.values.items()
        if name != PRESET_OPTION.name
    }


def _deepspeed_file(layers: Sequence[_Layer]) -> DeepSpeedFile | None:
    """Return DeepSpeed's file that the highest of *layers* names; not yet read."""
    for layer in reversed(layers):
        if "deepspeed_config" in layer:
            path = layer["deepspeed_config"][0]
            return None if path is None else DeepSpeedFile(path)
    return None


def _deepspeed_layer(
    file: DeepSpeedFile,
    options: Mapping[str, Option],
    layers: Sequence[_Layer],
    texts: Mapping[str, str],
    problems: list[LmcoreError],
) -> _Layer:
    """Return the settings that DeepSpeed's file has; those given here as well must agree."""
    given = {
        name: (value, f"{source}: {name}: {value}" if source.kind == "file" else texts[name])
        for layer in layers
        for name, (value, source) in layer.items()
        if source.kind in {"file", "flag"} and name != PRESET_OPTION.name
    }
    try:
        file.read()
    except ConfigError as problem:
        problems.append(problem)
        return {}
    problems += file.problems()
    taken = file.layer(options, given, problems)
    return {name: (value, Provenance("file", where)) for name, (value, where) in taken.items()}


class _File:
    """One YAML file on its way to a layer."""

    def __init__(self, path: str, options: Mapping[str, Option], plugins: PluginSections) -> None:
        self.path = path
        self.options = options
        self.keys = {(one.section, one.key): one for one in options.values()}
        self.sections = tuple(dict.fromkeys(one.section for one in options.values()))
        self.left_out = {section_name(name): (name, one) for name, one in plugins.left_out.items()}
        self.layer: _Layer = {}
        self.preset: str | None = None
        self.notices: list[str] = []

    def read(self, problems: list[LmcoreError]) -> None:
        """Fill layer, preset and notices; what is wrong is added to *problems*."""
        for entry in read_file(self.path, problems):
            where = f"{self.path}:{entry.line}"
            values = entry.value if isinstance(entry.value, list) else [entry.value or ""]
            shown = f"{where}: `{entry.key}: {' '.join(map(str, values))}`"
            try:
                if (entry.section, entry.key) == ("", PRESET_OPTION.name):
                    self.preset = PRESET_OPTION.convert(entry.value, where=shown)
                elif one := self._option_of(entry, where):
                    value = one.convert(entry.value, where=shown)
                    self.layer[one.name] = (value, Provenance("file", where))
            except ConfigError as problem:
                problems.append(problem)

    def _option_of(self, entry: Entry, where: str) -> Option | None:
        """Return the option that an entry sets; None for a section itself."""
        name = entry.section or entry.key
        if name not in self.sections:
            if not (entry.section and entry.key):  # else reported at the section's own entry
                self._foreign_section(name, entry, where)
            return None
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
        one = self.keys.get((entry.section, entry.key))
        if one is not None:
            return one
        owner = _CORE_OPTIONS.get(entry.key)
        if owner is not None:
            hint = f"move it below `{owner.section}:`"
            raise ConfigError(f"{where}: `{entry.key}` is no key of `{entry.section}`", hint=hint)
        raise ConfigError(f"{where}: unknown key `{entry.key}`", hint=self._key_hint(entry))

    def _foreign_section(self, name: str, entry: Entry, where: str) -> None:
        """Pass over the section of a plugin that the user has turned off.

        Raises:
            ConfigError: For any other section that is not known here.
        """
        if not entry.section and name in self.options:
            one = self.options[name]
            key = f" as `{one.key}`" if one.key != name else ""
            hint = f"move it below `{one.section}:`{key}"
            raise ConfigError(f"{where}: `{name}` stands outside its section", hint=hint)
        delete = f"delete the section `{name}:` from `{self.path}`"
        if name in self.left_out:
            plugin, out = self.left_out[name]
            if out.wanted:
                self.notices.append(f"{where}: section `{name}` is passed over: {out.reason}")
                return
            raise ConfigError(
                f"{where}: the settings of plugin `{plugin}` cannot be read",
                why=f"plugin `{plugin}` {out.reason}",
                hint=f"mend the plugin; to go on without it, {delete}",
            )
        hint = suggestion(name, [*self.sections, PRESET_OPTION.name])
        if entry.section:
            hint += f"; if it is of a plugin `{name}`, install that, or {delete}"
        raise ConfigError(
            f"{where}: unknown section `{name}`",
            why="neither lmcore nor a plugin that is installed here has a section of this name",
            hint=hint,
        )

    def _key_hint(self, entry: Entry) -> str:
        foreign = train_flags().get("--" + entry.key.replace("_", "-"))
        if foreign is not None and foreign.today:
            return f"today it is `{foreign.today.removeprefix('--').replace('-', '_')}`"
        own = [key for section, key in self.keys if section == entry.section]
        close = nearest(entry.key, own)
        if close is not None:
            return f"did you mean `{close}`?"
        elsewhere = nearest(entry.key, [key for _, key in self.keys])
        if elsewhere is None:
            return suggestion(entry.key, own)
        section = next(section for section, key in self.keys if key == elsewhere)
        return f"did you mean `{elsewhere}` of `{section}`?"


def _merge(
    options: Mapping[str, Option],
    layers: Sequence[_Layer],
    plugins: PluginSections,
    problems: list[LmcoreError],
) -> tuple[Config, dict[str, Provenance]]:
    values = {name: one.default for name, one in options.items()}
    provenance = {name: Provenance("default") for name in options}
    for layer in layers:
        for group in EXCLUSIVE:
            if any(layer[name][0] not in (None, ()) for name in group if name in layer):
                for name in group:
                    values[name] = options[name].default
                    provenance[name] = Provenance("default")
        for name, (value, source) in layer.items():
            values[name], provenance[name] = value, source
    if values["tokenizer_type"] is None and values["vocab_file"] and values["merge_file"]:
        values["tokenizer_type"] = _BYTE_PAIR
        formula = "vocab_file and merge_file are given"
        provenance["tokenizer_type"] = Provenance("derived", formula)
    sections = {
        section: kind(
            **{n: values[n] for n, one in _CORE_OPTIONS.items() if one.section == section}
        )
        for section, kind in SECTIONS.items()
    }
    try:
        settings = plugins.settings(values)
    except ConfigError as problem:
        problems.append(problem)
        settings = PluginSettings()
    return Config(**sections, plugins=settings), provenance
