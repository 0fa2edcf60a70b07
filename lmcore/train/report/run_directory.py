"""The directory of a run: its files, written complete or not at all.

config.yaml  environment.json  kernels.json  metrics.jsonl  summary.json
tokenizer/   tensorboard/      checkpoints/iter_XXXXXXX/    data/ (named text only)
profile/ (with `--profile` only)    run.lock (while a run writes to the directory)

`environment.json` has the plugins that take part in the run, and what each brings to it.
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

from lmcore import hookspecs
from lmcore.base.durable import write_atomically
from lmcore.base.errors import ConfigError, RunError
from lmcore.base.lock import SILENT_SECONDS, LockFile
from lmcore.base.signals import deferred_signals
from lmcore.config.continued import continue_command
from lmcore.data.prepare.named_text import BUNDLED, named_texts
from lmcore.data.tokenizer.build import registered_types, tokenizer_types
from lmcore.model.family import family_of

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.plugin import PluginRecord, PluginSet
    from lmcore.runtime.runtime import Runtime

__all__ = ["RunDirectory", "plugins_of_run"]

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
        path, why = self.path, "their files would be mixed"
        hint = f"continue it by `{continue_command(path)}`, or choose another directory"
        if finetune:
            why = "fine-tuning is a new run, which would mix with it"
            hint = f"choose a new directory with `--save`; `{continue_command(path)}` continues "
            hint += "the run that is there"
        raise ConfigError(f"`--save {path}` already contains another run", why=why, hint=hint)

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


_HOOKS = tuple(name for name in vars(hookspecs) if name.startswith("lmcore_"))


def plugins_of_run(
    plan: RunPlan, runtime: Runtime, plugins: PluginSet, tokenizer: str
) -> list[dict[str, Any]]:
    """Return each plugin that takes part, with version and contributions, as JSON values.

    The device's plugin is the first; the other plugins bring no device.  A kernel counts if it is
    bound, a policy if it is chosen.

    Args:
        plan: The run.
        runtime: Device, policies and kernels, which are bound.
        plugins: Plugins that the launcher found.
        tokenizer: Type of the run's tokenizer.
    """
    registered = _registered(plan, plugins, tokenizer)
    return [
        {
            "name": record.name,
            "distribution": record.distribution,
            "version": record.version,
            "hooks": [name for name in _HOOKS if record.implements(name)],
            "brings": _brought(record, runtime) | registered.get(record.name, {}),
        }
        for record in plugins.participants(runtime.selection.plugin)
    ]


def _brought(record: PluginRecord, runtime: Runtime) -> dict[str, Any]:
    """Return device, kernels by op, backend and policies of a plugin; what it lacks is left out."""
    kernels: dict[str, list[str]] = {}
    for bound in runtime.ops.resolutions:
        if bound.plugin == record.name and bound.chosen not in kernels.get(bound.op, ()):
            kernels.setdefault(bound.op, []).append(bound.chosen)
    offers = {
        "comm_backend": runtime.processes.backend if runtime.processes else None,
        "precision": runtime.precision,
        "recompute": runtime.recompute,
        "checkpoint_stager": runtime.stager,
    }
    is_device_plugin = record.name == runtime.selection.plugin
    return {
        **({"device": runtime.device.type} if is_device_plugin else {}),
        **({"kernels": kernels} if kernels else {}),
        **{
            kind: offer.name
            for kind, offer in offers.items()
            if offer is not None and offer.plugin == record.name
        },
    }


def _registered(plan: RunPlan, plugins: PluginSet, tokenizer: str) -> dict[str, dict[str, Any]]:
    """Return, by plugin, the tokenizer and the texts of the run that it registered."""
    found: dict[str, dict[str, Any]] = {}
    if tokenizer not in tokenizer_types():
        owner = registered_types(plugins).plugins.get(tokenizer)
        if owner is not None:
            found[owner.name] = {"tokenizer": tokenizer}
    names = {
        source.name
        for blend in plan.sources.blends()
        for source in blend.sources
        if source.corpus and source.name != BUNDLED
    }
    owners = named_texts(plugins).plugins if names else {}
    for name in sorted(names & owners.keys()):
        found.setdefault(owners[name].name, {}).setdefault("corpora", []).append(name)
    return found
