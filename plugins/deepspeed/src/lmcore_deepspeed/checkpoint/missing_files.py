"""Names of files that a checkpoint lacks: of a pipeline's layers, and of a universal checkpoint.

Both are numbered by layer, in one of two ways, so that the numbers that exist determine the missing
ones; see `names`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from lmcore.base.errors import CheckpointError, counted
from lmcore.model.family import parameter_shapes
from lmcore.model.shape import ModelShape
from lmcore_deepspeed.checkpoint.directory import (
    LATEST_UNIVERSAL,
    UNIVERSAL,
    DeepSpeedDirectory,
    is_named_universal,
)
from lmcore_deepspeed.checkpoint.names import (
    EMBEDDING_LAYER,
    numbered_layers,
    universal_name,
    universal_names,
)

__all__ = [
    "embedding_files",
    "require_files",
    "universal_file",
    "universal_notes",
    "weight_files",
]

_COPY = "copy the files of all ranks into one directory; each node of a cluster may have its own"
_SHOWN = 10
_Key = TypeVar("_Key", int, str)


def universal_notes(files: DeepSpeedDirectory) -> list[str]:
    """Return a note if a checkpoint lacks the directory of its universal part.

    Args:
        files: Files of the checkpoint.
    """
    if files.universal is not None or not is_named_universal(files.path):
        return []
    note = (
        f"`{LATEST_UNIVERSAL}` names `{files.path.absolute().name}` as a universal checkpoint, but "
        f"its directory `{UNIVERSAL}` is missing: its other files are read"
    )
    return [note]


def universal_file(universal: Path, name: str) -> str:
    """Return the path of the file of a weight, inside of the checkpoint.

    Args:
        universal: Directory of the parameters of a universal checkpoint.
        name: Name of the weight in it.
    """
    return f"{universal.name}/{name}/fp32.pt"


def embedding_files(
    files: DeepSpeedDirectory, found: Iterable[str], ranks: int, *, tied: bool
) -> list[str]:
    """Return the missing files of the token embedding; empty if there are none, or if unclear.

    Args:
        files: Files of the checkpoint.
        found: Names of the tensors that are there.
        ranks: Number of ranks of tensor parallelism.
        tied: True if the output has the token embedding's weights.
    """
    if files.universal is not None:
        pipeline = any(name[0].isdigit() or name.startswith("tied_modules.") for name in found)
        style = "pipeline" if pipeline else "legacy"
        name = universal_name("token_embedding.weight", 0, style=style, tied=tied)
        there = (files.universal / name / "fp32.pt").is_file()
        return [] if there else [universal_file(files.universal, name)]
    if not files.layers:
        return []
    layers = [(EMBEDDING_LAYER, rank) for rank in range(ranks)]
    return [_layer_file(*one) for one in layers if one not in files.layers]


def weight_files(
    files: DeepSpeedDirectory,
    found: Collection[str],
    lacking: Collection[str],
    ranks: int,
    shape: ModelShape,
) -> list[str]:
    """Return the missing files of weights; empty if there are none, or if unclear.

    Args:
        files: Files of the checkpoint.
        found: Names of the tensors that are there.
        lacking: Names in lmcore of the parameters that are missing.
        ranks: Number of ranks of tensor parallelism.
        shape: Shape of the model.
    """
    if files.universal is not None:
        kinds = universal_names(parameter_shapes(shape), shape.num_layers, tied=shape.tied)
        absent = _fewest(set(found), [set(names) for names in kinds])
        ordered = dict.fromkeys(name for names in kinds for name in names if name in absent)
        return [universal_file(files.universal, name) for name in ordered]
    if not files.layers:
        return []
    held, owners = (
        {layer for layer, _ in files.layers},
        {name.partition(".")[0] for name in lacking},
    )
    ways = [
        set(way)
        for way in numbered_layers(shape.num_layers, tied=shape.tied)
        if {owner for layer, owner in way.items() if layer not in held} == owners
    ]
    layers = sorted(_fewest(held, ways))
    return [_layer_file(layer, rank) for layer in layers for rank in range(ranks)]


def require_files(checkpoint: Path, names: Sequence[str], *, hint: str = _COPY) -> None:
    """Raise a `CheckpointError` that names missing files, if there are any.

    Args:
        checkpoint: Directory of the checkpoint.
        names: Paths of the files in it.
        hint: Hint of the error.
    """
    if not names:
        return
    listed = ", ".join(f"`{name}`" for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    raise CheckpointError(
        f"`{checkpoint}` is not complete",
        why=f"{counted(len(names), 'file')} missing: {listed}{more}",
        hint=hint,
    )


def _fewest(held: set[_Key], ways: Sequence[set[_Key]]) -> set[_Key]:
    """Return the keys that *held* lacks of the numbering that lacks fewest; empty for a tie."""
    fitting = sorted((keys - held for keys in ways if held <= keys), key=len)
    clear = len(fitting) == 1 or (len(fitting) > 1 and len(fitting[0]) < len(fitting[1]))
    return fitting[0] if clear else set()


def _layer_file(layer: int, rank: int) -> str:
    return f"layer_{layer:02d}-model_{rank:02d}-model_states.pt"
