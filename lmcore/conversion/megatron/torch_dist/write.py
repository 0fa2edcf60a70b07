"""Writing of a model in Megatron's `torch_dist` format, one tensor of one layer at a time.

The state of Adam is kept by parameters, each with the shape of its weight, so that any layout
loads it.  Megatron's plain optimizer calls the main parameters `fp32_param`, the distributed one
`param`; both names refer to the same bytes.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.base.durable import write_atomically
from lmcore.checkpoint.chunks import ChunkBounds
from lmcore.checkpoint.dcp_index import write_index
from lmcore.checkpoint.dcp_writer import ByteRange, write_streamed
from lmcore.checkpoint.manifest import TensorEntry
from lmcore.contract.dtype import dtype_name
from lmcore.conversion.cast import cast
from lmcore.conversion.megatron.directory import (
    COMMON_NAME,
    FORMAT_NAME,
    TRACKER_NAME,
    directory_name,
    tracked_name,
)
from lmcore.conversion.megatron.optimizer.groups import group_contents, updates
from lmcore.conversion.megatron.optimizer.loss_scale import grad_scaler
from lmcore.conversion.megatron.parameters.layout import Layout, in_layers
from lmcore.conversion.megatron.parameters.names import (
    STYLES,
    foreign_name,
    require_names,
    stack_of,
)
from lmcore.conversion.megatron.parameters.packing import Packing
from lmcore.conversion.megatron.parameters.vocabulary import padded_parts, padded_shape
from lmcore.conversion.megatron.run.schedule import schedule_content
from lmcore.conversion.megatron.run.written_arguments import VERSION, run_arguments, start_notes
from lmcore.conversion.state import ADAM, WEIGHT
from lmcore.conversion.torch_file import save_file
from lmcore.model.megatron_names import MegatronNames, names_for
from lmcore.parallel.tensor_layout import Chunk

if TYPE_CHECKING:
    from lmcore.conversion.state import ModelState, Progress
    from lmcore.data.tokenizer import Tokenizer

__all__ = ["write_distributed"]

_WHOLE = Layout()
_OBJECTS_NAME = "__0_1.distcp"
_STATES = (
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
_CROSSED_STATES = (
    *_STATES,
    "cross_attention.core_attention",
    "cross_attention.linear_proj",
    "cross_attention.linear_q",
    "cross_attention.linear_kv",
)
"""Modules of a layer for which Megatron looks for a state beside the weights; here it is empty."""

_OPTIMIZER = "optimizer.state."
_SHARDING = "fully_reshardable"
"""Megatron's name for a state of its distributed optimizer that is kept by parameters."""


@dataclass(frozen=True)
class _Stored:
    """Tensor of the checkpoint: one kind of one parameter.

    Attributes:
        name: Name of the parameter in lmcore.
        kind: Kind of the tensor; see `ModelState`.
        prefixes: Beginnings of its names in the files, which all refer to the same bytes.
        dtype: Dtype in the files.
    """

    name: str
    kind: str
    prefixes: tuple[str, ...]
    dtype: torch.dtype


def write_distributed(
    state: ModelState,
    directory: Path,
    tokenizer: Tokenizer | None,
    *,
    layout: Layout = _WHOLE,
    style: str = STYLES[0],
    dtype: torch.dtype = torch.float32,
) -> list[str]:
    """Write a model as `torch_dist`, with the state of Adam; return notes for the user.

    Args:
        state: Model to write.
        directory: Empty directory.
        tokenizer: Tokenizer of the model, whose name is recorded; None: it is not known.
        layout: Parallel layout that the arguments have; another one can load the checkpoint, too.
        style: Layers of the run that will load it, one of `STYLES`; the names are the same.  The
            plain optimizer of other than the first counts updates for each parameter, as torch's
            Adam does; fused ones count them in the groups.
        dtype: Dtype of the weights: float32, float16 or bfloat16.

    Raises:
        CheckpointError: The layout cannot divide the model, or *state* is damaged.
        OSError: The file system refuses.
    """
    names = names_for(state.shape)
    require_names(state, "Megatron-LM", names)
    assert names is not None
    layout.check(state.shape)
    shape = padded_shape(state, layout.tensor)
    packing = Packing(shape, 1)
    counts = {stack: count for stack, (count, _) in in_layers(shape, "core").items()}
    checkpoint = directory / directory_name(state)
    checkpoint.mkdir(parents=True)
    members = {f"{one.prefixes[0]}{one.name}": one for one in _members(state, dtype)}
    pieces: dict[str, TensorEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    for key, one in members.items():
        foreign, layer, count = _place(one.name, names, counts)
        size = packing.part_shape(one.name)
        stacked = layer is not None
        pieces[key] = TensorEntry(dtype_name(one.dtype), (1, *size) if stacked else size)
        whole = (count, *size) if stacked else size
        for stored_as in _stored_names(one, foreign, names):
            tensors[stored_as] = TensorEntry(dtype_name(one.dtype), whole)

    def read(key: str) -> Tensor:
        one = members[key]
        (piece,) = padded_parts(packing, one.name, state.read(one.name, one.kind))
        return cast(one.name, piece, one.dtype).reshape(pieces[key].shape)

    zeros = {key: (0,) * len(piece.shape) for key, piece in pieces.items()}
    chunks = {
        key: (key, Chunk(zeros[key], zeros[key], piece.shape)) for key, piece in pieces.items()
    }
    written = write_streamed(checkpoint, chunks, pieces, read, checksums=True)
    stored = []
    for key, found in zip(chunks, written.ranges, strict=True):
        foreign, layer, _ = _place(members[key].name, names, counts)
        offset = zeros[key] if layer is None else (layer, *zeros[key][1:])
        bounds = ChunkBounds(offset, pieces[key].shape)
        listed = _stored_names(members[key], foreign, names)
        stored += [(stored_as, bounds, found) for stored_as in listed]
    write_index(checkpoint, tensors, stored, _write_objects(checkpoint, names, counts))
    progress = state.progress
    optimizer = len(state.kinds) > 1
    content = {
        "args": run_arguments(state, shape, tokenizer, layout, dtype),
        "checkpoint_version": VERSION,
        "iteration": progress.iteration if progress else 0,
        **schedule_content(progress),
    }
    if optimizer:
        content |= _optimizer_content(progress, dtype, step_of_parameters=style != STYLES[0])
    save_file(content, checkpoint / COMMON_NAME)
    described = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    described |= {"common_backend": "torch", "common_backend_version": 1}
    write_atomically(checkpoint / FORMAT_NAME, json.dumps(described).encode())
    write_atomically(directory / TRACKER_NAME, tracked_name(state))
    return start_notes(state, layout, "--ckpt-format torch_dist", optimizer=optimizer)


def _members(state: ModelState, dtype: torch.dtype) -> list[_Stored]:
    """Return what is stored: weights, and the main parameters and moments of Adam in float32."""
    mains = (f"{_OPTIMIZER}fp32_param.", f"{_OPTIMIZER}param.")
    half = dtype != torch.float32
    found = []
    for name in state.parameters:
        if len(state.kinds) == 1:
            found.append(_Stored(name, WEIGHT, ("",), dtype))
            continue
        found.append(_Stored(name, WEIGHT, ("",) if half else ("", *mains), dtype))
        if half:
            found.append(_Stored(name, WEIGHT, mains, torch.float32))
        found += [_Stored(name, kind, (f"{_OPTIMIZER}{kind}.",), torch.float32) for kind in ADAM]
    return found


def _optimizer_content(
    progress: Progress | None, dtype: torch.dtype, *, step_of_parameters: bool
) -> dict[str, Any]:
    """Return the settings of Adam for Megatron's plain and its distributed optimizer."""
    inner: dict[str, Any] = {"param_groups": group_contents(progress), "state": {}}
    if step_of_parameters:
        inner["state"]["common_step"] = torch.tensor(float(updates(progress)))
    content: dict[str, Any] = {"optimizer": inner, "param_state_sharding_type": _SHARDING}
    content |= grad_scaler(progress, dtype)
    if dtype == torch.float32:  # the plain optimizer of a model in float32 is torch's own
        content |= {**inner, "param_groups": group_contents(progress)}
    sharding = {"distrib_optim_sharding_type": _SHARDING, "chained_optim_avoid_prefix": True}
    return {"optimizer": content, "content_metadata": {**sharding, "singleton_local_shards": False}}


def _place(
    name: str, names: MegatronNames, counts: Mapping[str, int]
) -> tuple[str, int | None, int]:
    """Return the name of a parameter in the files, its number in a stack, and the stack's layers.

    Args:
        name: Name in lmcore.
        names: Record of the model's family.
        counts: Number of layers of each stack.
    """
    foreign, place = foreign_name(name, "core", names), stack_of(name, names)
    if place is None:
        return foreign, None, 0
    stack, layer, _ = place
    layers = f"{names.stacks[stack].core}.layers."
    inside = foreign.removeprefix(layers).partition(".")[2]
    return f"{layers}{inside}", layer, counts[stack]


def _stored_names(one: _Stored, foreign: str, names: MegatronNames) -> list[str]:
    """Return all names of a tensor in the files."""
    second = names.second_name(foreign)
    both = (foreign,) if second is None else (foreign, second)
    return [prefix + name for prefix in one.prefixes for name in both]


def _write_objects(
    checkpoint: Path, names: MegatronNames, counts: Mapping[str, int]
) -> dict[str, ByteRange]:
    """Write the empty state of modules and return the bytes of each by its name."""
    stream = io.BytesIO()
    torch.save([None], stream)
    write_atomically(checkpoint / _OBJECTS_NAME, stream.getvalue())
    found = ByteRange(_OBJECTS_NAME, 0, len(stream.getvalue()))
    stacked = [
        f"{stack.core}.layers.{module}._extra_state/shard_{layer}_{counts[key]}"
        for key, stack in names.stacks.items()
        for module in (_CROSSED_STATES if stack.crossed else _STATES)
        for layer in range(counts[key])
    ]
    whole = [f"{module}._extra_state/shard_0_1" for module in names.states]
    return dict.fromkeys([*stacked, *whole], found)
