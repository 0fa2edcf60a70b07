"""The directory of a run: its files, written complete or not at all.

config.yaml  environment.json  kernels.json  metrics.jsonl  summary.json
tokenizer/   tensorboard/      checkpoints/iter_XXXXXXX/    data/ (named text only)
profile/ (with `--profile` only)    run.lock (while a run writes to the directory)
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

from lmcore.base.durable import write_atomically
from lmcore.base.errors import ConfigError, RunError
from lmcore.base.lock import SILENT_SECONDS, LockFile
from lmcore.base.signals import deferred_signals
from lmcore.config.continued import continue_command
from lmcore.model.family import family_of

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.runtime.runtime import Runtime

__all__ = ["RunDirectory"]

_LOCK_NAME = "run.lock"


@dataclass(frozen=True)
class RunDirectory:
    """The paths of one run.

    Attributes:
        path: The directory.
        data_is_new: True if this run makes the folder `data`, which was absent before.
        lock: Lock against other runs, held by rank 0; None on other ranks.
    """

    path: Path
    data_is_new: bool = False
    lock: LockFile | None = None

    @classmethod
    def of_run(cls, plan: RunPlan, runtime: Runtime, at_end: contextlib.ExitStack) -> RunDirectory:
        """Make and lock the directory of a run on rank 0; return it on all ranks.

        All ranks must call this.

        Args:
            plan: The run.
            runtime: This process, connected with the other ranks.
            at_end: Receives the release of the directory, on rank 0.

        Raises:
            ConfigError: `--save` names another run's directory, or one that a live run writes to.
            RunError: The directory cannot be made.
        """
        settings, processes = plan.config.checkpoint, runtime.processes
        directory = None
        if runtime.rank.rank == 0:
            load = None if settings.finetune else settings.load
            name = plan.config.logging.name or family_of(plan.config.model).key
            finetune = settings.finetune
            with deferred_signals():  # an interrupt leaves no lock
                directory = cls.create(settings.save, name, load=load, finetune=finetune)
                at_end.callback(directory.release)
        if processes is None:
            assert directory is not None  # the only process is rank 0
            return directory
        path = str(directory.path) if directory else None
        path = processes.rendezvous.gather(path, "the run directory")[0]
        return directory or cls(Path(path))

    @classmethod
    def create(
        cls, save: str | None, name: str, *, load: str | None, finetune: bool = False
    ) -> RunDirectory:
        """Make the directory of a run and lock it.

        Args:
            save: Value of `--save`; None for `runs/<date>-<name>`.
            name: Name of the run.
            load: Checkpoint that the run continues, which may be in its own directory; None for a
                new run.
            finetune: True for a run that begins with the weights of another one.

        Raises:
            ConfigError: Another run's checkpoints are there, or another run writes there, or its
                lock cannot be read.
            RunError: The directory cannot be made.
        """
        try:
            path = Path(save) if save else _make_new(name)
            run = cls(path, lock=LockFile(path / _LOCK_NAME))
            goes_on = load is not None and _same_run(path, Path(load))
            run.require_own(goes_on=goes_on, finetune=finetune)
            run.checkpoints.mkdir(parents=True, exist_ok=True)
            run.take_lock()
        except OSError as cause:
            done = "written to" if save and Path(save).is_dir() else "made"
            raise RunError(
                f"the run directory `{save or 'runs'}` cannot be {done}",
                why=f"{cause.strerror}: `{cause.filename}`",
                hint="choose another with `--save DIR`",
            ) from cause
        try:
            # A run that ended meanwhile may have saved.
            run.require_own(goes_on=goes_on, finetune=finetune)
        except ConfigError:
            run.release()
            raise
        return replace(run, data_is_new=not run.data.exists())

    def require_own(self, *, goes_on: bool, finetune: bool = False) -> None:
        """Refuse a directory with checkpoints of another run.

        Args:
            goes_on: True if the run continues from a checkpoint in the directory.
            finetune: True for a run that begins with the weights of another one.

        Raises:
            ConfigError: There are checkpoints, and the run does not continue from them.
        """
        if goes_on or not self.has_checkpoints():
            return
        path, why = self.path, "a new run would mix with it"
        hint = f"continue it by `{continue_command(path)}`, or choose another directory"
        if finetune:
            why = "fine-tuning is a new run, which would mix with it"
            hint = f"choose a new directory with `--save`; `{continue_command(path)}` continues "
            hint += "the run that is there"
        raise ConfigError(f"`--save {path}` holds checkpoints of another run", why=why, hint=hint)

    def take_lock(self) -> None:
        """Take the lock, which keeps other runs out of the directory until `release`.

        Raises:
            ConfigError: Another run holds it, or there is something else than a readable file.
            OSError: The file system refuses.
        """
        assert self.lock is not None, "only rank 0 takes it"
        try:
            if self.lock.acquire():
                return
        except OSError as cause:
            if str(cause.filename) != str(self.lock.path):
                raise
            raise ConfigError(
                f"`{self.path}` cannot be locked against other runs",
                why=f"`{self.lock.path}` cannot be read: {cause.strerror}",
                hint=f"remove `{_LOCK_NAME}` if no run writes to the directory, or choose another "
                "directory with `--save`",
            ) from cause
        owner = self.lock.owner()
        gone = ""
        if owner is None or not owner.is_here:
            gone = f"; if that process has ended, its lock is free after {SILENT_SECONDS:.0f} s"
        raise ConfigError(
            f"another run writes to `{self.path}`",
            why=f"{owner or 'its owner, which the file does not name,'} holds `{self.lock.path}`",
            hint=f"wait until it ends, or choose another directory with `--save`{gone}",
        )

    def is_locked(self) -> bool:
        """Return False if the lock of this run is gone; True also for a directory without one."""
        return self.lock is None or self.lock.is_held()

    def create_again(self) -> None:
        """Create and lock the directory again, which was removed or renamed under the run.

        Raises:
            ConfigError: Another run writes to a directory of the same path.
            RunError: The directory cannot be created.
        """
        assert self.lock is not None, "only rank 0 writes"
        self.lock.release()
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.take_lock()
        except OSError as cause:
            raise RunError(f"`{self.path}` cannot be created", why=str(cause.strerror)) from cause

    def release(self) -> None:
        """Release the lock; remove the directory of a run that never began to train."""
        if self.lock is not None:
            with deferred_signals():
                self.lock.release()
                self._remove_if_unused()

    def _remove_if_unused(self) -> None:
        """Remove the directory of a run that never began to train.

        Such a run has written only the text that it prepared.
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


def _make_new(name: str) -> Path:
    """Make a new directory, which no other run has, and return it."""
    stem = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    stem.parent.mkdir(exist_ok=True)
    path, number = stem, 2
    while True:
        try:
            path.mkdir()
        except FileExistsError:
            path, number = stem.with_name(f"{stem.name}-{number}"), number + 1
        else:
            return path
