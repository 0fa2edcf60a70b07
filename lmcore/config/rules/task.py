"""Rules for the head of a task and its data."""

from __future__ import annotations

from pathlib import Path

from lmcore.base.errors import ConfigError
from lmcore.config.derived.data_source import OWN, PARTS, TASK_OPTIONS
from lmcore.config.option import flag_of
from lmcore.config.rules import Problems, Rule
from lmcore.config.settings import LoadedConfig

__all__ = ["TASK_RULES"]

_REFUSED = {
    "context_parallel_size": "the head reads one token of a whole sequence",
    "eod_mask_loss": "the loss is of labels, not of tokens",
    "reset_position_ids": "a sample is one text",
    "reset_attention_mask": "a sample is one text",
}
"""Options that a run with a head for a task does not have, each with the reason."""


def _data(loaded: LoadedConfig) -> Problems:
    task = loaded.config.task
    if task.task is None:
        return
    if not task.task_data:
        yield ConfigError(
            f"{loaded.shown('task')} has no data",
            why="its head is trained on labelled texts",
            hint=f"add `{flag_of('task_data')} FILE`: CSV, TSV or JSON lines",
        )
    for option in TASK_OPTIONS.values():
        paths = loaded.value(option)
        for path in paths:
            if not Path(path).is_file():
                kind = "is a directory" if Path(path).is_dir() else "no such file"
                which = f": `{path}`" if len(paths) > 1 else ""
                yield ConfigError(f"{loaded.shown(option)}: {kind}{which}", hint="check the path")
    if not 1 <= len(task.task_text) <= 2:
        yield ConfigError(
            f"{loaded.shown('task_text')} names {len(task.task_text)} columns",
            why="a sample is a text or a pair of texts",
            hint="name one column or two",
        )
    if task.task_labels and len({*task.task_labels}) < max(2, len(task.task_labels)):
        yield ConfigError(
            f"{loaded.shown('task_labels')} are not two or more different names",
            hint="name each class once, or leave it out: the names are taken from the data",
        )


def _other_data(loaded: LoadedConfig) -> Problems:
    """Refuse data without labels; for training data `_exclusive` of the rules for data does."""
    if not loaded.config.task.task_data:
        return
    for part in PARTS[1:]:
        own = TASK_OPTIONS.get(part)
        use = f"use `{flag_of(own)} FILE` in place of " if own else ""
        for option in OWN[part]:
            if loaded.value(option):
                instead = f"{use}`{flag_of(option)}`, or " * bool(own)
                yield ConfigError(
                    f"{loaded.shown(option)} cannot be combined with {loaded.shown('task_data')}",
                    why="the head of a task needs labelled texts",
                    hint=instead + loaded.removal(option),
                )


def _settings(loaded: LoadedConfig) -> Problems:
    if loaded.config.task.task is None:
        return
    for name, why in _REFUSED.items():
        if loaded.value(name) != loaded.options[name].default:
            yield ConfigError(
                f"{loaded.shown(name)} cannot be combined with {loaded.shown('task')}",
                why=why,
                hint="leave it out",
            )


TASK_RULES: tuple[Rule, ...] = (_data, _other_data, _settings)
