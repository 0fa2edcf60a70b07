"""Settings of a run as given: the value of every option and where it comes from."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lmcore.config.derived.data_source import RunSources, read_sources
from lmcore.config.option import Option
from lmcore.config.plugin_section import NO_PLUGINS, PluginSections
from lmcore.config.section import Config, run_options
from lmcore.errors import LmcoreError

__all__ = ["LoadedConfig", "Provenance"]

_CORE_OPTIONS = run_options()


@dataclass(frozen=True)
class Provenance:
    """Origin of a value.

    Attributes:
        kind: "default", "preset", "file", "flag", "checkpoint", or "derived" from other values.
        detail: The preset's name, "run.yaml:12", the flag as typed, or the formula.
        origin: Source of the value of a run's `config.yaml` when that file was written, such as
            the flag of the first start; empty for any other source.
    """

    kind: str
    detail: str = ""
    origin: str = ""

    @property
    def source(self) -> str:
        """Source of the value: the origin, if the value was only repeated by a file."""
        return self.origin or str(self)

    def __str__(self) -> str:
        if self.kind in {"file", "flag"} or not self.detail:
            return self.detail or self.kind
        return f"{self.kind}: {self.detail}"


@dataclass(frozen=True)
class LoadedConfig:
    """Settings as the user gave them, each with its provenance.

    Attributes:
        config: Values of all options, by section.
        provenance: Origin of every option's value, by name.
        preset: Name of the preset; None if none was given.
        files: Paths of the YAML files, in the order given.
        notices: One message about the Megatron flags that were translated, one about the flags
            without effect, and one line for each part of a file that is ignored.
        texts: Flags as typed, by option name.
        plugins: Sections that plugins add.
        accumulation_steps: Micro-batches of a step, if DeepSpeed's file gives their number.
        problems: Flags of Megatron that are not supported; `validate` raises them together with
            the problems of the settings.
    """

    config: Config
    provenance: Mapping[str, Provenance]
    preset: str | None = None
    files: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
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
        """Return an option as the user wrote it, in backticks, for messages."""
        origin = self.provenance[name]
        if origin.kind == "flag" and name in self.texts:
            return f"`{self.texts[name]}`"
        value = self.value(name)
        text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        return f"`{name}: {text}` ({'the default' if origin.kind == 'default' else origin})"

    def given(self, name: str) -> bool:
        """Return True if the user or a preset set the option called *name*."""
        return self.provenance[name].kind not in {"default", "derived"}
