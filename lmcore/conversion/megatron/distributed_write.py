"""Writing of weights in Megatron's `torch_dist` format, one tensor of one layer at a time."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmcore.accelerator.dtype import dtype_name
from lmcore.checkpoint.chunks import ChunkBounds
from lmcore.checkpoint.dcp_index import write_index
from lmcore.checkpoint.dcp_writer import ByteRange, write_streamed
from lmcore.checkpoint.manifest import TensorEntry
from lmcore.conversion.cast import cast
from lmcore.conversion.megatron.directory import COMMON_NAME, FORMAT_NAME, TRACKER_NAME
from lmcore.conversion.megatron.layout import Layout
from lmcore.conversion.megatron.names import foreign_name
from lmcore.conversion.megatron.packing import Packing
from lmcore.conversion.megatron.run_arguments import (
    VERSION,
    directory_name,
    padded,
    run_arguments,
    start_notes,
    tracked_name,
    vocabulary_rows,
)
from lmcore.conversion.megatron.schedule import schedule_content
from lmcore.durable import write_atomically
from lmcore.parallel.tensor_layout import Chunk

if TYPE_CHECKING:
    from lmcore.conversion.state import ModelState
    from lmcore.data.tokenizer import Tokenizer

__all__ = ["write_distributed"]

_WHOLE = Layout()
_LAYERS = "decoder.layers."
_OBJECTS_NAME = "__0_1.distcp"
_STATES = (
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""Modules of a layer for which Megatron looks for a state beside the weights; here it is empty."""


def write_distributed(
    state: ModelState,
    directory: Path,
    tokenizer: Tokenizer | None,
    *,
    layout: Layout = _WHOLE,
    dtype: torch.dtype = torch.float32,
) -> list[str]:
    """Write the weights of a model as `torch_dist`; return what the user should know.

    Args:
        state: Model to write.
        directory: Empty directory.
        tokenizer: Tokenizer of the model, whose name is recorded; None: it is not known.
        layout: Parallel layout that the arguments have; another one can load the checkpoint, too.
        dtype: Dtype of the weights: float32, float16 or bfloat16.

    Raises:
        CheckpointError: The model cannot be divided so, or *state* is damaged.
        OSError: The file system refuses.
    """
    layout.check(state.shape)
    _, rows = vocabulary_rows(state, layout.tensor)
    shape = dataclasses.replace(state.shape, padded_vocab_size=rows)
    packing = Packing(shape, 1)
    checkpoint = directory / directory_name(state)
    checkpoint.mkdir(parents=True)
    places = {name: _place(name) for name in state.parameters}
    pieces: dict[str, TensorEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    for name, (foreign, layer) in places.items():
        size = packing.part_shape(name)
        stacked = layer is not None
        pieces[name] = TensorEntry(dtype_name(dtype), (1, *size) if stacked else size)
        whole = (shape.num_layers, *size) if stacked else size
        tensors[foreign] = TensorEntry(dtype_name(dtype), whole)

    def read(name: str) -> Tensor:
        tensor = padded(name, state.read(name), rows)
        (piece,) = packing.split(name, tensor)
        return cast(name, piece, dtype).reshape(pieces[name].shape)

    zeros = {name: (0,) * len(piece.shape) for name, piece in pieces.items()}
    chunks = {
        name: (name, Chunk(zeros[name], zeros[name], piece.shape)) for name, piece in pieces.items()
    }
    written = write_streamed(checkpoint, chunks, pieces, read)
    stored = []
    for name, found in zip(chunks, written.ranges, strict=True):
        foreign, layer = places[name]
        offset = zeros[name] if layer is None else (layer, *zeros[name][1:])
        stored.append((foreign, ChunkBounds(offset, pieces[name].shape), found))
    write_index(checkpoint, tensors, stored, _write_objects(checkpoint, shape.num_layers))
    progress = state.progress
    content = {
        "args": run_arguments(state, shape, tokenizer, layout, dtype),
        "checkpoint_version": VERSION,
        "iteration": progress.iteration if progress else 0,
        **schedule_content(progress),
    }
    torch.save(content, checkpoint / COMMON_NAME)
    described = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    described |= {"common_backend": "torch", "common_backend_version": 1}
    write_atomically(checkpoint / FORMAT_NAME, json.dumps(described).encode())
    write_atomically(directory / TRACKER_NAME, tracked_name(state))
    notes = start_notes(state, layout, "--ckpt-format torch_dist", optimizer=False)
    if len(state.kinds) > 1:
        notes.insert(0, "the state of the optimizer is left out: `--to megatron` writes it")
    return notes


def _place(name: str) -> tuple[str, int | None]:
    """Return the name of a parameter in the files, and its number in a stack of layers."""
    foreign = foreign_name(name, "core")
    if not foreign.startswith(_LAYERS):
        return foreign, None
    layer, _, inside = foreign.removeprefix(_LAYERS).partition(".")
    return f"{_LAYERS}{inside}", int(layer)


def _write_objects(checkpoint: Path, layers: int) -> dict[str, ByteRange]:
    """Write the empty state of modules and return the bytes of each by its name."""
    stream = io.BytesIO()
    torch.save([None], stream)
    write_atomically(checkpoint / _OBJECTS_NAME, stream.getvalue())
    found = ByteRange(_OBJECTS_NAME, 0, len(stream.getvalue()))
    return {
        f"{_LAYERS}{module}._extra_state/shard_{layer}_{layers}": found
        for module in _STATES
        for layer in range(layers)
    }
