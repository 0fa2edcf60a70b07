"""Sections of a run's configuration, one file for each, loaded at their first use.

A loop of the user's own reads two or three of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import PluginError
from lmcore.config.option import Option, options_of
from lmcore.config.plugin_section import NO_PLUGINS, PluginSections, PluginSettings

if TYPE_CHECKING:
    from lmcore.config.section.accelerator import AcceleratorSection
    from lmcore.config.section.bert import BertSection
    from lmcore.config.section.checkpoint import CheckpointSection
    from lmcore.config.section.data import DataSection
    from lmcore.config.section.evaluation import EvaluationSection
    from lmcore.config.section.ict import IctSection
    from lmcore.config.section.logging import LoggingSection
    from lmcore.config.section.model import ModelSection
    from lmcore.config.section.optimizer import OptimizerSection
    from lmcore.config.section.parallel import ParallelSection
    from lmcore.config.section.profile import ProfileSection
    from lmcore.config.section.retro import RetroSection
    from lmcore.config.section.t5 import T5Section
    from lmcore.config.section.task import TaskSection
    from lmcore.config.section.training import TrainingSection

    SECTIONS: dict[str, type]

__all__ = [
    "SECTIONS",
    "SECTION_NAMES",
    "AcceleratorSection",
    "BertSection",
    "CheckpointSection",
    "Config",
    "DataSection",
    "EvaluationSection",
    "IctSection",
    "LoggingSection",
    "ModelSection",
    "OptimizerSection",
    "ParallelSection",
    "ProfileSection",
    "RetroSection",
    "T5Section",
    "TaskSection",
    "TrainingSection",
    "config_of",
    "run_options",
    "section_options",
]

SECTION_NAMES = (
    *("model", "training", "data", "optimizer", "checkpoint"),
    *("accelerator", "parallel", "logging", "profile", "bert", "ict", "t5", "retro", "task"),
    "evaluation",
)
_CLASSES = {name: f"{name.title()}Section" for name in SECTION_NAMES}
"""Name of the class of each section, in the module of the section's name."""


def __getattr__(name: str) -> Any:
    """Load a section's class, or `SECTIONS` with all of them, at its first use."""
    if name == "SECTIONS":
        value: Any = {section: _class_of(section) for section in SECTION_NAMES}
    elif name in _CLASSES.values():
        value = _class_of(next(key for key, kind in _CLASSES.items() if kind == name))
    else:
        raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
    globals()[name] = value
    return value


def _class_of(section: str) -> Any:
    module = importlib.import_module(f"{__name__}.{section}")
    return getattr(module, _CLASSES[section])


def _default(section: str) -> Any:
    """Return a section with the defaults of its options."""
    return _class_of(section)()


@dataclass(frozen=True)
class Config:
    """All settings of a run, by section.

    Attributes:
        plugins: Section of each plugin that adds one, by plugin name.
    """

    model: ModelSection = field(default_factory=partial(_default, "model"))
    training: TrainingSection = field(default_factory=partial(_default, "training"))
    data: DataSection = field(default_factory=partial(_default, "data"))
    optimizer: OptimizerSection = field(default_factory=partial(_default, "optimizer"))
    checkpoint: CheckpointSection = field(default_factory=partial(_default, "checkpoint"))
    accelerator: AcceleratorSection = field(default_factory=partial(_default, "accelerator"))
    parallel: ParallelSection = field(default_factory=partial(_default, "parallel"))
    logging: LoggingSection = field(default_factory=partial(_default, "logging"))
    profile: ProfileSection = field(default_factory=partial(_default, "profile"))
    bert: BertSection = field(default_factory=partial(_default, "bert"))
    ict: IctSection = field(default_factory=partial(_default, "ict"))
    t5: T5Section = field(default_factory=partial(_default, "t5"))
    retro: RetroSection = field(default_factory=partial(_default, "retro"))
    task: TaskSection = field(default_factory=partial(_default, "task"))
    evaluation: EvaluationSection = field(default_factory=partial(_default, "evaluation"))
    plugins: PluginSettings = field(default_factory=PluginSettings)

    if not TYPE_CHECKING:  # for a type checker, every attribute is declared above

        def __getattr__(self, name: str) -> Any:
            """Return a section that `config_of` has left out, with its defaults."""
            if name not in _CLASSES:
                raise AttributeError(f"`Config` has no attribute `{name}`")
            section = _default(name)
            object.__setattr__(self, name, section)
            return section

    def named(self, name: str) -> Any:
        """Return the value of the option of a name, of the core or a plugin."""
        if name in run_options():
            return self.value(run_options()[name])
        for plugin in self.plugins:
            key = name.removeprefix(f"{plugin}_")
            if key != name and hasattr(self.plugins[plugin], key):
                return getattr(self.plugins[plugin], key)
        raise PluginError(
            f"no plugin has the setting `{name}`, which a family of models names",
            why="a name in `Family.settings` is the plugin's name, `_` and a field of its options",
            hint="correct the name, or the field, in the plugin",
        )

    def value(self, option: Option) -> Any:
        """Return the value of an option."""
        section = self.plugins[option.plugin] if option.plugin else getattr(self, option.section)
        return getattr(section, option.key)


@cache
def section_options(name: str) -> tuple[Option, ...]:
    """Return the options of a section of the core, in order."""
    return options_of(_class_of(name), name=name)


@cache
def run_options() -> Mapping[str, Option]:
    """Return every option of the core by name; names are unique over all sections."""
    found: dict[str, Option] = {}
    for name in SECTION_NAMES:
        for option in section_options(name):
            if option.name in found:
                raise TypeError(f"option `{option.name}` is declared in two sections")
            found[option.name] = option
    return MappingProxyType(found)


def config_of(
    values: Mapping[str, Mapping[str, Any]],
    plugin_values: Mapping[str, Any],
    plugins: PluginSections = NO_PLUGINS,
) -> Config:
    """Return the settings with given values, and the defaults of all other options.

    Sections without a value are created when they are read.

    Args:
        values: Values of the core's options by section and name, from `Option.convert`.
        plugin_values: Values of the plugins' options by name.
        plugins: Sections that plugins add.

    Raises:
        ConfigError: A plugin refuses its settings.
    """
    config = object.__new__(Config)
    for name, given in values.items():
        object.__setattr__(config, name, _class_of(name)(**given))
    object.__setattr__(config, "plugins", plugins.settings(plugin_values))
    return config
