"""Rules for the checkpoint to load.

Rule for files that are given as directories, and directories that are given as files.
"""

from __future__ import annotations

from pathlib import Path

from lmcore.base.errors import ConfigError
from lmcore.config.checkpoint_step import checkpoint_step
from lmcore.config.rules import Problems, Rule
from lmcore.config.settings import LoadedConfig

__all__ = [
    "CHECKPOINT_RULES",
    "PATH_RULES",
]


def _kinds(loaded: LoadedConfig) -> Problems:
    """Require that the `DIR` of an option is no file, and that its `FILE` is no directory."""
    for option in loaded.options.values():
        value = loaded.value(option.name)
        if not option.paths or option.repeated or value is None:
            continue
        path, found = Path(value), None
        if option.metavar == "FILE" and path.is_dir():
            found = "this is a directory, not a file"
        elif option.metavar == "DIR" and path.exists() and not path.is_dir():
            found = "this is a file, not a directory"
        if found is not None:
            hint = f"`{option.flag} {option.metavar}`: {option.help}"
            yield ConfigError(f"{loaded.shown(option.name)}: {found}", hint=hint)


PATH_RULES: tuple[Rule, ...] = (_kinds,)


def _step(loaded: LoadedConfig) -> Problems:
    """Require a number or `best`."""
    step = loaded.config.checkpoint.ckpt_step
    try:
        if step is not None:
            checkpoint_step(step)
    except ConfigError as problem:
        yield problem


def _keep_every(loaded: LoadedConfig) -> Problems:
    """Require that there are checkpoints of the steps to keep."""
    checkpoint = loaded.config.checkpoint
    every, interval = checkpoint.keep_every, checkpoint.save_interval
    if every and interval and every % interval:
        yield ConfigError(
            f"{loaded.shown('keep_every')} is not a multiple of {loaded.shown('save_interval')}",
            why="other steps have no checkpoint that could be kept",
            hint=f"use `--keep-every {-(-every // interval) * interval}`",
        )


def _weights(loaded: LoadedConfig) -> Problems:
    """Refuse encoders of ICT for another family, and two checkpoints to take weights from."""
    checkpoint, bert = loaded.config.checkpoint, loaded.config.ict.bert_load
    shown, is_ict = loaded.shown("load"), loaded.config.model.model_family == "ict"
    if checkpoint.load and shown.startswith("`--ict-load") and not is_ict:
        yield ConfigError(
            f"{shown} is for `--model-family ict`",
            why="it gives a run the weights of the encoders of questions and blocks",
            hint="use `--load DIR --finetune` to begin with the weights of another model",
        )
    if checkpoint.load and checkpoint.finetune and is_ict and bert:
        yield ConfigError(
            f"{shown} and {loaded.shown('bert_load')} both give the run its first weights",
            why="the encoders begin with the weights of one checkpoint",
            hint="keep one of them",
        )


CHECKPOINT_RULES: tuple[Rule, ...] = (_step, _keep_every, _weights)
