"""Registries through which plugins add what is chosen by name: options, commands and so on.

A registry belongs to one plugin for the time of one hook call, and checks each registration at
once, so that a traceback points into the plugin.  `lmcore.plugin.registrations` makes the
registries and reads them afterwards; a plugin only calls `add`.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, TypeVar

from lmcore.base.errors import PluginError

if TYPE_CHECKING:
    from lmcore.contract.tokenizer import TokenizerFactory
    from lmcore.model.checkpoint_format import CheckpointFormat
    from lmcore.model.command import Command  # noqa: F401 - in the text of a base class
    from lmcore.model.family import Family
    from lmcore.model.run_logger import RunLogger
    from lmcore.model.training_engine import TrainingEngine

__all__ = [
    "CommandRegistry",
    "CorpusRegistry",
    "EngineRegistry",
    "FamilyRegistry",
    "FormatRegistry",
    "LoggerRegistry",
    "OptionRegistry",
    "PluginCorpus",
    "PluginTask",
    "TaskRegistry",
    "TokenizerRegistry",
]

T = TypeVar("T")

_WORD = r"[a-z][a-z0-9]*(-[a-z0-9]+)*"
_COMMAND = rf"{_WORD}( {_WORD})?"
_CORPUS = r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)*"  # names files
_TOKENIZER = r"[A-Za-z][A-Za-z0-9_.-]*"
_RECORD = r"[a-z][a-z0-9-]*"
_TASK = r"[A-Za-z][A-Za-z0-9_-]*"
_TARGET = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*"
_NOBODY: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class PluginCorpus:
    """A text that a plugin brings, for `--corpus NAME`."""

    name: str
    path: Path
    summary: str


@dataclass(frozen=True)
class PluginTask:
    """Evaluation task of a plugin, for `lmcore evaluate --task NAME`.

    Attributes:
        name: Name of the task.
        load: Its record, `module:object`.
    """

    name: str
    load: str


class _Registry(Generic[T]):
    """The registrations of one plugin.

    Attributes:
        found: The registrations by name.
    """

    kind = ""

    def __init__(self, plugin: str, taken: Mapping[str, str] = _NOBODY) -> None:
        """Create an empty registry.

        Args:
            plugin: Label of the plugin in messages.
            taken: Names in use, each with the label of its owner.
        """
        self._plugin = plugin
        self._taken = taken
        self.found: dict[str, T] = {}

    def _claim(self, name: object, pattern: str, wanted: str) -> str:
        """Return *name* if it is well formed and free.

        Raises:
            PluginError: It is not.
        """
        if not isinstance(name, str) or not re.fullmatch(pattern, name):
            raise self._error(
                f"registers {name!r:.100} as a {self.kind}", why=f"a name is {wanted}"
            )
        owner = self._plugin if name in self.found else self._taken.get(name)
        if owner is not None:
            raise self._error(
                f"registers the {self.kind} `{name}`, which is taken", why=f"it is {owner}'s"
            )
        return name

    def _summary(self, name: str, summary: object) -> str:
        if not isinstance(summary, str) or not summary.strip() or len(summary.splitlines()) > 1:
            raise self._error(
                f"registers the {self.kind} `{name}` with the summary {summary!r:.100}",
                why="a summary is one line of text",
            )
        return summary.strip()

    def _error(self, message: str, *, why: str) -> PluginError:
        return PluginError(f"plugin {self._plugin} {message}", why=why)


class OptionRegistry(_Registry[type]):
    """Registry of the hook `lmcore_add_options`."""

    kind = "section"

    def __init__(self, plugin: str, name: str, taken: Mapping[str, str] = _NOBODY) -> None:
        """Create an empty registry.

        Args:
            plugin: Label of the plugin in messages.
            name: The plugin's name, which its flags begin with.
            taken: Flags in use, each with the label of its owner.
        """
        super().__init__(plugin, taken)
        self._name = name

    def add(self, section: type) -> None:
        """Register the plugin's settings, once.

        A field `depth` of the plugin `mine` becomes the flag `--mine-depth`, the key `depth` of the
        file's section `mine:`, and `config.plugins["mine"].depth`.

        Args:
            section: A frozen dataclass whose fields are made with `lmcore.config.option.option`,
                each with a default; the first line of its docstring is shown above its flags.

        Raises:
            PluginError: It is something else, a flag is taken, or there is a section already.
        """
        from lmcore.config.plugin_section import plugin_options
        from lmcore.config.rules.plugin_section import section_problem

        if self.found:
            raise self._error("registers a second section", why="a plugin has one at most")
        problem = section_problem(self._name, section)
        if problem is not None:
            raise self._error(f"registers {section!r:.100} as its settings", why=problem)
        for option in plugin_options(self._name, section):
            for flag in option.flags:
                if flag in self._taken:
                    raise self._error(
                        f"registers the flag `{flag}`, which is taken",
                        why=f"it is {self._taken[flag]}'s",
                    )
        self.found[self._name] = section


class CommandRegistry(_Registry["Command"]):
    """Registry of the hook `lmcore_add_commands`."""

    kind = "command"

    def __init__(
        self, plugin: str, taken: Mapping[str, str] = _NOBODY, groups: Collection[str] = ()
    ) -> None:
        """Create an empty registry.

        Args:
            plugin: Label of the plugin in messages.
            taken: Names in use, each with the label of its owner.
            groups: Groups of the core, to which plugins may add commands.
        """
        super().__init__(plugin, taken)
        self._groups = groups

    def add(self, name: str, load: str, summary: str) -> None:
        """Register a command.

        Args:
            name: The words after `lmcore` on the command line: a word of small letters, digits and
                dashes, or two such words, `GROUP NAME`.  The group is a word that is no command, or
                a group of the core's, such as `data` or `checkpoint`; several plugins may add to
                one group.
            load: "package.module:function", loaded when the command is used; the function takes
                the arguments after the command's name and returns the exit status.
            summary: One line for `lmcore --help`, or the group's.

        Raises:
            PluginError: An argument is malformed, or the name is taken.
        """
        claimed = self._claim(name, _COMMAND, "one or two words of small letters, digits, dashes")
        self._check_group(claimed)
        if not _is_target(load):
            raise self._error(
                f"registers the command `{name}` with the target {load!r:.100}",
                why="a target is written `package.module:function`",
            )
        # Here: a process that trains needs no commands.
        from lmcore.model import command

        self.found[claimed] = command.Command(claimed, self._summary(claimed, summary), load)

    def _check_group(self, name: str) -> None:
        """Raise if a word would be both a command and a group of commands."""
        group, _, inner = name.partition(" ")
        used = {**self._taken, **dict.fromkeys(self.found, self._plugin)}
        if not inner:
            used = {one.partition(" ")[0]: owner for one, owner in used.items() if " " in one}
        if group in used and not (inner and group in self._groups):
            raise self._error(
                f"registers the command `{name}`, and `{group}` is taken",
                why=f"it is a {'command' if inner else 'group of commands'} of {used[group]}",
            )


class CorpusRegistry(_Registry[PluginCorpus]):
    """Registry of the hook `lmcore_add_corpora`."""

    kind = "corpus"

    def add(self, name: str, path: str | os.PathLike[str], summary: str) -> None:
        """Register a text to train on; it is opened only when it is used.

        Args:
            name: Value of `--corpus`: letters, digits, dashes, dots and underscores, or
                several such names with slashes between them, such as `c4/en`.
            path: A UTF-8 text file that the plugin's distribution brings; an absolute path, such
                as `Path(__file__).parent / "corpus.txt"`.
            summary: One line for `lmcore data corpora`: what it is, and where it is from.

        Raises:
            PluginError: An argument is malformed, or the name is taken.
        """
        claimed = self._claim(
            name,
            _CORPUS,
            "letters, digits, dashes, dots and underscores, a letter or digit first; slashes part "
            "such names",
        )
        if not _is_absolute(path):
            raise self._error(
                f"registers the corpus `{name}` with the path {str(path)!r:.100}",
                why="a path is absolute, so that it does not depend on the current folder",
            )
        self.found[claimed] = PluginCorpus(claimed, Path(path), self._summary(claimed, summary))


class TokenizerRegistry(_Registry["TokenizerFactory"]):
    """Registry of the hook `lmcore_add_tokenizers`."""

    kind = "tokenizer type"

    def add(self, name: str, factory: TokenizerFactory) -> None:
        """Register a tokenizer type.

        Args:
            name: Value of `--tokenizer-type`.
            factory: Called with `vocab_file`, `merge_file` and `vocab_size` by name, as the command
                line has them; returns a `lmcore.contract.tokenizer.Tokenizer`.

        Raises:
            PluginError: The name is malformed or taken, or *factory* cannot be called so.
        """
        claimed = self._claim(
            name, _TOKENIZER, "letters, digits, dashes, dots and underscores, a letter first"
        )
        if not callable(factory):
            raise self._error(
                f"registers the tokenizer type `{name}` with {factory!r:.100}",
                why="a factory is a function",
            )
        try:
            inspect.signature(factory).bind(vocab_file=None, merge_file=None, vocab_size=None)
        except TypeError as cause:
            raise self._error(
                f"registers the tokenizer type `{name}` with a factory of other arguments",
                why=f"it is called with vocab_file, merge_file and vocab_size: {cause}",
            ) from cause
        except ValueError:  # a callable without a signature, as some of C have none
            pass
        self.found[claimed] = factory


class TaskRegistry(_Registry[PluginTask]):
    """Registry of the hook `lmcore_add_tasks`."""

    kind = "task"

    def add(self, name: str, load: str) -> None:
        """Register an evaluation task.

        Args:
            name: Value of `--task`: letters, digits, dashes and underscores, a letter first.
            load: "package.module:OBJECT", a `lmcore.evaluation.task.Task` of that name, which is
                loaded by commands that evaluate.

        Raises:
            PluginError: An argument is malformed, or the name is taken.
        """
        claimed = self._claim(
            name, _TASK, "letters, digits, dashes and underscores, a letter first"
        )
        if not _is_target(load):
            raise self._error(
                f"registers the task `{name}` with the target {load!r:.100}",
                why="a target is written `package.module:OBJECT`",
            )
        self.found[claimed] = PluginTask(claimed, load)


class _RecordRegistry(_Registry[T]):
    """The records of one plugin, each with its name."""

    def _claim_record(self, record: object, wanted: type, name: str = "name") -> str:
        """Return the name of a record if it is one, and its name well formed and free.

        Args:
            record: Object that a plugin registers.
            wanted: Type of the records.
            name: Attribute that has the name.

        Raises:
            PluginError: It is something else, or the name is malformed or taken.
        """
        if not isinstance(record, wanted):
            raise self._error(
                f"registers the {self.kind} {record!r:.100}",
                why=f"a {self.kind} is a record, `{wanted.__module__}.{wanted.__name__}`",
            )
        return self._claim(
            getattr(record, name), _RECORD, "letters, digits and dashes, a letter first"
        )

    def _require_targets(self, name: str, **targets: str) -> None:
        """Raise a `PluginError` unless fields of a record name functions."""
        for field, target in targets.items():
            if not _is_target(target):
                raise self._error(
                    f"registers the {self.kind} `{name}` with {target!r:.100}",
                    why=f"`{field}` has the form `package.module:function`",
                )


class FamilyRegistry(_RecordRegistry["Family"]):
    """Registry of the hook `lmcore_add_families`."""

    kind = "model family"

    def add(self, family: Family) -> None:
        """Register a family of models, which `--model-family` chooses by its name.

        Args:
            family: Its record; `matches` is None.

        Raises:
            PluginError: It is no such record, or the name is malformed or taken.
        """
        from lmcore.model.family import Family  # not loaded without families of plugins

        claimed = self._claim_record(family, Family, "key")
        if family.matches is not None:
            raise self._error(
                f"registers the model family `{claimed}` with `matches`",
                why="settings alone choose the core's families only; others are named",
            )
        self.found[claimed] = family


class FormatRegistry(_RecordRegistry["CheckpointFormat"]):
    """Registry of the hook `lmcore_add_formats`."""

    kind = "checkpoint format"

    def add(self, checkpoint_format: CheckpointFormat) -> None:
        """Register a format of checkpoints, which is recognized by its `matches`.

        Args:
            checkpoint_format: Its record.

        Raises:
            PluginError: It is no such record, or the name is malformed or taken.
        """
        from lmcore.model.checkpoint_format import CheckpointFormat  # as for families

        one, claimed = checkpoint_format, self._claim_record(checkpoint_format, CheckpointFormat)
        self._require_targets(claimed, read=one.read, **({"write": one.write} if one.write else {}))
        self.found[claimed] = one


class EngineRegistry(_RecordRegistry["TrainingEngine"]):
    """Registry of the hook `lmcore_add_engines`."""

    kind = "training engine"

    def add(self, engine: TrainingEngine) -> None:
        """Register a training engine, which `--engine` chooses by its name.

        Args:
            engine: Its record.

        Raises:
            PluginError: It is no such record, or the name is malformed or taken.
        """
        from lmcore.model.training_engine import TrainingEngine  # as for families

        claimed = self._claim_record(engine, TrainingEngine)
        self._require_targets(claimed, open=engine.open)
        self.found[claimed] = engine


class LoggerRegistry(_RecordRegistry["RunLogger"]):
    """Registry of the hook `lmcore_add_loggers`."""

    kind = "logger"

    def add(self, run_logger: RunLogger) -> None:
        """Register a logger, which each run has that its `wanted` accepts.

        Args:
            run_logger: Its record.

        Raises:
            PluginError: It is no such record, or the name is malformed or taken.
        """
        from lmcore.model.run_logger import RunLogger  # as for families

        claimed = self._claim_record(run_logger, RunLogger)
        self._require_targets(claimed, open=run_logger.open)
        self.found[claimed] = run_logger


def _is_target(value: object) -> bool:
    return isinstance(value, str) and bool(re.fullmatch(_TARGET, value))


def _is_absolute(value: object) -> bool:
    return isinstance(value, str | os.PathLike) and Path(value).is_absolute()
