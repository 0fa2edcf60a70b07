"""Unfinished output of a preparation, in shards that a later run can resume from.

    PREFIX.partial/lock         held by the process that writes
    PREFIX.partial/state.json   complete shards; see `resume_state.py`
    PREFIX.partial/0.bin ...    files of each key; see `partial_dataset.py`

A shard is the part of these files between two states.  Documents come in the order of the input for
any number of workers, so that shards need no merging: at the end the files are renamed.  A run that
fails leaves complete shards or nothing.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lmcore.base.errors import ConfigError, DataError, counted
from lmcore.base.lock import LockFile
from lmcore.data.indexed.files import DiskFullError, disk_errors
from lmcore.data.indexed.writer import FORMATS
from lmcore.data.input.compression import DamagedError
from lmcore.data.input.problem import BadInputError
from lmcore.data.prepare.encode_types import KeyTokens
from lmcore.data.prepare.partial_dataset import PartialDataset
from lmcore.data.prepare.resume_state import (
    Identity,
    PrepareState,
    read_state,
    require_same,
    write_state,
)

__all__ = ["PartialOutput", "state_path"]

_log = logging.getLogger(__name__)

_LOCK_NAME = "lock"


def state_path(prefix: str) -> Path:
    """Return the path of the state of an unfinished output."""
    return Path(f"{prefix}.partial") / "state.json"


class PartialOutput:
    """Unfinished datasets of all keys.

    Args:
        prefix: first part of the names of the output; the directory is `PREFIX.partial`.
        prefixes: prefix of the dataset of each key.
        dtype: type of a stored token.
        identity: input and settings that the output depends on.
        resume: continue an unfinished output.
        overwrite: True if the output replaces existing datasets; named in the way to resume.
        continued_by: way to resume, for messages; None: by `--resume`.

    Raises:
        ConfigError: there is an unfinished output, and *resume* is not set or it belongs to other
            input or settings.
        DataError: another process writes it, it was changed, or the file system refuses.
    """

    def __init__(
        self,
        prefix: str,
        prefixes: Sequence[str],
        dtype: np.dtype[np.integer],
        identity: Identity,
        *,
        resume: bool,
        overwrite: bool = False,
        continued_by: str | None = None,
    ) -> None:
        self._continued_by = continued_by
        self._resume_flags = "--resume --overwrite" if overwrite else "--resume"
        self._state_path = state_path(prefix)
        self.folder = self._state_path.parent
        self._identity = identity
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.folder)
        self.keys: list[PartialDataset] = []
        try:
            self.state = self._begun(len(prefixes), resume=resume)
            for i, (path, counts) in enumerate(zip(prefixes, self.state.keys, strict=True)):
                self.keys.append(PartialDataset(self.folder, i, path, dtype, counts))
        except BaseException:
            self._release()
            raise

    def _begun(self, num_keys: int, *, resume: bool) -> PrepareState:
        found = read_state(self._state_path)
        if found is None:
            if resume:
                _log.warning("nothing to resume in `%s`: starting from the beginning", self.folder)
            return PrepareState.start(num_keys)
        identity, state = found
        if not resume:
            raise ConfigError(
                f"`{self.folder}` contains an unfinished preparation",
                why=f"complete: {counted(state.shards, 'shard')}, "
                f"{counted(state.documents, 'document')}",
                hint=f"continue it with `{self._resume_flags}`, or remove the directory",
            )
        require_same(identity, self._identity, self.folder)
        return state

    def add(self, keys: Sequence[KeyTokens]) -> None:
        """Append the documents of a batch to the dataset of each key."""
        for output, key in zip(self.keys, keys, strict=True):
            output.add(key)

    def complete_shard(self, state: PrepareState) -> None:
        """Sync the files to disk and write *state*; its `keys` are filled in here."""
        for output in self.keys:
            output.sync()
        values = {**vars(state), "keys": tuple(output.counts for output in self.keys)}
        complete = PrepareState(**values)
        write_state(self._state_path, self._identity, complete)
        self.state = complete

    def finish(self, dataset_impl: str, shuffle_seed: int | None = None) -> None:
        """Write the indices and sync all files, still under their names in this directory."""
        for output in self.keys:
            output.finish(FORMATS[dataset_impl], shuffle_seed)

    def remove(self) -> None:
        """Remove the directory, after `commit` of each key or if no shard is complete."""
        for output in self.keys:
            output.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._release()

    def abandon(self, cause: BaseException) -> None:
        """Truncate the files to the complete shards, or remove them if there are none.

        Args:
            cause: error that ends the run; the way to resume is added to its hint.
        """
        if not self.state.shards:
            self.remove()
            if isinstance(cause, KeyboardInterrupt):
                _log.warning(
                    "no shard was complete, so nothing is kept; a smaller `--shard-mib` keeps more"
                )
            return
        for output, counts in zip(self.keys, self.state.keys, strict=True):
            output.abandon(counts)
        way = self._continued_by or f"continue with `{_resume_flags(cause, self._resume_flags)}`"
        _log.warning(
            "complete in `%s`: %s (%s); %s",
            self.folder,
            counted(self.state.shards, "shard"),
            counted(self.state.documents, "document"),
            way,
        )
        self._release()

    def _release(self) -> None:
        for output in self.keys:
            output.close()
        if self.folder.is_dir() and {path.name for path in self.folder.iterdir()} <= {_LOCK_NAME}:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.release()


def _resume_flags(cause: BaseException, flags: str) -> str:
    """Return the flags to resume with after *cause*, and adapt its hint.

    Args:
        cause: error that ended the run.
        flags: flags to resume with after any other error.
    """
    if isinstance(cause, DiskFullError):
        cause.hint = f"free disk space and continue with `{flags}`"
    if isinstance(cause, BadInputError | DamagedError):
        flags = f"{flags} --on-error skip"
        kept = f"only `{flags}` keeps the complete shards: a file that was fixed is different input"
        cause.hint = f"{cause.hint}; {kept}" if cause.hint else kept
        return flags
    return flags


def _locked(folder: Path) -> LockFile:
    """Return the lock of the directory, held by this process."""
    lock = LockFile(folder / _LOCK_NAME)
    if not lock.acquire():
        owner = lock.owner()
        raise DataError(
            f"another process writes to `{folder}`",
            why=f"it is {owner}" if owner else None,
            hint="wait for it, or choose another `--output-prefix`",
        )
    return lock
