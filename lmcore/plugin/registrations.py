"""The plugins' additions: options, commands, corpora, tokenizers, records of several kinds.

The hook of every usable plugin is called alone.  A plugin that fails adds nothing, not even what it
registered before it failed, and a warning says so; an error about a name that it might have added
has the failure as its reason.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from lmcore.base.errors import LmcoreError, PluginError
from lmcore.config.plugin_section import LeftOut, PluginSections, plugin_options
from lmcore.contract.registry import (
    CommandRegistry,
    CorpusRegistry,
    EngineRegistry,
    FamilyRegistry,
    FormatRegistry,
    LoggerRegistry,
    OptionRegistry,
    PluginCorpus,
    PluginTask,
    TaskRegistry,
    TokenizerRegistry,
)
from lmcore.plugin.record import PluginRecord, PluginSet, PluginState, describe

if TYPE_CHECKING:
    from pathlib import Path

    from lmcore.config.option import Option
    from lmcore.contract.tokenizer import Tokenizer, TokenizerFactory
    from lmcore.model.checkpoint_format import CheckpointFormat
    from lmcore.model.command import Command

__all__ = [
    "Registrations",
    "added_records",
    "load_command",
    "plugin_commands",
    "plugin_corpora",
    "plugin_sections",
    "plugin_tasks",
    "plugins_records",
    "register_engines",
    "register_families",
    "register_formats",
    "register_loggers",
    "registered_types",
    "restore_records",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CORE = "lmcore"
_QUESTIONS = ("matches", "checkpoints", "lacks", "tokenizer_places")
"""Functions of a format that are asked about a directory."""


@dataclass(frozen=True)
class Registrations(Mapping[str, T], Generic[T]):
    """The plugins' registrations under one hook, by name.

    Attributes:
        found: the registrations.
        plugins: plugin of each registration.
        failures: reason why a plugin added nothing, by plugin name: it failed now, or before.
    """

    found: Mapping[str, T] = field(default_factory=dict)
    plugins: Mapping[str, PluginRecord] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> T:
        return self.found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def why_missing(self) -> str | None:
        """Return the failures, as the reason in a message about an unknown name; None if none."""
        return (
            "\n".join(
                f"plugin `{name}` might add it: it {reason}"
                for name, reason in self.failures.items()
            )
            or None
        )


class _Registry(Protocol[T]):
    found: dict[str, T]


def plugin_sections(plugins: PluginSet, options: Iterable[Option] | None = None) -> PluginSections:
    """Return the settings that the usable plugins add, and the reasons why others add none.

    Args:
        plugins: result of `discover`.
        options: Options of the core whose flags no plugin may take; None: all options of
            `lmcore train`, and Megatron's flags.
    """
    flags = _core_flags() if options is None else _flags_of(options)
    asked: list[tuple[PluginRecord, OptionRegistry]] = []

    def registry(record: PluginRecord, _: Mapping[str, str]) -> OptionRegistry:
        for other, added in asked[-1:]:  # the options of the plugin before, if it did not fail
            for name, section in added.found.items():
                for option in plugin_options(name, section):
                    flags.update(dict.fromkeys(option.flags, f"plugin {other.label}"))
        asked.append((record, OptionRegistry(record.label, record.name, dict(flags))))
        return asked[-1][1]

    found = _collect(plugins, "lmcore_add_options", registry)
    left_out = {name: LeftOut(reason) for name, reason in found.failures.items()}
    for record in plugins:
        if record.state is PluginState.OFF:
            left_out[record.name] = LeftOut(f"is off: {record.reason}", wanted=True)
    return PluginSections(dict(found), left_out)


def plugin_commands(
    plugins: PluginSet,
    core_commands: Mapping[str, str] | None = None,
    groups: Collection[str] = (),
) -> Registrations[Command]:
    """Return the commands that the usable plugins add.

    Args:
        plugins: result of `discover`; the plugins need not have been probed.
        core_commands: Names that cannot be taken, each with its owner for messages.
        groups: Groups of the core, to which plugins may add commands.
    """
    core = core_commands or {}
    return _collect(
        plugins,
        "lmcore_add_commands",
        lambda record, taken: CommandRegistry(record.label, {**taken, **core}, groups),
    )


def plugin_corpora(
    plugins: PluginSet, core_corpora: Mapping[str, str] | None = None
) -> Registrations[PluginCorpus]:
    """Return the texts that the usable plugins bring.

    Args:
        plugins: result of `discover`.
        core_corpora: Names that cannot be taken, each with its owner for messages.
    """
    return _collect(
        plugins,
        "lmcore_add_corpora",
        lambda record, taken: CorpusRegistry(record.label, {**taken, **(core_corpora or {})}),
    )


def plugin_tasks(plugins: PluginSet, core_tasks: Mapping[str, str]) -> Registrations[PluginTask]:
    """Return the evaluation tasks that the usable plugins add.

    Args:
        plugins: result of `discover`.
        core_tasks: Names that cannot be taken, each with its owner for messages.

    Raises:
        PluginError: Two plugins have a task of one name: a score of either could be taken for the
            other's.
    """
    asked: list[tuple[PluginRecord, TaskRegistry]] = []

    def registry(record: PluginRecord, _: Mapping[str, str]) -> TaskRegistry:
        asked.append((record, TaskRegistry(record.label, core_tasks)))
        return asked[-1][1]

    found = _collect(plugins, "lmcore_add_tasks", registry)
    owners: dict[str, PluginRecord] = {}
    for record, added in asked:
        for name in added.found:
            other = owners.setdefault(name, record)
            if other is not record:
                raise PluginError(
                    f"plugins {other.label} and {record.label} have a task `{name}` each",
                    why="names are unique over all plugins",
                    hint=f"leave one out: `--plugin-off {record.name}`",
                )
    return found


def registered_types(
    plugins: PluginSet, core_types: Mapping[str, str] | None = None
) -> Registrations[TokenizerFactory]:
    """Return the tokenizer types of the usable plugins; a factory's tokenizers are checked.

    Args:
        plugins: result of `discover`.
        core_types: Names that cannot be taken, each with its owner for messages.
    """
    found = _collect(
        plugins,
        "lmcore_add_tokenizers",
        lambda record, taken: TokenizerRegistry(record.label, {**taken, **(core_types or {})}),
    )
    checked: dict[str, TokenizerFactory] = {
        name: _CheckedFactory(name, factory, found.plugins[name]) for name, factory in found.items()
    }
    return dataclasses.replace(found, found=checked)


def register_families(plugins: PluginSet) -> None:
    """Add the families of the usable plugins to the registry, in place of those added before.

    Args:
        plugins: Plugins that were found; they need not have been probed.
    """
    hook = "lmcore_add_families"
    if not _is_used(hook, plugins):
        return  # the records of the core's families are loaded when they are used
    registry = _registry(hook)
    _forget(hook, registry)
    own = [one.key for one in registry.values()]
    found = _records(plugins, hook, FamilyRegistry, own)
    _keep(hook, registry, {one.name: one for one in found.values()})


def register_formats(plugins: PluginSet) -> None:
    """Add the checkpoint formats of the usable plugins to the registry, as `register_families`."""
    hook = "lmcore_add_formats"
    if not _is_used(hook, plugins):
        return
    from lmcore.model.checkpoint_format import OWN_FORMATS

    registry = _registry(hook)
    _forget(hook, registry)
    found = _records(plugins, hook, FormatRegistry, [*OWN_FORMATS, *registry])
    _keep(hook, registry, {name: _guarded(one, found.plugins[name]) for name, one in found.items()})


def register_engines(plugins: PluginSet) -> None:
    """Add the training engines of the usable plugins to the registry, as `register_families`."""
    _register(plugins, "lmcore_add_engines", EngineRegistry)


def register_loggers(plugins: PluginSet) -> None:
    """Add the loggers of the usable plugins to the registry, as `register_families`."""
    _register(plugins, "lmcore_add_loggers", LoggerRegistry)


def _register(
    plugins: PluginSet, hook: str, kind: Callable[[str, Mapping[str, str]], _Registry[T]]
) -> None:
    if not _is_used(hook, plugins):
        return
    registry = _registry(hook)
    _forget(hook, registry)
    _keep(hook, registry, _records(plugins, hook, kind, registry))


def _forget(hook: str, registry: dict[str, T]) -> None:
    """Remove the records that plugins added by a hook."""
    for name in _added.pop(hook, ()):
        registry.pop(name, None)


def _keep(hook: str, registry: dict[str, T], found: Mapping[str, T]) -> None:
    """Add records of plugins to the core's registry."""
    _added[hook] = list(found)
    registry.update(found)


def _records(
    plugins: PluginSet,
    hook: str,
    kind: Callable[[str, Mapping[str, str]], _Registry[T]],
    own: Iterable[str],
) -> Registrations[T]:
    """Return the records that the usable plugins add by a hook.

    Args:
        plugins: Plugins that were found.
        hook: Name of the hook.
        kind: Class of its registry.
        own: Names that are the core's.
    """
    core = dict.fromkeys(own, _CORE)
    return _collect(plugins, hook, lambda record, taken: kind(record.label, {**taken, **core}))


def _guarded(one: CheckpointFormat, record: PluginRecord) -> CheckpointFormat:
    """Return a format whose failures name its plugin."""
    asked = {part: getattr(one, part) for part in _QUESTIONS}
    guarded: dict[str, Any] = {
        part: _Guarded(one.name, part, function, record)
        for part, function in asked.items()
        if function is not None
    }
    return dataclasses.replace(one, **guarded)


def plugins_records() -> frozenset[str]:
    """Return the names of families, formats, engines and loggers that plugins added here."""
    return frozenset(name for names in _added.values() for name in names)


_added: dict[str, list[str]] = {}
"""Names of the plugins' records in the core's registries, by hook."""
_REGISTRIES = {
    "lmcore_add_engines": "lmcore.model.training_engine:engines",
    "lmcore_add_families": "lmcore.model.family:families",
    "lmcore_add_formats": "lmcore.model.checkpoint_format:loaded_formats",
    "lmcore_add_loggers": "lmcore.model.run_logger:run_loggers",
}
"""Function that returns the core's registry for the records of each hook."""


def added_records() -> dict[str, dict[str, Any]]:
    """Return the records that plugins added to the core's registries, by hook and name."""
    return {hook: {one: _registry(hook)[one] for one in names} for hook, names in _added.items()}


def restore_records(before: Mapping[str, Mapping[str, Any]]) -> None:
    """Have the plugins' records of an earlier time in the core's registries, and no others.

    Args:
        before: Result of `added_records` at that time; empty: none.
    """
    for hook in [*_added]:
        _forget(hook, _registry(hook))
    for hook, found in before.items():
        _keep(hook, _registry(hook), found)


def _registry(hook: str) -> dict[str, Any]:
    module, _, function = _REGISTRIES[hook].partition(":")
    registry: dict[str, Any] = getattr(importlib.import_module(module), function)()
    return registry


def _is_used(hook: str, plugins: PluginSet) -> bool:
    return bool(_added.get(hook)) or any(record.implements(hook) for record in plugins.usable)


@dataclass(frozen=True)
class _Guarded:
    """Question of a plugin's format about a directory; a failure of it names the plugin."""

    name: str
    part: str
    function: Callable[[Path], Any]
    record: PluginRecord

    def __call__(self, directory: Path) -> Any:
        try:
            return self.function(directory)
        except LmcoreError:
            raise
        except Exception as cause:
            raise PluginError(
                f"the checkpoint format `{self.name}` of plugin {self.record.label} failed",
                why=f"its `{self.part}` raised {describe(cause)} for `{directory}`",
                hint=f"update or remove `{self.record.distribution}`",
            ) from cause


def load_command(command: Command, record: PluginRecord) -> Callable[[list[str]], int]:
    """Return the function of a plugin's command; its return value is checked.

    Raises:
        PluginError: It cannot be loaded; the message names plugin and cause.
    """
    module, _, name = command.load.partition(":")
    what = f"command `{command.name}` of plugin {record.label} cannot be loaded"
    hint = f"update or remove `{record.distribution}`, or report this to its authors"
    try:
        function = getattr(importlib.import_module(module), name)
    except LmcoreError:
        raise
    except (Exception, SystemExit) as cause:
        why = f"`{command.load}` raised {describe(cause)}"
        raise PluginError(what, why=why, hint=hint) from cause
    if not callable(function):
        raise PluginError(what, why=f"`{command.load}` is {function!r:.200}", hint=hint)

    def run(arguments: list[str]) -> int:
        status = function(arguments)
        if isinstance(status, bool) or not isinstance(status, int):
            raise PluginError(
                f"command `{command.name}` of plugin {record.label} returned {status!r:.200}",
                why="a command returns its exit status",
                hint=hint,
            )
        return status

    return run


def _collect(
    plugins: PluginSet,
    hook: str,
    new_registry: Callable[[PluginRecord, Mapping[str, str]], _Registry[T]],
) -> Registrations[T]:
    """Call the hook of every usable plugin; a failing one adds nothing and is warned about.

    Args:
        plugins: result of `discover`.
        hook: name of a hook that takes a registry.
        new_registry: makes a registry from a plugin and the names that others have taken.
    """
    found: dict[str, T] = {}
    owners: dict[str, PluginRecord] = {}
    failures = {one.name: one.trouble for one in plugins.troubled}
    for record in plugins.usable:
        if not record.implements(hook):
            continue
        taken = {name: f"plugin {owner.label}" for name, owner in owners.items()}
        registry = new_registry(record, taken)
        try:
            record.call(hook, registry=registry)
        except LmcoreError as error:
            failures[record.name] = f"failed at `{hook}`: {error.what_and_why}"
            logger.warning("plugin %s is left out at `%s`: %s", record.label, hook, error)
            registry.found.clear()
            continue
        found |= registry.found
        owners |= dict.fromkeys(registry.found, record)
    return Registrations(found, owners, failures)


def _core_flags() -> dict[str, str]:
    """Return the flags that no plugin may take, each with its owner."""
    from lmcore.config.continued import CONTINUE_OPTION
    from lmcore.config.foreign.megatron import FIXED, RENAMED, UNSUPPORTED
    from lmcore.config.megatron_defaults import DEFAULTS_OPTION
    from lmcore.config.preset import PRESET_OPTION
    from lmcore.config.section import run_options
    from lmcore.config.token_lengths import TOKEN_OPTIONS

    flags = dict.fromkeys([*RENAMED, *FIXED, *UNSUPPORTED], "Megatron")
    sources = (PRESET_OPTION, DEFAULTS_OPTION, CONTINUE_OPTION)
    return flags | _flags_of((*sources, *TOKEN_OPTIONS, *run_options().values()))


def _flags_of(options: Iterable[Option]) -> dict[str, str]:
    return {flag: _CORE for option in options for flag in option.flags}


@dataclass(frozen=True)
class _CheckedFactory:
    """A plugin's tokenizer factory whose failures and products name the plugin."""

    name: str
    factory: TokenizerFactory
    record: PluginRecord

    def __call__(self, **options: Any) -> Tokenizer:
        try:
            made = self.factory(**options)
        except LmcoreError:
            raise
        except Exception as cause:
            raise self._error(f"raised {describe(cause)}") from cause
        problem = _tokenizer_problem(made, self.name)
        if problem is not None:
            raise self._error(problem)
        return made

    def _error(self, why: str) -> PluginError:
        return PluginError(
            f"tokenizer type `{self.name}` of plugin {self.record.label} cannot be built",
            why=f"its factory {why}",
            hint=f"update or remove `{self.record.distribution}`, or report this to its authors",
        )


def _tokenizer_problem(made: Any, name: str) -> str | None:
    from lmcore.contract.tokenizer import Tokenizer

    if not isinstance(made, Tokenizer):
        return f"returned {made!r:.200}, not a `lmcore.contract.tokenizer.Tokenizer`"
    if getattr(made, "name", None) != name:
        return f"made one that calls itself {getattr(made, 'name', None)!r:.100}"
    size, eod = getattr(made, "vocab_size", None), getattr(made, "eod", "missing")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        return f"made one whose `vocab_size` is {size!r:.100}"
    if eod is not None and (
        isinstance(eod, bool) or not isinstance(eod, int) or not 0 <= eod < size
    ):
        return f"made one whose `eod` is {eod!r:.100}, which is no id below {size}"
    return None
