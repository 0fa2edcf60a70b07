"""Merge of a run's settings: defaults < preset < run of `--continue` < YAML files < flags.

The defaults are lmcore's, or Megatron's by `--defaults megatron`.

If two options exclude each other (`train_iters` and `train_samples`), a value from a higher source
resets the other option from a lower one.  Both in one source are a conflict, which `validate`
reports.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmcore.base.errors import ConfigError, LmcoreError
from lmcore.config.continued import CONTINUE_OPTION, ContinuedRun
from lmcore.config.engine import settle_engine
from lmcore.config.file.corpora_file import corpora_layer, corpus_names
from lmcore.config.file.saved_settings import SavedSettings
from lmcore.config.foreign.engine_file import EngineFile
from lmcore.config.foreign.megatron_flags import train_flags
from lmcore.config.megatron_defaults import (
    DEFAULTS_OPTION,
    defaults_layer,
    note_of_defaults,
)
from lmcore.config.option import Option
from lmcore.config.options.flags import (
    CONFIG_FILES,
    ParsedFlags,
    Positional,
    UnsupportedFlagError,
    parse_flags,
)
from lmcore.config.plugin_section import NO_PLUGINS, PluginSections, PluginSettings
from lmcore.config.preset import PRESET_OPTION, PRESETS
from lmcore.config.section import SECTIONS, Config, run_options
from lmcore.config.section.parallel import ENGINE_FILE
from lmcore.config.settings import LoadedConfig, Provenance
from lmcore.config.settings_file import SettingsFile
from lmcore.config.token_lengths import TOKEN_OPTIONS, SamplesOfTokens, samples_of_tokens
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.config.validate import problems_of
from lmcore.model.family import named_family
from lmcore.model.training_engine import engine_named

__all__ = ["EXCLUSIVE", "load_config"]

logger = logging.getLogger(__name__)

EXCLUSIVE: tuple[tuple[str, ...], ...] = (
    (
        "corpus",
        "mock_data",
        "data_path",
        "data_file_list",
        "train_data",
        "train_data_path",
        "train_weighted_split_paths",
        "task_data",
    ),
    ("valid_data", "valid_data_path", "valid_weighted_split_paths", "task_valid_data"),
    ("test_data", "test_data_path", "test_weighted_split_paths"),
    ("train_iters", "train_samples"),
    ("lr_decay_iters", "lr_decay_samples"),
    ("lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples"),
    ("schedule", "use_checkpoint_opt_param_scheduler", "override_opt_param_scheduler"),
)
"""Groups of options that exclude each other."""

_NULL = "NullTokenizer"
_BYTE_PAIR = "GPT2BPETokenizer"  # the only type that takes both files; Megatron's type for GPT

_CONFIG_FILES = Positional(CONFIG_FILES, "YAML file of settings", maximum=None)

_CORE_OPTIONS = run_options()

_Layer = dict[str, tuple[Any, Provenance]]
"""Values of one source with their provenance, by option name."""

_TOKENIZER = {field.name for field in dataclasses.fields(TokenizerSettings)} - {"vocab_size"}
"""Options that choose a tokenizer."""

SavedReader = Callable[[Path, str | None], SavedSettings]
"""Returns the settings in the checkpoint at a path, or of the step that `--ckpt-step` names."""
ForeignReader = Callable[[Path, str | None], SavedSettings | None]
"""Returns the same of another program's checkpoint: model and tokenizer; None if there is none."""
ForeignRunCheck = Callable[[Path, str | None], LmcoreError | None]
"""Returns the error for a path of `--continue` that is another program's, and for the step of
`--ckpt-step`; None if it is none."""

Check = Callable[[LoadedConfig], Sequence[LmcoreError]]
"""Returns every problem of settings, some of them unread."""


def _without_processes(loaded: LoadedConfig) -> Sequence[LmcoreError]:
    return problems_of(loaded, world_size=None)


_SOURCES = (PRESET_OPTION, DEFAULTS_OPTION, CONTINUE_OPTION, *TOKEN_OPTIONS)
"""Options that set others: they name a source of settings, or lengths in tokens."""


def load_config(
    argv: Sequence[str],
    *,
    plugins: PluginSections = NO_PLUGINS,
    saved_settings: SavedReader | None = None,
    foreign_settings: ForeignReader | None = None,
    foreign_run: ForeignRunCheck | None = None,
    check: Check = _without_processes,
    announce: bool = True,
) -> LoadedConfig:
    """Return the settings that the arguments of `lmcore train` describe; `validate` checks them.

    Megatron's flags that were translated are logged in one message, as are those without effect.

    Args:
        argv: YAML files, flags, `--preset`, `--defaults`, `--continue`.
        plugins: Sections that plugins add.
        saved_settings: Reads settings from a checkpoint, for `--use-checkpoint-args` and a run
            without `config.yaml` that is continued; None if checkpoints are not read.
        foreign_settings: Reads another program's checkpoint of `--load`; None: none is read.
        foreign_run: Explains a `--continue` that names another program's checkpoint; None if
            checkpoints are not read.
        check: Returns the problems of the settings that could be read, if others cannot.
        announce: False if the launcher of this process has logged the notices.

    Raises:
        ConfigError: Every setting that cannot be read, and what *check* finds, at once.  Flags of
            Megatron that are not supported are in `LoadedConfig.problems` instead.
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
    continued = _continued_run(parsed, problems, foreign_run)
    is_whole = not problems[len(parsed.problems) :] and not parsed.unread & {"preset", "defaults"}
    paths = parsed.positionals[_CONFIG_FILES.name]
    if continued is not None and continued.settings_file is not None:
        paths = (str(continued.settings_file), *paths)
    files = [SettingsFile(path, options, plugins) for path in paths]
    for file in files:
        file.read(problems)
    warnings = [notice for file in files for notice in file.notices]
    layers, known = [*(file.layer for file in files), _flag_layer(parsed)], len(problems)
    layers = _continued_layers(continued, options, layers, files, saved_settings, problems)
    preset = _preset(parsed, files)
    below_files = [{} if continued else corpora_layer(layers, paths, os.environ)]
    below_files.append(defaults_layer(parsed.values.get(DEFAULTS_OPTION.name)))
    below_files += [] if preset is None else [_preset_layer(preset)]
    foreign = _foreign_layer(foreign_settings, options, layers, problems)
    if not foreign and (saved := _saved_model(layers, saved_settings)) is not None:
        below_files.append(saved.model_layer(options, problems))
    below_files.append(foreign)
    is_whole &= len(problems) == known and all(file.is_whole for file in files)
    engine_file = _engine_file(layers)
    if engine_file is not None:
        below_files.append(_engine_layer(engine_file, options, layers, parsed.texts, problems))
        warnings += engine_file.notices()
    counts = _samples_of_tokens(parsed, options, [*below_files, *layers])
    layers[-1] = {**layers[-1], **counts.values}
    config, provenance = _merge(options, [*below_files, *layers], plugins, problems)
    loaded = LoadedConfig(
        *(config, provenance, preset, paths, (), {**parsed.texts, **counts.texts}, plugins),
        None if engine_file is None else engine_file.accumulation_steps,
        corpora=corpus_names(config.data.corpora, config.data.valid_data),
    )
    loaded, lines = _with_engine(loaded, engine_file, problems)
    notices = [*_notices(parsed, loaded), *counts.notices, *lines]
    if not all(isinstance(problem, UnsupportedFlagError) for problem in problems):
        unread = _unread(options, parsed, files, engine_file, layers, is_whole=is_whole)
        raise ConfigError.collect(check(loaded.without(unread)))
    if not problems:
        warnings += _new_directory(config, [one for file in files for one in file.run_directories])
        if announce:
            _log(notices, warnings)
    return dataclasses.replace(loaded, notices=(*notices, *warnings))


def _samples_of_tokens(
    parsed: ParsedFlags, options: Mapping[str, Option], layers: Sequence[_Layer]
) -> SamplesOfTokens:
    """Return the samples of flags that give lengths in tokens."""
    length = _highest(layers, "seq_length") or options["seq_length"].default
    return samples_of_tokens(parsed.values, parsed.texts, length)


def _with_engine(
    loaded: LoadedConfig, file: EngineFile | None, problems: list[LmcoreError]
) -> tuple[LoadedConfig, list[str]]:
    """Return the settings with the engine of the run and all problems, and lines about both."""
    loaded, line = settle_engine(loaded)
    notices = [] if line is None else [line]
    engine = engine_named(loaded.config.parallel.engine)
    if file is not None and engine.open and not engine.takes_file:
        problems += file.native_problems()
        line = file.native_notice()
        notices += [] if line is None else [line]
    return dataclasses.replace(loaded, problems=tuple(problems)), notices


def _log(notices: Sequence[str], warnings: Sequence[str]) -> None:
    for notice in notices:
        logger.info("%s", notice)
    for warning in warnings:
        logger.warning("%s", warning)


def _unread(
    options: Mapping[str, Option],
    parsed: ParsedFlags,
    files: Sequence[SettingsFile],
    engine_file: EngineFile | None,
    layers: Sequence[_Layer],
    *,
    is_whole: bool,
) -> set[str]:
    """Return the names of the options whose values are unknown because of a problem.

    Args:
        options: All options.
        parsed: The command line.
        files: Files of settings.
        engine_file: File of an engine's settings; None without one.
        layers: Values of the files and the command line.
        is_whole: False if a source could not be read at all, or not completely.
    """
    in_files = {name for file in files for name in file.unread}
    if engine_file is not None:
        in_files |= engine_file.unread
        is_whole &= engine_file.is_readable
    if not is_whole:
        in_files |= options.keys() - {name for layer in layers for name in layer}
    unread = parsed.unread | (in_files - parsed.values.keys())
    for group in EXCLUSIVE:
        unread = unread.union(group) if unread & set(group) else unread
    if unread & {"vocab_file", "merge_file"}:
        unread |= {"tokenizer_type"}
    return set(unread)


def _notices(parsed: ParsedFlags, loaded: LoadedConfig) -> tuple[str, ...]:
    """Return the messages about flags of Megatron, with the defaults that differ from its own."""
    chosen = any(option.name in parsed.values for option in (DEFAULTS_OPTION, CONTINUE_OPTION))
    differing = note_of_defaults(loaded.config, loaded.provenance)
    if not (parsed.translated or parsed.without_effect) or chosen:
        differing = ()
    if loaded.config.parallel.engine != parsed.values.get("engine"):
        parsed = parsed.without_translation("engine")  # a line of its own says who trains
    return *parsed.notices, *differing


def _continued_run(
    parsed: ParsedFlags, problems: list[LmcoreError], foreign_run: ForeignRunCheck | None
) -> ContinuedRun | None:
    """Return the run of `--continue`; add to *problems* what is wrong with it."""
    path = parsed.values.get(CONTINUE_OPTION.name)
    if path is None:
        return None
    try:
        run = ContinuedRun.at(path)
    except ConfigError as problem:
        step = parsed.values.get("ckpt_step")
        foreign = foreign_run(Path(path), step) if foreign_run is not None else None
        problems.append(foreign or problem)
        return None
    problems += run.conflicts(parsed.values, parsed.texts)
    return run


def _continued_layers(
    run: ContinuedRun | None,
    options: Mapping[str, Option],
    layers: list[_Layer],
    files: Sequence[SettingsFile],
    saved_settings: SavedReader | None,
    problems: list[LmcoreError],
) -> list[_Layer]:
    """Return the layers of a run that is continued; the first is its file's, if there is one.

    Without such a run they stay as they are.
    """
    if run is None:
        return layers
    own: _Layer = {}
    if run.settings_file is not None:
        own, *layers = layers
        hint = "remove it: without it the settings come from the checkpoint"
        if not files[0].is_readable:
            problems.append(ConfigError(f"`{run.settings_file}` is damaged", hint=hint))
        elif files[0].damage is not None:
            what = f"`{run.settings_file}` is empty or cut off"
            problems.append(ConfigError(what, why=files[0].damage, hint=hint))
    elif saved_settings is not None:
        step = _highest(layers, "ckpt_step")
        own = saved_settings(run.load, step).layer(options, problems)
    return run.layers(own, options, layers)


def _saved_model(layers: Sequence[_Layer], reader: SavedReader | None) -> SavedSettings | None:
    """Return the settings of the checkpoint of `--use-checkpoint-args`; None without it.

    None also at the first start of a run that saves and loads in one directory.

    Raises:
        LmcoreError: The checkpoint cannot be read.
    """
    load = _highest(layers, "load")
    if reader is None or load is None or not _highest(layers, "use_checkpoint_args"):
        return None
    if load == _highest(layers, "save") and not Path(load).exists():
        return None
    return reader(Path(load), _highest(layers, "ckpt_step"))


def _highest(layers: Sequence[_Layer], name: str) -> Any:
    """Return the value of an option in the highest of *layers* that has it; None if none has."""
    return next((layer[name][0] for layer in reversed(layers) if name in layer), None)


def _foreign_layer(
    reader: ForeignReader | None,
    options: Mapping[str, Option],
    layers: list[_Layer],
    problems: list[LmcoreError],
) -> _Layer:
    """Return model and tokenizer of `--load`, if it names a checkpoint of another program.

    A tokenizer in another source replaces all settings of its tokenizer.  If weights are all that
    it has, the run begins at step 0.
    """
    load = _highest(layers, "load")
    if reader is None or load is None:
        return {}
    saved = reader(Path(load), _highest(layers, "ckpt_step"))
    if saved is None:
        return {}
    found = saved.model_layer(options, problems)
    if any(layer.keys() & _TOKENIZER for layer in layers):
        found = {name: value for name, value in found.items() if name not in _TOKENIZER}
    if saved.continues:
        return found
    return found | {"finetune": (True, Provenance("checkpoint", saved.checkpoint))}


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


def _imply_type(values: dict[str, Any], provenance: dict[str, Provenance]) -> None:
    """Set the tokenizer type that a vocabulary without a type implies, if there is one."""
    if values["mock_data"]:
        _imply_mock_tokenizer(values, provenance)
    if values["tokenizer_type"] is not None or not values["vocab_file"]:
        return
    name = values["model_family"]
    family = named_family(name) if name else None
    if values["merge_file"]:
        implied, formula = _BYTE_PAIR, "vocab_file and merge_file are given"
    elif family is not None and family.vocabulary:
        implied, formula = family.vocabulary, f"vocab_file is given for {family.name}"
    else:
        return
    values["tokenizer_type"], provenance["tokenizer_type"] = implied, Provenance("derived", formula)


def _imply_mock_tokenizer(values: dict[str, Any], provenance: dict[str, Provenance]) -> None:
    """Set the tokenizer of random tokens if the size of their vocabulary is given."""
    size, rows = values["vocab_size"], values["pad_vocab_size_to"]
    files = ("vocab_file", "merge_file", "tokenizer_model", "tokenizer_name_or_path")
    named = values["tokenizer_type"] or next(filter(None, map(values.get, files)), None)
    if named not in (None, _NULL) or (size is None and rows is None):
        return
    if named is None:
        origin = Provenance("derived", "mock_data is given with the size of a vocabulary")
        values["tokenizer_type"], provenance["tokenizer_type"] = _NULL, origin
    if size is None:  # the tokenizer adds its end-of-document token
        values["vocab_size"] = max(rows - 1, 1)
        provenance["vocab_size"] = Provenance("derived", "pad_vocab_size_to - 1")


def _preset(parsed: ParsedFlags, files: Sequence[SettingsFile]) -> str | None:
    names = [parsed.values.get("preset"), *(file.preset for file in reversed(files))]
    return next((name for name in names if name is not None), None)


def _preset_layer(name: str) -> _Layer:
    origin = Provenance("preset", name)
    return {key: (value, origin) for key, value in PRESETS[name].values.items()}


def _flag_layer(parsed: ParsedFlags) -> _Layer:
    return {
        name: (value, Provenance("flag", parsed.texts[name].partition(" ")[0]))
        for name, value in parsed.values.items()
        if name not in {option.name for option in _SOURCES}
    }


def _engine_file(layers: Sequence[_Layer]) -> EngineFile | None:
    """Return the file of an engine that the highest of *layers* names; it is not read yet."""
    path = _highest(layers, ENGINE_FILE)
    return None if path is None else EngineFile(path)


def _engine_layer(
    file: EngineFile,
    options: Mapping[str, Option],
    layers: Sequence[_Layer],
    texts: Mapping[str, str],
    problems: list[LmcoreError],
) -> _Layer:
    """Return the settings in an engine's file; the user's value of a setting must be the same."""
    given = {
        name: (value, (origin.kind == "flag" and texts.get(name)) or f"{origin}: {name}: {value}")
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
            given = [layer[name][0] for name in group if name in layer]
            if any(value not in (None, ()) and value is not False for value in given):
                for name in group:
                    values[name] = options[name].default
                    provenance[name] = Provenance("default")
        for name, (value, origin) in layer.items():
            values[name], provenance[name] = value, origin
    _imply_type(values, provenance)
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
