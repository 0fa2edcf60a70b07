"""Settings of a run as given: the value of every option and where it comes from."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmcore.base.errors import LmcoreError
from lmcore.config.derived.data_source import RunSources, read_sources
from lmcore.config.option import Option, flag_of
from lmcore.config.plugin_section import NO_PLUGINS, PluginSections
from lmcore.config.section import Config, run_options

__all__ = ["LoadedConfig", "Provenance", "UnreadSettingError", "readable", "value_text"]

_CORE_OPTIONS = run_options()


class UnreadSettingError(Exception):
    """A rule reads a setting whose value is unknown, because what gives it could not be read."""


@dataclass(frozen=True)
class Provenance:
    """Origin of a value.

    Attributes:
        kind: "default", "defaults" of `--defaults`, "preset", "file", "flag", "environment",
            "checkpoint", or "derived" from other values.
        detail: The preset's name, "run.yaml:12", the flag as typed, the formula, or "Megatron's
            default".
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

    @property
    def by_user(self) -> bool:
        """True if a flag or file sets the value, not a preset or `--defaults` that it repeats."""
        repeated = self.origin.startswith("preset") or self.origin.endswith("'s default")
        return self.kind in {"file", "flag"} and not repeated

    def __str__(self) -> str:
        if self.kind in {"file", "flag", "defaults"} or not self.detail:
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
            without effect, one about defaults that are not Megatron's then, and one line for each
            part of a file that is ignored.
        texts: Flags as typed, by option name.
        plugins: Sections that plugins add.
        accumulation_steps: Micro-batches of a step, if an engine's file gives their number.
        problems: Flags of Megatron that are not supported; `validate` raises them together with
            the problems of the settings.
        unread: Names of the options whose values could not be read; reading one raises
            `UnreadSettingError`.
        corpora: Corpora that validation sets name.
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
    unread: frozenset[str] = frozenset()
    corpora: frozenset[str] = frozenset()

    def without(self, unread: Collection[str]) -> LoadedConfig:
        """Return the settings with some options of the core unread.

        What depends on none of them can be checked all the same: see `readable`.

        Args:
            unread: Names of the options.
        """
        names = frozenset(unread) & _CORE_OPTIONS.keys()
        known = {name: origin for name, origin in self.provenance.items() if name not in names}
        return dataclasses.replace(
            self, config=_hidden(self.config, names), provenance=_Known(known), unread=names
        )

    @functools.cached_property
    def sources(self) -> tuple[RunSources, list[LmcoreError]]:
        """The data sources that the flags name, and every problem of these flags."""
        return read_sources(self.config.data, self.config.task, self.corpora)

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
        text = value_text(self.value(name))
        return f"`{name}: {text}` ({'the default' if origin.kind == 'default' else origin})"

    def removal(self, name: str) -> str:
        """Return the instruction that removes an option from where the user wrote it, for hints."""
        origin = self.provenance[name]
        if origin.kind != "file":
            return f"remove `{origin.detail if origin.kind == 'flag' else flag_of(name)}`"
        file, _, key = origin.detail.partition(": ")  # with a key: an engine's file
        return f"delete `{key or self.options[name].key}` from `{file}`"

    def given(self, name: str) -> bool:
        """Return True if the user or a preset set the option called *name*."""
        return self.provenance[name].kind not in {"default", "defaults", "derived"}


def value_text(value: Any) -> str:
    """Return a value of an option in words, as a file of settings has it."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def readable(problems: Iterable[LmcoreError]) -> list[LmcoreError]:
    """Return the problems that a rule finds before it reads a setting that is unread."""
    found: list[LmcoreError] = []
    with contextlib.suppress(UnreadSettingError):
        found.extend(problems)
    return found


class _Known(dict[str, Provenance]):
    """Provenance of the options that could be read."""

    def __missing__(self, name: str) -> Provenance:
        raise UnreadSettingError(name)


def _hidden(config: Config, unread: Collection[str]) -> Config:
    """Return settings in which reading certain options raises `UnreadSettingError`."""
    by_section: dict[str, dict[str, property]] = {}
    for name in unread:
        option = _CORE_OPTIONS[name]
        by_section.setdefault(option.section, {})[option.key] = property(_raise_unread)
    hidden = copy.copy(config)
    for section, properties in by_section.items():
        original = getattr(config, section)
        kind: Any = type(type(original).__name__, (type(original),), properties)
        blind = object.__new__(kind)
        vars(blind).update(vars(original))  # a property hides the value of its name
        object.__setattr__(hidden, section, blind)
    return hidden


def _raise_unread(section: Any) -> Any:
    raise UnreadSettingError(type(section).__name__)
