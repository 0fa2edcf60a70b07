"""Sections of a run's configuration, one file for each."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from lmcore.config.option import Option, options_of
from lmcore.config.plugin_section import NO_PLUGINS, PluginSections, PluginSettings
from lmcore.config.section.accelerator import AcceleratorSection
from lmcore.config.section.checkpoint import CheckpointSection
from lmcore.config.section.data import DataSection
from lmcore.config.section.logging import LoggingSection
from lmcore.config.section.model import ModelSection
from lmcore.config.section.optimizer import OptimizerSection
from lmcore.config.section.parallel import ParallelSection
from lmcore.config.section.profile import ProfileSection
from lmcore.config.section.training import TrainingSection

__all__ = [
    "SECTIONS",
    "AcceleratorSection",
    "CheckpointSection",
    "Config",
    "DataSection",
    "LoggingSection",
    "ModelSection",
    "OptimizerSection",
    "ParallelSection",
    "ProfileSection",
    "TrainingSection",
    "config_of",
    "run_options",
]

SECTIONS: dict[str, type] = {
    "model": ModelSection,
    "training": TrainingSection,
    "data": DataSection,
    "optimizer": OptimizerSection,
    "checkpoint": CheckpointSection,
    "accelerator": AcceleratorSection,
    "parallel": ParallelSection,
    "logging": LoggingSection,
    "profile": ProfileSection,
}


@dataclass(frozen=True)
class Config:
    """All settings of a run, by section.

    Attributes:
        plugins: Section of each plugin that adds one, by plugin name.
    """

    model: ModelSection = field(default_factory=ModelSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    data: DataSection = field(default_factory=DataSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    accelerator: AcceleratorSection = field(default_factory=AcceleratorSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    logging: LoggingSection = field(default_factory=LoggingSection)
    profile: ProfileSection = field(default_factory=ProfileSection)
    plugins: PluginSettings = field(default_factory=PluginSettings)

    def value(self, option: Option) -> Any:
        """Return the value of an option."""
        section = self.plugins[option.plugin] if option.plugin else getattr(self, option.section)
        return getattr(section, option.key)


@functools.cache
def run_options() -> Mapping[str, Option]:
    """Return every option of the core by name; names are unique over all sections."""
    found: dict[str, Option] = {}
    for name, section in SECTIONS.items():
        for option in options_of(section, name=name):
            if option.name in found:
                raise TypeError(f"option `{option.name}` is declared in two sections")
            found[option.name] = option
    return MappingProxyType(found)


def config_of(values: Mapping[str, Any], *, plugins: PluginSections = NO_PLUGINS) -> Config:
    """Return the settings with given values, and the defaults of all other options.

    Args:
        values: Values by the name of their option, from `Option.convert`.
        plugins: Sections that plugins add.

    Raises:
        ConfigError: A plugin refuses its settings.
    """
    given = {
        name: kind(**{one.name: values[one.name] for one in fields(kind) if one.name in values})
        for name, kind in SECTIONS.items()
    }
    return Config(**given, plugins=plugins.settings(values))
