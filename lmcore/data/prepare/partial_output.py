"""The output of a preparation while it grows: shard after shard, each a point to resume from.

    PREFIX.partial/lock         held by the process that writes
    PREFIX.partial/state.json   what is complete; see `resume_state.py`
    PREFIX.partial/0.bin ...    the files of each key; see `partial_dataset.py`

A shard is the part of these files between two states.  Since the documents come in the order of
the input whatever the workers, the shards need no merging: when all is there the files get their
names.  What a run that fails leaves is nothing, or complete shards alone.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

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
from lmcore.errors import ConfigError, DataError, counted

__all__ = ["PartialOutput", "state_path"]

_log = logging.getLogger(__name__)


def state_path(prefix: str) -> Path:
    """Return where the state of an unfinished output is."""
    return Path(f"{prefix}.partial") / "state.json"


class PartialOutput:
    """The datasets of all keys, written together.

    Args:
        prefix: First part of the output's names; the directory is `PREFIX.partial`.
        prefixes: The dataset of each key.
        dtype: Type of a stored token.
        identity: What the output is bound to.
        resume: Whether to continue what is there.

    Raises:
        ConfigError: There is an unfinished output and *resume* is false, or it was begun otherwise.
        DataError: Another process writes it, it was altered, or the disk refuses.
    """

    def __init__(
        self,
        prefix: str,
        prefixes: Sequence[str],
        dtype: np.dtype[np.integer],
        identity: Identity,
        *,
        resume: bool,
    ) -> None:
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
                _log.warning("nothing to resume in `%s`: starting at the beginning", self.folder)
            return PrepareState.start(num_keys)
        identity, state = found
        if not resume:
            raise ConfigError(
                f"`{self.folder}` holds an unfinished preparation",
                why=f"complete: {counted(state.shards, 'shard')}, "
                f"{counted(state.documents, 'document')}",
                hint="continue it with `--resume`, or remove the directory",
            )
        require_same(identity, self._identity, self.folder)
        return state

    def add(self, keys: Sequence[KeyTokens]) -> None:
        """Append the documents of a batch, for each key."""
        for output, key in zip(self.keys, keys, strict=True):
            output.add(key)

    def complete_shard(self, state: PrepareState) -> None:
        """Bring everything to the disk and remember *state*; its `keys` are filled in here."""
        for output in self.keys:
            output.sync()
        values = {**vars(state), "keys": tuple(output.counts for output in self.keys)}
        complete = PrepareState(**values)
        write_state(self._state_path, self._identity, complete)
        self.state = complete

    def finish(self, dataset_impl: str) -> None:
        """Write the indices; everything is on the disk then, under names of this directory."""
        for output in self.keys:
            output.finish(FORMATS[dataset_impl])

    def remove(self) -> None:
        """Remove what is left here, after `commit` of each key or where nothing is complete."""
        for output in self.keys:
            output.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._release()

    def abandon(self, cause: BaseException) -> None:
        """Keep the complete shards alone; nothing where there are none.

        Args:
            cause: What ends the run; its hint gets to say how the shards are kept.
        """
        if not self.state.shards:
            self.remove()
            return
        for output, counts in zip(self.keys, self.state.keys, strict=True):
            output.abandon(counts)
        _log.warning(
            "complete in `%s`: %s (%s); continue with `%s`",
            self.folder,
            counted(self.state.shards, "shard"),
            counted(self.state.documents, "document"),
            _way_on(cause),
        )
        self._release()

    def _release(self) -> None:
        for output in self.keys:
            output.close()
        self._lock.close()
        if self.folder.is_dir() and not any(path.name != "lock" for path in self.folder.iterdir()):
            shutil.rmtree(self.folder, ignore_errors=True)


def _way_on(cause: BaseException) -> str:
    """Return the flags that continue after *cause*; its hint must not lead away from them."""
    if isinstance(cause, DiskFullError):
        cause.hint = "make room on the disk and continue with `--resume`"
    if isinstance(cause, BadInputError | DamagedError):
        flags = "--resume --on-error skip"
        kept = f"`{flags}` alone keeps the complete shards: a file that is mended is another input"
        cause.hint = f"{cause.hint}; {kept}" if cause.hint else kept
        return flags
    return "--resume"


def _locked(folder: Path) -> BinaryIO:
    """Open and lock the file that says who writes here."""
    file = (folder / "lock").open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read(100).decode(errors="replace").strip()
        file.close()
        raise DataError(
            f"another process writes to `{folder}`",
            why=f"it is {owner}" if owner else None,
            hint="let it end, or choose another `--output-prefix`",
        ) from None
    except OSError as error:
        _log.warning("`%s` cannot be locked (%s): see that nobody else writes there", folder, error)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {os.uname().nodename}\n".encode())
    file.flush()
    return file
