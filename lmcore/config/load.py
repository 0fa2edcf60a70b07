"""Merge of a run's settings: defaults < preset < run of `--continue` < YAML files < flags.

If two options exclude each other (`train_iters` and `train_samples`), a value from a higher source
resets the other option from a lower one.  Both in one source are a conflict, which `validate`
reports.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmcore.config.continued import CONTINUE_OPTION, ContinuedRun
from lmcore.config.file.paths import map_paths, path_exists
from lmcore.config.file.run_file import RunFile
from lmcore.config.file.saved_settings import SavedSettings
from lmcore.config.file.yaml_file import Entry, read_file
from lmcore.config.foreign.deepspeed_file import DeepSpeedFile
from lmcore.config.foreign.megatron_flags import train_flags
from lmcore.config.option import OUTPUT_PATH, Option
from lmcore.config.options.flags import (
    CONFIG_FILES,
    ParsedFlags,
    Positional,
    UnsupportedFlagError,
    parse_flags,
)
from lmcore.config.plugin_section import NO_PLUGINS, PluginSections, PluginSettings, section_name
from lmcore.config.preset import PRESET_OPTION, PRESETS
from lmcore.config.section import SECTIONS, Config, run_options
from lmcore.config.settings import LoadedConfig, Provenance
from lmcore.errors import ConfigError, LmcoreError, nearest, suggestion

__all__ = ["EXCLUSIVE", "load_config"]

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
    ("schedule", "use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler"),
)
"""Groups of options that exclude each other."""

_BYTE_PAIR = "GPT2BPETokenizer"  # the only type that takes both files; Megatron's type for GPT

_CONFIG_FILES = Positional(CONFIG_FILES, "YAML file of settings", maximum=None)

_CORE_OPTIONS = run_options()

_Layer = dict[str, tuple[Any, Provenance]]
"""Values of one source with their provenance, by option name."""

_SOURCES = (PRESET_OPTION, CONTINUE_OPTION)
"""Options that name a source of settings."""


def load_config(
    argv: Sequence[str],
    *,
    plugins: PluginSections = NO_PLUGINS,
    saved_settings: Callable[[Path], SavedSettings] | None = None,
) -> LoadedConfig:
    """Return the settings that the arguments of `lmcore train` describe; `validate` checks them.

    Megatron's flags that were translated are logged in one message, as are those without effect.

    Args:
        argv: YAML files, flags, `--preset`, `--continue`.
        plugins: Sections that plugins add.
        saved_settings: Returns the settings in the newest checkpoint at a path, for a run that is
            continued and has no `config.yaml`; None if checkpoints are not read.

    Raises:
        ConfigError: Every setting that cannot be read, at once.  Flags of Megatron that are not
            supported leave all settings readable: `LoadedConfig.problems` holds them.
    """
    options = {**_CORE_OPTIONS, **plugins.options}
    parsed = parse_flags(
        argv,
        {**{option.name: option for option in _SOURCES}, **options},
        positionals=(_CONFIG_FILES,),
        foreign=train_flags(),
        reasons=plugins.reasons(),
    )
    problems = list(parsed.problems)
    continued = _continued_run(parsed, problems)
    paths = parsed.positionals[_CONFIG_FILES.name]
    if continued is not None and continued.settings_file is not None:
        paths = (str(continued.settings_file), *paths)
    files = [_SettingsFile(path, options, plugins) for path in paths]
    for file in files:
        file.read(problems)
    warnings = [notice for file in files for notice in file.notices]
    layers = [*(file.layer for file in files), _flag_layer(parsed)]
    if continued is not None:
        layers = _continued_layers(continued, options, layers, saved_settings, problems)
    presets = [parsed.values.get("preset"), *(file.preset for file in reversed(files))]
    preset = next((name for name in presets if name is not None), None)
    below_files = []
    if preset is not None:
        origin = Provenance("preset", preset)
        below_files.append({key: (v, origin) for key, v in PRESETS[preset].values.items()})
    deepspeed = _deepspeed_file(layers)
    accumulation_steps = None
    if deepspeed is not None:
        below_files.append(_deepspeed_layer(deepspeed, options, layers, parsed.texts, problems))
        warnings += deepspeed.notices()
        accumulation_steps = deepspeed.accumulation_steps
    config, provenance = _merge(options, [*below_files, *layers], plugins, problems)
    if not all(isinstance(problem, UnsupportedFlagError) for problem in problems):
        raise ConfigError.collect(problems)
    if not problems:
        for notice in parsed.notices:
            logger.info("%s", notice)
        warnings += _new_directory(config, [one for file in files for one in file.run_directories])
        for warning in warnings:
            logger.warning("%s", warning)
    return LoadedConfig(
        config,
        provenance,
        preset,
        paths,
        (*parsed.notices, *warnings),
        parsed.texts,
        plugins,
        accumulation_steps,
        tuple(problems),
    )


def _continued_run(parsed: ParsedFlags, problems: list[LmcoreError]) -> ContinuedRun | None:
    """Return the run of `--continue`; add to *problems* what is wrong with it."""
    path = parsed.values.get(CONTINUE_OPTION.name)
    if path is None:
        return None
    try:
        run = ContinuedRun.at(path)
    except ConfigError as problem:
        problems.append(problem)
        return None
    problems += run.conflicts(parsed.values, parsed.texts)
    return run


def _continued_layers(
    run: ContinuedRun,
    options: Mapping[str, Option],
    layers: list[_Layer],
    saved_settings: Callable[[Path], SavedSettings] | None,
    problems: list[LmcoreError],
) -> list[_Layer]:
    """Return the layers of a run that is continued; the first is its file's, if there is one."""
    own: _Layer = {}
    if run.settings_file is not None:
        own, *layers = layers
    elif saved_settings is not None:
        own = saved_settings(run.load).layer(options, problems)
    return run.layers(own, options, layers)


def _new_directory(config: Config, run_directories: Sequence[Path]) -> Iterator[str]:
    """Yield a warning if a run is continued by its own file, but in another directory by default.

    The files of lmcore 2026.11 set `save`.
    """
    asked = config.checkpoint
    if asked.load is None or asked.save is not None or asked.finetune:
        return
    load = Path(asked.load).resolve()
    for directory in run_directories:
        if directory.resolve() in {load, *load.parents[:2]}:
            yield (
                f"without `--save` the run continues in a new directory; `--save {directory}` "
                "continues in place"
            )


def _flag_layer(parsed: ParsedFlags) -> _Layer:
    return {
        name: (value, Provenance("flag", parsed.texts[name].partition(" ")[0]))
        for name, value in parsed.values.items()
        if name not in {option.name for option in _SOURCES}
    }


def _deepspeed_file(layers: Sequence[_Layer]) -> DeepSpeedFile | None:
    """Return DeepSpeed's file that the highest of *layers* names; it is not read yet."""
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
    """Return the settings in DeepSpeed's file; the user's value of a setting must be the same."""
    given = {
        name: (value, f"{origin}: {name}: {value}" if origin.kind == "file" else texts[name])
        for layer in layers
        for name, (value, origin) in layer.items()
    }
    try:
        file.read()
    except ConfigError as problem:
        problems.append(problem)
        return {}
    problems += file.problems()
    taken = file.layer(options, given, problems)
    return {name: (value, Provenance("file", where)) for name, (value, where) in taken.items()}


class _SettingsFile:
    """One YAML file and the settings read from it."""

    def __init__(self, path: str, options: Mapping[str, Option], plugins: PluginSections) -> None:
        self.path = path
        self.options = options
        self.keys = {(option.section, option.key): option for option in options.values()}
        self.sections = tuple(dict.fromkeys(option.section for option in options.values()))
        self.left_out = {section_name(name): (name, out) for name, out in plugins.left_out.items()}
        self.layer: _Layer = {}
        self.preset: str | None = None
        self.notices: list[str] = []
        self.run_directories: list[Path] = []

    def read(self, problems: list[LmcoreError]) -> None:
        """Fill layer, preset and notices; add every problem to *problems*."""
        names = (*self.sections, *self.left_out, *self.options, PRESET_OPTION.name)
        file = read_file(self.path, problems, names)
        run_file = RunFile.of(file.text)
        if run_file is not None and not run_file.earlier:
            self.run_directories.append(Path(self.path).parent)
        for entry in file.entries:
            where = f"{self.path}:{entry.line}"
            values = entry.value if isinstance(entry.value, list) else [entry.value]
            words = ["" if value is None else str(value) or '""' for value in values]
            shown = f"{where}: `{entry.key}: {' '.join(words)}`"
            try:
                if (entry.section, entry.key) == ("", PRESET_OPTION.name):
                    self.preset = PRESET_OPTION.convert(entry.value, where=shown)
                elif option := self._option_of(entry, where):
                    value, origin = option.convert(entry.value, where=shown), ""
                    if run_file is not None:
                        if run_file.is_default(option, value, entry.comment):
                            continue
                        origin = run_file.origin(option, value, entry.comment)
                    if run_file is None or not run_file.earlier:
                        value = self._located(option, value, shown)
                    self.layer[option.name] = (value, Provenance("file", where, origin))
            except ConfigError as problem:
                problems.append(problem)

    def _located(self, option: Option, value: Any, shown: str) -> Any:
        """Return the value with its relative paths taken as relative to the file.

        Raises:
            ConfigError: A path to read is there relative to the working directory only.
        """
        folder = Path(self.path).parent

        def locate(path: str) -> str:
            located = path if folder == Path() else str(folder / path)
            if located != path and path_exists(path) and not path_exists(located):
                if option.paths != OUTPUT_PATH:
                    raise ConfigError(
                        f"{shown}: there is no `{located}`",
                        why="a relative path in a file is relative to the file",
                        hint=f"`{path}` is in the working directory: write "
                        f"`{os.path.relpath(path, folder)}`",
                    )
                self.notices.append(f"{shown} is `{located}`: relative to the file")
            return located

        return map_paths(option, value, locate)

    def _option_of(self, entry: Entry, where: str) -> Option | None:
        """Return the option that an entry sets; None for the entry of a section."""
        name = entry.section or entry.key
        if name not in self.sections:
            if not (entry.section and entry.key):  # else reported at the section's own entry
                self._unknown_section(name, entry, where)
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
        option = self.keys.get((entry.section, entry.key))
        if option is not None:
            return option
        owner = _CORE_OPTIONS.get(entry.key)
        if owner is not None:
            hint = f"move it below `{owner.section}:`"
            raise ConfigError(f"{where}: `{entry.key}` is not in `{entry.section}`", hint=hint)
        raise ConfigError(f"{where}: unknown key `{entry.key}`", hint=self._key_hint(entry))

    def _unknown_section(self, name: str, entry: Entry, where: str) -> None:
        """Ignore the section of a plugin that the user has turned off.

        Raises:
            ConfigError: Any other section that is not known here.
        """
        if not entry.section and name in self.options:
            option = self.options[name]
            key = f" as `{option.key}`" if option.key != name else ""
            hint = f"move it below `{option.section}:`{key}"
            raise ConfigError(f"{where}: `{name}` is outside its section", hint=hint)
        delete = f"delete the section `{name}:` from `{self.path}`"
        if name in self.left_out:
            plugin, out = self.left_out[name]
            if out.wanted:
                self.notices.append(f"{where}: section `{name}` is ignored: {out.reason}")
                return
            raise ConfigError(
                f"{where}: the settings of plugin `{plugin}` cannot be read",
                why=f"plugin `{plugin}` {out.reason}",
                hint=f"fix the plugin; to continue without it, {delete}",
            )
        known = [*self.sections, PRESET_OPTION.name]
        hint = suggestion(name, known)
        longer = [section for section in known if len(name) > 2 and section.startswith(name)]
        if longer and nearest(name, known) is None:
            hint = f"did you mean `{longer[0]}`? {hint}"
        elif entry.section:
            hint += f"; if it belongs to a plugin `{name}`, install that, or {delete}"
        raise ConfigError(
            f"{where}: unknown section `{name}`",
            why="neither lmcore nor an installed plugin has a section of this name",
            hint=hint,
        )

    def _key_hint(self, entry: Entry) -> str:
        foreign = train_flags().get("--" + entry.key.replace("_", "-"))
        if foreign is not None and foreign.replacement:
            return f"here it is `{foreign.replacement.removeprefix('--').replace('-', '_')}`"
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
    values = {name: option.default for name, option in options.items()}
    provenance = {name: Provenance("default") for name in options}
    for layer in layers:
        for group in EXCLUSIVE:
            if any(layer[name][0] not in (None, ()) for name in group if name in layer):
                for name in group:
                    values[name] = options[name].default
                    provenance[name] = Provenance("default")
        for name, (value, origin) in layer.items():
            values[name], provenance[name] = value, origin
    if values["tokenizer_type"] is None and values["vocab_file"] and values["merge_file"]:
        values["tokenizer_type"] = _BYTE_PAIR
        formula = "vocab_file and merge_file are given"
        provenance["tokenizer_type"] = Provenance("derived", formula)
    for name in ("lr_warmup_iters", "lr_warmup_samples"):
        by_default = provenance["lr_warmup_fraction"].kind == "default"
        if by_default and provenance[name].kind != "default":
            values["lr_warmup_fraction"] = None
            provenance["lr_warmup_fraction"] = Provenance("derived", f"{name} is given")
    sections = {
        section: kind(
            **{
                name: values[name]
                for name, option in _CORE_OPTIONS.items()
                if option.section == section
            }
        )
        for section, kind in SECTIONS.items()
    }
    try:
        settings = plugins.settings(values)
    except ConfigError as problem:
        problems.append(problem)
        settings = PluginSettings()
    return Config(**sections, plugins=settings), provenance
