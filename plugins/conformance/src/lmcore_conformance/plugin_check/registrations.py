"""Checks of a plugin's registrations: they can be made, found and loaded.

Part of `lmcore plugin check`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmcore.base.errors import LmcoreError, MissingPackageError
from lmcore.contract.probe import Check, CheckStatus
from lmcore.contract.registry import (
    CommandRegistry,
    CorpusRegistry,
    EngineRegistry,
    FamilyRegistry,
    FormatRegistry,
    LoggerRegistry,
    TaskRegistry,
    TokenizerRegistry,
)
from lmcore.logger.run_loggers import RunLoggers
from lmcore.model.run_logger import LoggedRun, OpenLogger, RunLogger, StepMetrics
from lmcore.plugin.record import PluginRecord, PluginSet, located
from lmcore.plugin.registrations import load_command, plugin_sections, plugins_records
from lmcore_conformance.plugin_check.configurations import plan_of
from lmcore_conformance.plugin_check.records import call_hook

__all__ = ["REGISTRATION_CHECKS", "reserved_names"]

Taken = Mapping[str, Sequence[str]]


def _options(record: PluginRecord, taken: Taken) -> Iterator[Check]:
    """Check the plugin's settings."""
    del taken
    hook = "lmcore_add_options"
    sections = plugin_sections(PluginSet((record,)))
    if record.name in sections.left_out:
        yield _failed(hook, sections.left_out[record.name].reason)
    else:
        flags = ", ".join(f"`{option.flag}`" for option in sections.options.values())
        yield Check(hook, CheckStatus.OK, flags or "it registers no settings")


def _commands(record: PluginRecord, taken: Taken) -> Iterator[Check]:
    """Check that each command can be registered and loaded."""
    hook = "lmcore_add_commands"
    registry = CommandRegistry(
        record.label, _owned(taken.get("commands", ())), taken.get("groups", ())
    )
    try:
        call_hook(record, hook, registry=registry)
        for command in registry.found.values():
            load_command(command, record)
    except LmcoreError as error:
        yield _failed(hook, _message(error))
        return
    faults = [
        f"`{command.name}`: {fault}"
        for command in registry.found.values()
        if (fault := _call_fault(command.load))
    ]
    yield from (_failed(hook, fault) for fault in faults)
    if not faults:
        yield _registered(hook, registry.found, "commands")


def _call_fault(load: str) -> str | None:
    """Return why a command's function cannot be called as the core does; None if it can."""
    module, _, name = load.partition(":")
    try:
        signature = inspect.signature(getattr(importlib.import_module(module), name))
    except (TypeError, ValueError):  # native code without a signature
        return None
    try:
        signature.bind([])
    except TypeError as error:
        return (
            f"`{load}` has the parameters `{signature}`, and is called with one, the list of "
            f"arguments: {error}"
        )
    return None


def _corpora(record: PluginRecord, taken: Taken) -> Iterator[Check]:
    """Check that each text can be registered and read."""
    hook = "lmcore_add_corpora"
    registry = CorpusRegistry(record.label, _owned(taken.get("corpora", ())))
    try:
        call_hook(record, hook, registry=registry)
    except LmcoreError as error:
        yield _failed(hook, _message(error))
        return
    missing = [entry for entry in registry.found.values() if not entry.path.is_file()]
    yield from (
        _failed(hook, f"`{entry.name}`: there is no file {entry.path}") for entry in missing
    )
    odd = [fault for entry in registry.found.values() if (fault := _unreadable(entry.path))]
    yield from (_failed(hook, fault) for fault in odd)
    if not missing and not odd:
        yield _registered(hook, registry.found, "texts")


def _unreadable(path: Path) -> str | None:
    """Return why a file is no text in UTF-8; None if it is, or if there is none."""
    if not path.is_file():
        return None
    try:
        with path.open(encoding="utf-8") as file:
            for _ in file:
                pass
    except (OSError, UnicodeDecodeError) as error:
        return f"{path} cannot be read as UTF-8: {error}"
    return None


def _tokenizers(record: PluginRecord, taken: Taken) -> Iterator[Check]:
    """Check that each tokenizer type can be registered, and used if it needs no files."""
    from lmcore_conformance.plugin_check.tokenizers import check_tokenizers  # loads numpy

    hook = "lmcore_add_tokenizers"
    registry = TokenizerRegistry(record.label, _owned(taken.get("tokenizers", ())))
    try:
        call_hook(record, hook, registry=registry)
    except LmcoreError as error:
        yield _failed(hook, _message(error))
        return
    yield _registered(hook, registry.found, "tokenizer types")
    yield from check_tokenizers(hook, registry.found)


def _families(record: PluginRecord, taken: Taken) -> Iterator[Check]:
    """Check that each family can be registered, and its model and samples loaded."""
    hook = "lmcore_add_families"
    registry = FamilyRegistry(record.label, _owned(taken.get("families", ())))
    try:
        call_hook(record, hook, registry=registry)
        for family in registry.found.values():
            family.load_model()
            family.load_samples()
    except LmcoreError as error:
        yield _failed(hook, _message(error))
    else:
        yield _registered(hook, registry.found, "families")


def _formats(record: PluginRecord, taken: Taken) -> Iterator[Check]:
    """Check that each format can be registered and loaded, and does not take any directory."""
    hook = "lmcore_add_formats"
    registry = FormatRegistry(record.label, _owned(taken.get("formats", ())))
    try:
        call_hook(record, hook, registry=registry)
        for one in registry.found.values():
            one.load(one.read)
            if one.write:
                one.load(one.write)
    except LmcoreError as error:
        yield _failed(hook, _message(error))
        return
    for name, one in registry.found.items():
        if (fault := _matches_nothing(one.matches)) is not None:
            yield _failed(hook, f"`{name}`: {fault}")
            return
    yield _registered(hook, registry.found, "formats")


def _engines(record: PluginRecord, taken: Taken) -> Iterator[Check]:
    """Check that each engine can be registered and loaded."""
    hook = "lmcore_add_engines"
    registry = EngineRegistry(record.label, _owned(taken.get("engines", ())))
    try:
        call_hook(record, hook, registry=registry)
        for engine in registry.found.values():
            engine.load()
    except LmcoreError as error:
        yield _failed(hook, _message(error))
    else:
        yield _registered(hook, registry.found, "engines")


def _loggers(record: PluginRecord, taken: Taken) -> Iterator[Check]:
    """Check that each logger can be registered, and logs a run without arguments if it would."""
    hook = "lmcore_add_loggers"
    registry = LoggerRegistry(record.label, _owned(taken.get("loggers", ())))
    try:
        call_hook(record, hook, registry=registry)
        for logger in registry.found.values():
            logger.load()
    except LmcoreError as error:
        yield _failed(hook, _message(error))
        return
    faults = []
    for name, logger in registry.found.items():
        for found in _log_runs(logger, record):
            faults += [found] if found.status is CheckStatus.FAILED else []
            yield dataclasses.replace(found, name=hook, detail=f"`{name}`: {found.detail}")
    if not faults:
        yield _registered(hook, registry.found, "loggers")


def _log_runs(logger: RunLogger, record: PluginRecord) -> Iterator[Check]:
    """Log a run and its continuation as `lmcore train` does, and yield what fails.

    A fault of a logger costs a run the logger and nothing else; here it is a failure.
    """
    hook = "lmcore_add_loggers"
    plan = plan_of("", 1, plugin_sections(PluginSet((record,))))
    try:
        wanted = logger.wanted(plan.config)
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        yield _failed(hook, f"`wanted` raised {located(error)}")
        return
    if not wanted:
        detail = "not opened: it does not want a run without arguments"
        yield Check(hook, CheckStatus.SKIPPED, detail)
        return
    watched = _WatchedLogger(
        logger.name, logger.title, logger.open, in_background=logger.in_background
    )
    with tempfile.TemporaryDirectory(prefix="lmcore-run-") as folder:
        settings = plan.to_dict()["config"]
        for step, status in ((0, "completed"), (2, "failed: out of memory")):
            run = LoggedRun(Path(folder), "plugin-check", plan.config, settings, step)
            opened = RunLoggers(run, records=[watched])
            for one in (step + 1, step + 2):
                opened.log(StepMetrics(one, 8 * one, dict(_NUMBERS), dict(_BY_SAMPLES)))
            opened.text("sample", "A text, of several\nlines: \u00e4\u6587", step + 2)
            opened.directory_lost()
            opened.close(status)
            if watched.faults or watched.lacks:
                break
    yield from (_failed(hook, fault) for fault in watched.faults)
    yield from (Check(hook, CheckStatus.SKIPPED, f"not opened: {lack}") for lack in watched.lacks)


_NUMBERS = {"train/loss": 2.5, "train/learning_rate": 1e-4, "valid/loss": 2.75}
_BY_SAMPLES = {"lm loss vs samples": 2.5}


@dataclass(frozen=True)
class _WatchedLogger(RunLogger):
    """Record whose logger's faults are kept, each with its place, before a run ignores them.

    Attributes:
        faults: Failed functions, each with the exception and its place.
        lacks: Packages that are not installed.
    """

    faults: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)

    def load(self) -> Callable[[LoggedRun], object]:
        """Return a function that opens the logger and watches it."""
        function = super().load()

        def opened(run: LoggedRun) -> object:
            with self.noting(f"`{self.open}`"):
                logger = function(run)
            if isinstance(logger, OpenLogger):
                return _WatchedOpen(logger, self)
            self.faults.append(f"`{self.open}` returned {logger!r:.100}, not an `OpenLogger`")
            return logger

        return opened

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Keep what the block raises, and raise it."""
        try:
            yield
        except MissingPackageError as error:
            self.lacks.append(error.what)
            raise
        except (Exception, SystemExit) as error:
            self.faults.append(f"{what} raised {located(error)}")
            raise


class _WatchedOpen(OpenLogger):
    """Logger that passes everything on and notes what is wrong."""

    def __init__(self, logger: OpenLogger, record: _WatchedLogger) -> None:
        self._logger, self._record = logger, record
        self.run_id = logger.run_id
        given: object = logger.run_id
        if not isinstance(given, str | None):
            record.faults.append(f"`run_id` is {given!r:.100}, neither a text nor None")

    def log(self, metrics: StepMetrics) -> None:
        with self._record.noting("`log`"):
            self._logger.log(metrics)
        if (metrics.values, metrics.by_samples) != (_NUMBERS, _BY_SAMPLES):
            self._record.faults.append("`log` changes the numbers, which other loggers get as well")

    def text(self, name: str, text: str, step: int) -> None:
        with self._record.noting("`text`"):
            self._logger.text(name, text, step)

    def directory_lost(self) -> None:
        with self._record.noting("`directory_lost`"):
            self._logger.directory_lost()

    def close(self, status: str) -> Mapping[str, float]:
        with self._record.noting("`close`"):
            found = self._logger.close(status)
        if not _are_numbers(found):
            wanted = "a mapping of names to numbers"
            self._record.faults.append(f"`close` returned {found!r:.100}, not {wanted}")
        return found


def _are_numbers(found: Any) -> bool:
    return isinstance(found, Mapping) and all(
        isinstance(name, str) and isinstance(one, int | float) for name, one in found.items()
    )


def _tasks(record: PluginRecord, taken: Taken) -> Iterator[Check]:
    """Check that each task can be registered and loaded, and has metrics that there are."""
    from lmcore.evaluation.plugin_tasks import load_task
    from lmcore.evaluation.score import check_metrics

    hook = "lmcore_add_tasks"
    registry = TaskRegistry(record.label, _owned(taken.get("tasks", ())))
    try:
        call_hook(record, hook, registry=registry)
        for one in registry.found.values():
            check_metrics(load_task(one, record))
    except LmcoreError as error:
        yield _failed(hook, _message(error))
    else:
        yield _registered(hook, registry.found, "tasks")


def _matches_nothing(matches: Callable[[Path], bool]) -> str | None:
    """Return what is wrong with `matches` for a directory without a checkpoint; None if nothing."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = matches(Path(folder))
        except Exception as error:  # noqa: BLE001 - of a plugin
            return f"`matches` raised {type(error).__name__}: {error} for an empty directory"
        return f"`matches` returned {found!r:.100} for an empty directory" if found else None


def reserved_names() -> dict[str, list[str]]:
    """Return the names that no plugin can register, by the kind of registration."""
    from lmcore.cli.commands import GROUPS, own_names
    from lmcore.cli.plugin_commands import RESERVED
    from lmcore.data.prepare.named_text import BUNDLED
    from lmcore.data.tokenizer import tokenizer_types
    from lmcore.evaluation.tasks import TASKS
    from lmcore.model.checkpoint_format import formats
    from lmcore.model.family import families
    from lmcore.model.run_logger import run_loggers
    from lmcore.model.training_engine import engines

    added = plugins_records()  # by plugins that this process has found
    return {
        "commands": [*own_names(), *RESERVED],
        "groups": [*GROUPS],
        "corpora": [BUNDLED],
        "tokenizers": list(tokenizer_types()),
        "tasks": [task.name for task in TASKS],
        "engines": [name for name in engines() if name not in added],
        "loggers": [name for name in run_loggers() if name not in added],
        "formats": [name for name in formats() if name not in added],
        "families": [one.key for name, one in families().items() if name not in added],
    }


def _owned(names: Sequence[str]) -> dict[str, str]:
    return dict.fromkeys(names, "lmcore")


def _registered(hook: str, found: Mapping[str, object], kind: str) -> Check:
    names = ", ".join(f"`{name}`" for name in found)
    return Check(hook, CheckStatus.OK, names or f"it registers no {kind}")


def _message(error: LmcoreError) -> str:
    return error.what_and_why


def _failed(hook: str, detail: str) -> Check:
    return Check(hook, CheckStatus.FAILED, detail)


REGISTRATION_CHECKS: Mapping[str, Callable[[PluginRecord, Taken], Iterator[Check]]] = {
    "lmcore_add_options": _options,
    "lmcore_add_commands": _commands,
    "lmcore_add_corpora": _corpora,
    "lmcore_add_tokenizers": _tokenizers,
    "lmcore_add_families": _families,
    "lmcore_add_formats": _formats,
    "lmcore_add_engines": _engines,
    "lmcore_add_loggers": _loggers,
    "lmcore_add_tasks": _tasks,
}
