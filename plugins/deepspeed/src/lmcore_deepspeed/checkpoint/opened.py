"""`OpenedCheckpoint`: files of a checkpoint of DeepSpeed, and the content of the first one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmcore_deepspeed.checkpoint.directory import DeepSpeedDirectory
from lmcore_deepspeed.checkpoint.missing_files import universal_notes
from lmcore_deepspeed.checkpoint.saved_run import weight_notes

__all__ = ["OpenedCheckpoint"]


@dataclass(frozen=True)
class OpenedCheckpoint:
    """Checkpoint of DeepSpeed whose first file was read, to find out what describes its model.

    Attributes:
        path: Directory that DeepSpeed saved to.
        files: Files of the checkpoint.
        content: Content of the first rank's file.
        weights_only: True to leave the state of Adam out.
    """

    path: Path
    files: DeepSpeedDirectory
    content: Mapping[str, Any]
    weights_only: bool = False

    def notes(self, dtypes: set[torch.dtype | None]) -> list[str]:
        """Return notes for the user about files that are missing.

        Args:
            dtypes: Dtypes of the weights.
        """
        return [*universal_notes(self.files), *weight_notes(self.files, self.content, dtypes)]
