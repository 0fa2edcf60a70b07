"""`--continue RUN`: the settings of a run, with the run itself as `--load` and `--save`."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcore.base.errors import ConfigError, nearest
from lmcore.config.option import INPUT_PATH, Option, flag_of
from lmcore.config.settings import Provenance
from lmcore.model.checkpoint_format import subdirectories

__all__ = ["CONTINUE_OPTION", "SETTINGS_NAME", "ContinuedRun", "continue_command", "is_continued"]

CONTINUE_OPTION = Option(
    name="continue",
    section="",
    type=str,
    repeated=False,
    optional=True,
    default=None,
    help="Run to continue, in its directory unless --save names another: a run directory, or one "
    "of its checkpoints. All settings are the run's; files and flags override them.",
    metavar="RUN",
    paths=INPUT_PATH,
)
"""The option `--continue`, which sets other options and is none of a section."""

SETTINGS_NAME = "config.yaml"
_CHECKPOINTS_NAME = "checkpoints"
_CHECKPOINT = re.compile(r"iter_\d{7,}")

_SCHEDULE = (
    *("train_iters", "train_samples", "lr", "min_lr", "lr_decay_style", "lr_decay_iters"),
    *("lr_decay_samples", "lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples"),
    "lr_cooldown_fraction",
)
"""Options that change the learning-rate schedule."""
_ANSWERS = ("schedule", "use_checkpoint_opt_param_scheduler")
"""Options that say what becomes of a schedule that changes."""
_IN_PLACE_OF = {
    "load": "`--continue` names the checkpoint: give `iter_XXXXXXX`, or `--ckpt-step N`",
    "finetune": "use `--load` with `--finetune`: fine-tuning is another run",
    "preset": "leave it out: the model is the run's",
    "defaults": "leave it out: all settings are the run's",
    "use_checkpoint_args": "leave it out: all settings are the run's",
}
"""Options that contradict `--continue`, each with a hint."""

Layer = dict[str, tuple[Any, Provenance]]
"""Values of one source with their provenance, by option name."""


@dataclass(frozen=True)
class ContinuedRun:
    """A run to continue.

    Attributes:
        load: Path of the run's directory, or of one checkpoint, for `--load`.
        directory: The run directory.
    """

    load: Path
    directory: Path

    @classmethod
    def at(cls, path: str) -> ContinuedRun:
        """Return the run at *path*: its directory, `config.yaml`, `checkpoints` or a checkpoint.

        Raises:
            ConfigError: No run is there.
        """
        load = Path(path)
        shown = f"`--continue {path}`"
        if not load.exists():
            siblings = [one.name for one in load.parent.iterdir()] if load.parent.is_dir() else []
            close = nearest(load.name, siblings)
            raise ConfigError(
                f"{shown}: no such directory",
                hint=f"did you mean `{load.parent / close}`?" if close else "give a run directory",
            )
        if load.name == SETTINGS_NAME:
            load = load.parent
        directory = load
        whole = Path(os.path.abspath(load))  # noqa: PTH100 - links keep their names
        if _CHECKPOINT.fullmatch(whole.name):
            if whole.parent.name != _CHECKPOINTS_NAME:
                raise ConfigError(
                    f"{shown}: this checkpoint is not in a run directory",
                    why=f"a run has its checkpoints in `{_CHECKPOINTS_NAME}`",
                    hint=f"`--load {path} --use-checkpoint-args` takes its model and tokenizer",
                )
            directory = load / "../.."
        elif whole.name == _CHECKPOINTS_NAME:
            directory = load / ".."
        run = cls(load, Path(os.path.normpath(directory)))
        if not _is_run(run.directory):
            inside = subdirectories(run.directory, _is_run)
            raise ConfigError(
                f"{shown}: no run found",
                why=f"it has neither `{SETTINGS_NAME}` nor `{_CHECKPOINTS_NAME}`"
                + (", its subdirectories have" if inside else ""),
                hint=f"did you mean `{inside[-1]}`?"
                if inside
                else "give the directory that `--save` named; a model of another program starts a "
                "run by `--load`",
            )
        return run

    @property
    def settings_file(self) -> Path | None:
        """Path of the run's `config.yaml`; None if it is gone."""
        path = self.directory / SETTINGS_NAME
        return path if path.is_file() else None

    def conflicts(
        self, given: Mapping[str, Any], texts: Mapping[str, str]
    ) -> Iterator[ConfigError]:
        """Yield a problem for each flag that contradicts `--continue`.

        Args:
            given: Values of the flags, by option name.
            texts: Flags as typed, by option name.
        """
        for name, hint in _IN_PLACE_OF.items():
            if given.get(name):
                yield ConfigError(
                    f"`{texts.get(name, flag_of(name))}` cannot be combined with `--continue`",
                    hint=hint,
                )

    def layers(self, own: Layer, options: Mapping[str, Option], above: list[Layer]) -> list[Layer]:
        """Return the layers of settings, from the lowest.

        An answer to the question of the schedule that the run recorded is left out if the layers
        above change the schedule again.

        Args:
            own: Settings of the run.
            options: Options by name.
            above: Settings of further files and of flags.
        """
        changed = any(
            name in layer and layer[name][0] != own.get(name, (None,))[0]
            for layer in above
            for name in _SCHEDULE
        )
        kept = {
            name: value
            for name, value in own.items()
            if not options[name].one_start and not (changed and name in _ANSWERS)
        }
        origin = Provenance("flag", CONTINUE_OPTION.flag)
        run = {"load": (str(self.load), origin), "save": (str(self.directory), origin)}
        return [kept, run, *above]


def _is_run(directory: Path) -> bool:
    """Return True if a directory has the settings or the checkpoints of a run."""
    return (directory / SETTINGS_NAME).is_file() or (directory / _CHECKPOINTS_NAME).is_dir()


def is_continued(provenance: Mapping[str, Provenance]) -> bool:
    """Return True if `--continue` names the run that settings with this provenance begin from."""
    return str(provenance["load"]) == CONTINUE_OPTION.flag


def continue_command(directory: Path) -> str:
    """Return the command that continues the run in *directory*."""
    return f"lmcore train {CONTINUE_OPTION.flag} {shlex.quote(str(directory))}"
