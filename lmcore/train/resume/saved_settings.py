"""Settings of the run that wrote a checkpoint, and of the model in another program's checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.config.file.saved_settings import SavedSettings
from lmcore.config.section import run_options
from lmcore.errors import CheckpointArgumentError
from lmcore.train.resume.saved_meta import part_of

if TYPE_CHECKING:
    from lmcore.conversion.loading.foreign_model import ForeignModel

__all__ = ["ForeignModels", "read_saved_settings"]

_SEQ_LENGTH = 1024
"""Longest training sample by default, of a model whose context may be far longer."""


def read_saved_settings(path: Path, step: str | None) -> SavedSettings:
    """Return the settings in a checkpoint, with the tokenizer that its run directory holds.

    Args:
        path: A run directory, its `checkpoints`, or one `iter_XXXXXXX`.
        step: Value of `--ckpt-step`; None for the newest checkpoint.

    Raises:
        CheckpointError: There is no checkpoint, or it records no settings.
        ConfigError: The step is not a number or `best`.
    """
    from lmcore.checkpoint import chosen_checkpoint, survey  # only if needed: it takes time
    from lmcore.conversion.formats import unrecognized
    from lmcore.data.tokenizer.saved import saved_tokenizer_settings

    if (problem := unrecognized(path)) is not None:
        raise problem
    if step is not None:
        path = chosen_checkpoint(path, step)
    checkpoint, manifest = survey(path).newest()
    config, sources = (part_of(manifest.meta, "config", name) for name in ("config", "sources"))
    if not config:
        raise CheckpointArgumentError(
            f"checkpoint `{checkpoint}` does not record the settings of its run",
            why="its manifest has no `meta.config`",
            hint="give the settings as flags or in a file, and the checkpoint by `--load`",
        )
    tokenizer = saved_tokenizer_settings(checkpoint.parent.parent / "tokenizer")
    return SavedSettings(str(checkpoint), config, sources, tokenizer)


class ForeignModels:
    """Models in checkpoints of other programs, each described once.

    A description may need a process that loads torch, and both the settings of a run and its
    starting point have it.
    """

    def __init__(self) -> None:
        self._described: dict[tuple[Path, str | None], ForeignModel | None] = {}

    def describe(self, path: Path, step: str | None = None) -> ForeignModel | None:
        """Return the model in another program's checkpoint; None if there is none at *path*.

        Args:
            path: Directory of the checkpoint.
            step: Value of `--ckpt-step`; None for the newest checkpoint.

        Raises:
            CheckpointError: The checkpoint is damaged, of no such step, or lmcore does not have its
                model.
            ConfigError: The checkpoint has no steps.
        """
        from lmcore.conversion.loading.foreign_model import (
            describe_foreign,  # only if needed: it is slow
        )

        key = path.absolute(), step
        if key not in self._described:
            self._described[key] = describe_foreign(path, step) if path.is_dir() else None
        return self._described[key]

    def settings(self, path: Path, step: str | None = None) -> SavedSettings | None:
        """Return model, tokenizer and precision of another program's checkpoint; see `describe`.

        Args:
            path: Directory of the checkpoint.
            step: Value of `--ckpt-step`; None for the newest checkpoint.
        """
        model = self.describe(path, step)
        if model is None:
            return None
        values = model.shape.settings(model.vocab_size)
        values["seq_length"] = min(model.shape.max_position_embeddings, _SEQ_LENGTH)
        found = {"vocab_size": model.vocab_size, "precision": model.precision}
        values |= {name: value for name, value in found.items() if value is not None}
        options = run_options()
        config: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            config.setdefault(options[name].section, {})[name] = value
        return SavedSettings(str(model.path), config, {}, model.tokenizer)
