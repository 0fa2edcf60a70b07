"""The directory of a run: its files, written complete or not at all.

config.yaml  environment.json  kernels.json  metrics.jsonl  summary.json
tokenizer/   tensorboard/      checkpoints/iter_XXXXXXX/    data/ (named text only)
profile/ (with `--profile` only)
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.durable import write_atomically
from lmcore.errors import ConfigError, RunError

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.runtime.runtime import Runtime

__all__ = ["RunDirectory"]


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run.

    Attributes:
        path: The directory.
        data_is_new: True if this run makes the folder `data`, which was absent before.
    """

    path: Path
    data_is_new: bool = False

    @classmethod
    def of_run(cls, plan: RunPlan, runtime: Runtime) -> RunDirectory:
        """Make the directory of a run on rank 0; return it on all ranks, which must call this.

        Raises:
            ConfigError: `--save` names another run's directory.
            RunError: The directory cannot be made.
        """
        settings, processes = plan.config.checkpoint, runtime.processes
        directory = None
        if runtime.rank.rank == 0:
            load = None if settings.finetune else settings.load
            directory = cls.create(settings.save, plan.config.logging.name, load=load)
        if processes is None:
            assert directory is not None  # the only process is rank 0
            return directory
        path = str(directory.path) if directory else None
        return cls(Path(processes.rendezvous.gather(path, "the run directory")[0]))

    @classmethod
    def create(cls, save: str | None, name: str, *, load: str | None) -> RunDirectory:
        """Make the directory of a run.

        Args:
            save: Value of `--save`; None for `runs/<date>-<name>`.
            name: Name of the run.
            load: Value of `--load`: a run may continue in its own directory.

        Raises:
            ConfigError: Another run's checkpoints are there.
            RunError: The directory cannot be made.
        """
        path = Path(save) if save else _new_path(name)
        run = cls(path)
        goes_on = load is not None and _same_run(path, Path(load))
        if not goes_on and run.has_checkpoints():
            raise ConfigError(
                f"`--save {path}` holds checkpoints of another run",
                why="a new run would mix with it",
                hint=f"continue it with `--load {path} --save {path}`, or choose another directory",
            )
        try:
            run.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as cause:
            raise RunError(
                f"the run directory `{path}` cannot be made",
                why=f"{cause.strerror}: `{cause.filename}`",
                hint="choose another with `--save DIR`",
            ) from cause
        return replace(run, data_is_new=not run.data.exists())

    def remove_if_unused(self) -> None:
        """Remove the directory of a run that never began to train.

        Such a run has written nothing but the text that it prepared.
        """
        with contextlib.suppress(OSError):
            rest = set(self.path.iterdir()) - {self.checkpoints}
            if rest - ({self.data} if self.data_is_new else set()):
                return
            self.checkpoints.rmdir()  # fails if it is not empty
            if rest:
                shutil.rmtree(self.data)
            self.path.rmdir()

    def has_checkpoints(self) -> bool:
        """Return True if the directory has a checkpoint."""
        return self.checkpoints.is_dir() and any(self.checkpoints.glob("iter_*"))

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints, `iter_XXXXXXX`."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """Path of the step records, one JSON object for each step."""
        return self.path / "metrics.jsonl"

    @property
    def tokenizer(self) -> Path:
        """Folder of the tokenizer's files."""
        return self.path / "tokenizer"

    @property
    def profile(self) -> Path:
        """Folder of the traces of `--profile`."""
        return self.path / "profile"

    @property
    def data(self) -> Path:
        """Folder of the prepared text of `--corpus`."""
        return self.path / "data"

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file, complete or not at all."""
        self.write_text(name, json.dumps(content, indent=2, allow_nan=False) + "\n")

    def write_text(self, name: str, content: str) -> None:
        """Write a text file, complete or not at all.

        Raises:
            RunError: The file system refuses.
        """
        target = self.path / name
        try:
            write_atomically(target, content.encode())
        except OSError as cause:
            raise RunError(f"`{target}` cannot be written", why=str(cause.strerror)) from cause


def _same_run(path: Path, load: Path) -> bool:
    run = path.resolve()
    return load.resolve() in {run, run / "checkpoints"} or load.resolve().parent.parent == run


def _new_path(name: str) -> Path:
    stem = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    path, number = stem, 2
    while path.exists():
        path, number = stem.with_name(f"{stem.name}-{number}"), number + 1
    return path
