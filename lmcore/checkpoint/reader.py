"""`CheckpointReader`: the tensors of a checkpoint, read one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.checkpoint.layout import size_problem
from lmcore.checkpoint.manifest import Manifest, read_manifest
from lmcore.errors import CheckpointError, suggestion

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CheckpointReader"]


class CheckpointReader:
    """Whole tensors of a checkpoint of any parallel layout, one at a time, on the CPU.

    Attributes:
        checkpoint: Directory of the checkpoint.
        manifest: Manifest of the checkpoint.
    """

    def __init__(self, checkpoint: Path, manifest: Manifest | None = None) -> None:
        """Read manifest and index; compare the sizes of the files, not their checksums.

        Args:
            checkpoint: Directory `iter_XXXXXXX`.
            manifest: Manifest of the checkpoint; None: read here.

        Raises:
            CheckpointError: A file is missing or has another size, or the index is invalid.
        """
        from lmcore.checkpoint.dcp_metadata import read_metadata

        self.checkpoint = checkpoint
        self.manifest = manifest or read_manifest(checkpoint)
        problem = size_problem(checkpoint, self.manifest)
        if problem is not None:
            raise CheckpointError(
                f"checkpoint `{checkpoint}` is not complete",
                why=f"its {problem}",
                hint="use an earlier checkpoint, or copy this one again",
            )
        self._index = read_metadata(checkpoint, self.manifest)

    def read(self, name: str) -> Tensor:
        """Return the tensor *name*, whole, in its saved dtype.

        Raises:
            CheckpointError: There is no such tensor, or it is not stored as the index says.
        """
        import torch

        from lmcore.checkpoint.dcp_metadata import dtype_of
        from lmcore.checkpoint.dcp_reader import read_tensors

        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise CheckpointError(
                f"checkpoint `{self.checkpoint}` has no tensor `{name}`",
                hint=suggestion(name, self.manifest.tensors),
            )
        tensor = torch.empty(entry.shape, dtype=dtype_of(entry.dtype))
        read_tensors(
            self.checkpoint, self._index, self.manifest.tensors, {name: tensor}, {}, num_threads=1
        )
        return tensor
