"""Tensors of a checkpoint: verified and loaded into tensors that exist, or read one at a time."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from lmcore.base.errors import CheckpointError, suggestion
from lmcore.checkpoint.files.synced_file import num_io_threads
from lmcore.checkpoint.layout import size_problem
from lmcore.checkpoint.manifest import Manifest, read_manifest
from lmcore.checkpoint.verify import MAX_THREADS, all_problems, damaged, own_problems
from lmcore.contract.dtype import dtype_name
from lmcore.runtime.process.channel import Channel

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lmcore.parallel.tensor_layout import TensorLayout

__all__ = ["CheckpointReader", "load_checkpoint"]

logger = logging.getLogger(__name__)

_WHOLE: Mapping[str, TensorLayout] = MappingProxyType({})
_SAME: Mapping[str, int] = MappingProxyType({})
_SHOWN = 10


def load_checkpoint(
    checkpoint: Path,
    tensors: Mapping[str, torch.Tensor],
    manifest: Manifest | None = None,
    *,
    verify: bool = True,
    layouts: Mapping[str, TensorLayout] = _WHOLE,
    rows: Mapping[str, int] = _SAME,
    channel: Channel | None = None,
) -> Manifest:
    """Fill *tensors* in place from the directory *checkpoint* and return its manifest.

    Args:
        checkpoint: Directory `iter_XXXXXXX`, from `find_checkpoint`.
        tensors: Tensors to fill, by their names in the checkpoint; on any device, of the saved
            dtype and shape.  Other tensors of the checkpoint are not read.
        manifest: Manifest of the checkpoint; None: read here.
        verify: Compare every file with its checksum first.  Sizes, names, dtypes and shapes are
            always compared.
        layouts: Layouts of *tensors* by name; a tensor without one is whole.
        rows: Smallest number of rows of tensors that may have another number of rows than in the
            checkpoint, by name: further rows are left as they are.
        channel: Channel of the ranks of a run; all must call this, each with its own tensors, and
            each verifies some of the files.  None if this is the only process.

    Raises:
        CheckpointError: The checkpoint is damaged or does not have the tensors; no tensor was
            changed.  Only a file that matches its checksum and differs from the index (never
            written by `save_checkpoint`) is found while loading.
        OtherRankError: The same for another process, with its text.
    """
    known = manifest or read_manifest(checkpoint)
    channel = channel or Channel(None)

    def check() -> list[str]:
        # Checked in here: other ranks, whose tensors may be there, would wait for this one.
        _check_request(checkpoint, known, tensors, layouts, rows)
        return own_problems(checkpoint, known, channel, content=verify)

    problems = all_problems(checkpoint, channel, check)
    if problems:
        raise damaged(checkpoint, problems)
    from lmcore.checkpoint.dcp_metadata import read_metadata
    from lmcore.checkpoint.dcp_reader import read_tensors

    index = read_metadata(checkpoint, known)
    read_tensors(checkpoint, index, known.tensors, tensors, layouts, num_io_threads(MAX_THREADS))
    logger.debug("loaded %d tensors from %s", len(tensors), checkpoint)
    return known


def _check_request(
    checkpoint: Path,
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    layouts: Mapping[str, TensorLayout],
    rows: Mapping[str, int],
) -> None:
    missing = [name for name in tensors if name not in manifest.tensors]
    if missing:
        more = f"\nand {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise CheckpointError(
            f"checkpoint `{checkpoint}` does not hold {len(missing)} of the requested tensors",
            why="missing: " + "\n".join(f"`{name}`" for name in missing[:_SHOWN]) + more,
            hint=suggestion(missing[0], manifest.tensors),
        )
    differing, same_shapes = [], True
    for name, tensor in tensors.items():
        entry = manifest.tensors[name]
        dtype = dtype_name(tensor.dtype)
        shape = layouts[name].shape if name in layouts else tuple(tensor.shape)
        fits = entry.shape == shape or _fits(entry.shape, shape, rows.get(name))
        if entry.dtype != dtype or not fits:
            same_shapes = same_shapes and fits
            differing.append(
                f"{name}: checkpoint {entry.dtype} {list(entry.shape)}, "
                f"wanted {dtype} {list(shape)}"
            )
    if differing:
        more = f"\nand {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise CheckpointError(
            f"checkpoint `{checkpoint}` holds tensors of another shape or dtype",
            why="\n".join(differing[:_SHOWN]) + more,
            hint="give the `--precision` that it was trained with"
            if same_shapes
            else "give the model options that the checkpoint was trained with",
        )


def _fits(saved: tuple[int, ...], wanted: tuple[int, ...], rows: int | None) -> bool:
    """Return True if two shapes differ at most in the rows after the first *rows*."""
    same = rows is not None and len(saved) == len(wanted) and saved[1:] == wanted[1:]
    return same and rows is not None and min(saved[0], wanted[0]) >= rows


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
