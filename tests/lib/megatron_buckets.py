"""Checkpoints of Megatron's distributed optimizer in `torch_dist`, written by hand."""

from __future__ import annotations

import argparse
import io
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron_models import MemoryState
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from lmcore.conversion.megatron.parameters.layout import Layout
from lmcore.conversion.megatron.parameters.names import foreign_name
from lmcore.conversion.megatron.parameters.packing import Packing
from lmcore.conversion.megatron.run.written_arguments import architecture_arguments
from lmcore.conversion.state import WEIGHT
from lmcore.model.megatron_names import names_for

KEYS = {"param": WEIGHT, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
SETTINGS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
Vectors = dict[str, torch.Tensor]


def buckets_of(
    parameters: list[tuple[str, str]], state: MemoryState, layout: Layout, rank: int, limit: int
) -> list[Vectors]:
    """Return the buckets of one part of the model, as the optimizer fills them.

    A bucket ends when it has *limit* elements, and round an embedding that two stages share.
    """
    packing = Packing(state.shape, layout.tensor)
    made: list[list[str]] = [[]]
    ends = [0]
    for _, name in reversed(parameters):
        count = math.prod(packing.part_shape(name))
        shared = state.shape.tied and layout.pipeline > 1 and name == "token_embedding.weight"
        if shared and made[-1]:
            ends[-1] = math.ceil(ends[-1] / 64) * 64
            made, ends = [*made, []], [*ends, 0]
        made[-1].append(name)
        ends[-1] = math.ceil(ends[-1] / 64) * 64 + count
        if shared or ends[-1] >= limit:
            made, ends = [*made, []], [*ends, 0]
    found = []
    for names, end in zip(made, ends, strict=True):
        vectors = {key: torch.full((end,), torch.nan) for key in KEYS}
        start = 0
        for name in names:
            for key, kind in KEYS.items():
                part = packing.split(name, state.read(name, kind))[rank].reshape(-1)
                vectors[key][start : start + part.numel()] = part
            start = math.ceil((start + part.numel()) / 64) * 64
        found.append(vectors)
    return [vectors for vectors in found if vectors["param"].numel()]


class Planner(DefaultSavePlanner):
    """Planner that writes bytes as they are."""

    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002 - torch's name
        """Return the bytes of an object, or a tensor."""
        if isinstance(object, io.BytesIO):
            return object
        return super().transform_object(write_item, object)


def saved(content: Any) -> io.BytesIO:
    """Return the bytes of an object."""
    stream = io.BytesIO()
    torch.save(content, stream)
    stream.seek(0)
    return stream


def save(
    directory: Path,
    state: MemoryState,
    layout: Layout,
    *,
    limit: int = 10**9,
    style: str = "core",
    dtype: torch.dtype = torch.bfloat16,
    gathered: bool = False,
    **changes: Any,
) -> None:
    """Save *state* as Megatron saves it with `dp_reshardable`, or with `dp_zero_gather_scatter`."""
    whole, names = Packing(state.shape, 1), names_for(state.shape)
    tensors: dict[str, Any] = {
        foreign_name(name, "core", names): whole.split(name, state.read(name))[0]
        .to(dtype)
        .contiguous()
        for name in state.parameters
    }
    for stage in range(layout.pipeline):
        for rank in range(layout.tensor):
            group = f"optimizer.distributed.dp_group_idx_{stage * layout.tensor + rank}"
            values = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 5.0}
            tensors[f"{group}.optimizer/shard_0_1"] = [{"param_groups": [values]}]
            objects: dict[Any, Any] = {"buckets_coalesced": True}
            for part in range(layout.virtual):
                parameters = layout.parameters(state.shape, stage, part, style)
                held = buckets_of(parameters, state, layout, rank, limit)
                rows = {key: torch.cat([vectors[key] for vectors in held]) for key in KEYS}
                objects[part] = {(torch.bfloat16, torch.float32): rows}
                for number, vectors in enumerate([] if gathered else held):
                    name = f"{group}.gbuf_idx_{part}.dtype_(torch.bfloat16, torch.float32)"
                    for key, vector in vectors.items():
                        tensors[f"{name}.bucket_idx_{number}.{key}"] = vector
            if gathered:
                tensors[f"{group}.param_state/shard_0_1"] = [objects]
    tensors |= changes
    # torch's own saver would make texts of the numbers in an object.
    tensors |= {name: saved(one) for name, one in tensors.items() if "param_state" in name and one}
    dcp.save(
        {name: one for name, one in tensors.items() if one is not None},
        checkpoint_id=directory,
        no_dist=True,
        planner=Planner(flatten_state_dict=False),  # objects keep their names
    )
    args = architecture_arguments(state.shape) | {
        "tensor_model_parallel_size": layout.tensor,
        "transformer_impl": "local" if style == "core-local" else "transformer_engine",
        "consumed_train_samples": 12,
    }
    content = {"args": argparse.Namespace(**args), "iteration": 5, "optimizer": {}}
    torch.save(content, directory / "common.pt")
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
