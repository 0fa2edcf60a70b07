"""Checkpoints of other programs, from whose weights a run starts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.checkpoint import Manifest, TensorEntry
from lmcore.checkpoint.chunks import ChunkBounds, overlap
from lmcore.checkpoint.manifest import FORMAT_VERSION
from lmcore.config.plan import ResumePoint
from lmcore.data.tokenizer import tokenizer_from
from lmcore.errors import CheckpointError
from lmcore.model.family import parameter_shapes

if TYPE_CHECKING:
    from torch import Tensor

    from lmcore.conversion.loading.foreign_model import ForeignModel
    from lmcore.parallel.tensor_layout import TensorLayout
    from lmcore.runtime.process.channel import Channel

__all__ = ["foreign_resume_point", "load_foreign"]

_PREFIX = "model."


def foreign_resume_point(model: ForeignModel) -> ResumePoint:
    """Return the starting point of a run in a checkpoint of another program.

    Its manifest has the model's shape and tokenizer, as in a converted checkpoint, and no state of
    a run.

    Args:
        model: Model in the checkpoint.

    Raises:
        DataError: The tokenizer's files are damaged.
    """
    meta: dict[str, object] = {"config": {"derived": {"vocab_size": model.vocab_size}}}
    if model.tokenizer is not None:
        tokenizer = tokenizer_from(model.tokenizer)
        meta["tokenizer"] = {
            "describe": tokenizer.describe(),
            "fingerprint": tokenizer.fingerprint(),
        }
        meta["config"] = {"derived": {"vocab_size": tokenizer.vocab_size}}
    elif model.tokenizer_type is not None:
        meta["converted_from"] = {"tokenizer_type": model.tokenizer_type}
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        lmcore_version="",
        torch_version="",
        iteration=0,
        sequence=0,
        model_shape=model.shape.to_dict(),
        meta=meta,
        tensors={
            _PREFIX + name: TensorEntry("float32", shape)
            for name, shape in parameter_shapes(model.shape).items()
        },
        files={},
    )
    return ResumePoint(model.path, manifest, foreign=True)


def load_foreign(
    path: Path,
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, TensorLayout],
    rows: Collection[str],
    channel: Channel,
) -> None:
    """Fill *tensors* in place with the weights of another program's checkpoint.

    Each rank reads the whole tensors, one at a time.  Of *rows*, rows that the checkpoint does not
    have are left as they are.

    Args:
        path: Directory of the checkpoint.
        tensors: Local tensors to fill, by their names in a checkpoint of lmcore.
        layouts: Layouts of *tensors*, by name.
        rows: Names of tensors that may have another number of rows than in the checkpoint.
        channel: Channel of the ranks of the run, which all must call this.

    Raises:
        CheckpointError: The checkpoint is damaged.
        OtherRankError: The same for another process, with its text.
    """
    from lmcore.conversion.loading.weights import WeightReader
    from lmcore.parallel.tensor_layout import box

    def fill() -> None:
        weights = WeightReader(path)
        for name, tensor in tensors.items():
            whole = weights.read(name.removeprefix(_PREFIX))
            if tuple(whole.shape) != layouts[name].shape and name not in rows:
                raise CheckpointError(
                    f"the weights of `{path}` are not those of the model that it describes",
                    why=f"`{name}` has shape {list(whole.shape)} instead of "
                    f"{list(layouts[name].shape)}",
                )
            there = ChunkBounds((0,) * whole.dim(), tuple(whole.shape))
            for held in layouts[name].chunks:
                shared = overlap(there, ChunkBounds(held.offset, held.size))
                if shared is None:
                    continue
                offsets = zip(shared.offset, held.offset, held.start, strict=True)
                start = tuple(at - offset + first for at, offset, first in offsets)
                source = box(whole, shared.offset, shared.size)
                box(tensor.detach(), start, shared.size).copy_(source)

    channel.exchange(fill, lambda parts: [None] * len(parts), f"the weights of `{path.name}`")
