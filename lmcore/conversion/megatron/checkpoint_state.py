"""`MegatronCheckpointState`: common part of the states in Megatron's two formats."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmcore.conversion.megatron.directory import require_checkpoint
from lmcore.conversion.megatron.run.saved_arguments import (
    MegatronModel,
    saved_layout,
    saved_precision,
)
from lmcore.conversion.state import ModelState

__all__ = ["MegatronCheckpointState"]


class MegatronCheckpointState(ModelState):
    """Model, and the state of Adam if it is there, in one of Megatron's formats; see `ModelState`.

    Attributes:
        checkpoint: Directory of the checkpoint, `iter_XXXXXXX` or `release`.
    """

    def __init__(self, path: Path, *, weights_only: bool = False, compare: bool = True) -> None:
        """Open the checkpoint and compare its tensors with the saved arguments.

        Args:
            path: Directory that Megatron saved to, or one checkpoint in it.
            weights_only: True to leave the optimizer out.
            compare: True to compare the checksums of files that are read.

        Raises:
            CheckpointError: A file is missing or damaged, lmcore does not have the model, or the
                tensors do not fit the arguments.
        """
        self.path, self.checkpoint = path, require_checkpoint(path)
        self._open(weights_only=weights_only, compare=compare)

    @abstractmethod
    def _open(self, *, weights_only: bool, compare: bool) -> None:
        """Open the files of the format; see `__init__`."""

    @property
    def files(self) -> Path:
        """Directory of the files that are read: one checkpoint."""
        return self.checkpoint

    def _describe(self, model: MegatronModel, args: Mapping[str, Any], **sizes: int) -> None:
        """Set the attributes of the model and its run.

        Args:
            model: Model that the arguments describe.
            args: Arguments of the run.
            **sizes: Sizes of parallel axes that the files have; see `saved_layout`.
        """
        self.settings, self.notes = model.settings, model.notes
        self.precision, self.layout = saved_precision(args), saved_layout(args, **sizes)
        self.tokenizer, self.tokenizer_type = model.tokenizer, model.tokenizer_type
        self.shape, self.vocab_size = model.shape, model.vocab_size

    def _leave_adam_out(self, reason: str) -> None:
        """Note why the state of the optimizer is not read."""
        self.without_adam = reason
        self.notes = [*self.notes, f"the state of its optimizer is not read: {reason}"]
