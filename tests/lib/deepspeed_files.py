"""Checkpoints of Megatron-DeepSpeed, written by rules of the format and by no code of lmcore's."""

from __future__ import annotations

import argparse
import contextlib
import enum
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lmcore.conversion.megatron.parameters.packing import Packing
from lmcore.conversion.megatron.run.written_arguments import architecture_arguments
from lmcore.conversion.state import ADAM, WEIGHT, ModelState

KINDS = (WEIGHT, *ADAM)
NAMES = {
    "token_embedding.weight": "embedding.word_embeddings.weight",
    "position_embedding.weight": "embedding.position_embeddings.weight",
    "output_embedding.weight": "output_layer.weight",
    "final_norm": "encoder.final_layernorm",
    "attention_norm": "input_layernorm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.output_bias": "self_attention.dense.bias",
    "attention.output": "self_attention.dense",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.up_bias": "mlp.dense_h_to_4h.bias",
    "feed_forward.up": "mlp.dense_h_to_4h",
    "feed_forward.down_bias": "mlp.dense_4h_to_h.bias",
    "feed_forward.down": "mlp.dense_4h_to_h",
    "blocks.": "encoder.layers.",
}
PIPELINE = {
    "embedding.": "1.",
    "output_layer.": "{head}.lm_head.",
    "encoder.final_layernorm.": "{norm}.",
}

Parts = dict[str, dict[str, torch.Tensor]]
"""Tensors of each kind by name, of one rank."""


@dataclass
class FragmentAddress:
    """Stand-in of `deepspeed.utils.tensor_fragment.fragment_address`."""

    numel: int
    start: int


class DynamicLossScaler:
    """Stand-in of `deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler`, with its update."""

    def __init__(self, scale: float, window: int, hysteresis: int) -> None:
        self.cur_scale, self.scale_window, self.min_scale = scale, window, 1.0
        self.cur_iter, self.last_overflow_iter = 0, -1
        self.delayed_shift = self.cur_hysteresis = hysteresis
        self.dtype = torch.float16

    def update_scale(self, overflow: bool) -> None:
        """Follow a step, by the rules of DeepSpeed 0.19.8."""
        if overflow:
            if self.cur_hysteresis == 1:
                self.cur_scale = max(self.cur_scale / 2, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            stable = self.cur_iter - self.last_overflow_iter - 1
            if stable > 0 and stable % self.scale_window == 0:
                self.cur_hysteresis = self.delayed_shift
                self.cur_scale *= 2
        self.cur_iter += 1


class Stage(enum.IntEnum):
    """Stand-in of `deepspeed.runtime.zero.config.ZeroStageEnum`."""

    one = 1
    three = 3


@dataclass(frozen=True)
class Layout:
    """Layout of a checkpoint: ranks, stages of the pipeline (0: none), and ZeRO's stage.

    Without ZeRO, *form* is the one of the optimizer's state: plain, fused, unfused or named.
    """

    tensor: int = 1
    stages: int = 0
    zero: int = 0
    data: int = 1
    first_block: int = 2
    mapped: bool = True
    dtype: torch.dtype = torch.bfloat16
    form: str = ""


def write(state: ModelState, root: Path, layout: Layout, **arguments: Any) -> Path:
    """Write *state* as `global_step7` and return its directory."""
    directory = root / "global_step7"
    directory.mkdir(parents=True)
    (root / "latest").write_text("global_step7")
    args = architecture_arguments(state.shape) | {
        "normalization": {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}[
            state.shape.normalization
        ],
        "num_key_value_heads": state.shape.num_query_groups,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": max(layout.stages, 1),
        "consumed_train_samples": 70,
        "params_dtype": layout.dtype,
    }
    for absent in ("num_query_groups", "group_query_attention", "rotary_interleaved"):
        del args[absent]
    args = argparse.Namespace(**args, **arguments)
    stages = max(layout.stages, 1)
    packing = Packing(state.shape, layout.tensor)
    with importable():
        for rank in range(layout.tensor):
            parts = rank_parts(state, packing, rank, layout)
            if layout.stages:
                write_layers(parts[WEIGHT], directory, rank, layout.dtype)
            for stage in range(stages):
                held = {name for name in parts[WEIGHT] if stage_of(name, state, layout) == stage}
                ours = {kind: {n: t for n, t in parts[kind].items() if n in held} for kind in parts}
                copied = 0 < stage == stages - 1 and not args.untie_embeddings_and_output_weights
                copy = {
                    kind: {n: t for n, t in parts[kind].items() if copied and n[:2] == "1."}
                    for kind in parts
                }
                write_rank(ours, directory, stage * layout.tensor + rank, layout, args, copy)
    return directory


def rank_parts(state: ModelState, packing: Packing, rank: int, layout: Layout) -> Parts:
    """Return the tensors of one rank of tensor parallelism, over all stages."""
    found: Parts = {}
    for kind in KINDS if len(state.kinds) > 1 else (WEIGHT,):
        found[kind] = {
            name_of(name, state, layout): packing.split(name, state.read(name, kind))[rank].clone()
            for name in state.parameters
        }
    return found


def name_of(name: str, state: ModelState, layout: Layout) -> str:
    """Return the name of a parameter in a module with or without a pipeline."""
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    if not layout.stages:
        return f"language_model.{name}"
    first, count = layout.first_block, state.shape.num_layers
    if name.startswith("encoder.layers."):
        _, _, block, inside = name.split(".", 3)
        return f"{first + int(block)}.{inside}"
    # BigScience's pipeline transposes before its blocks, and back after them.
    norm = first + count + (first - 2)
    for ours, theirs in PIPELINE.items():
        name = name.replace(ours, theirs.format(norm=norm, head=norm + 1))
    return name


def stage_of(name: str, state: ModelState, layout: Layout) -> int:
    """Return the stage of a parameter: equal numbers of blocks, the first also the embedding."""
    if not layout.stages:
        return 0
    block = int(name.partition(".")[0]) - layout.first_block
    return min(max(block, 0) * layout.stages // state.shape.num_layers, layout.stages - 1)


def write_layers(
    weights: Mapping[str, torch.Tensor], directory: Path, rank: int, dtype: torch.dtype
) -> None:
    """Write the files of a pipeline's layers."""
    layers: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in weights.items():
        number, inside = name.split(".", 1)
        layers.setdefault(int(number), {})[inside] = tensor.to(dtype)
    for number, layer in layers.items():
        torch.save(layer, directory / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")


def write_rank(
    parts: Parts,
    directory: Path,
    rank: int,
    layout: Layout,
    args: argparse.Namespace,
    copy: Parts,
) -> None:
    """Write the files of one model-parallel rank, of all its data-parallel ranks.

    The last stage of a pipeline has a *copy* of a tied embedding.
    """
    weights = {tied(name, layout, args): tensor for name, tensor in parts[WEIGHT].items()}
    groups = [
        [name for name, tensor in weights.items() if (tensor.ndim > 1) == matrices]
        for matrices in (True, False)
    ]
    module: Any = None
    if not layout.stages:
        module = {"language_model": {"embedding": {}, "encoder": {}}}
        for name, tensor in weights.items():
            _, owner, inside = name.split(".", 2)
            held = torch.zeros(0) if layout.zero == 3 else tensor
            module["language_model"].setdefault(owner, {})[inside] = held.to(layout.dtype)
    content = {
        "module": module,
        "buffer_names": [],
        "param_shapes": [{name: weights[name].shape for name in group} for group in groups]
        if layout.zero
        else None,
        "shared_params": {},
        "frozen_param_shapes": {},
        "frozen_param_fragments": {},
        "dp_world_size": layout.data,
        "mp_world_size": layout.tensor * max(layout.stages, 1),
        "global_steps": 7,
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 7,
        "universal_checkpoint_info": {"original_vocab_size": 23, "padded_vocab_size": 24},
    }
    if layout.form:
        both = {
            kind: {tied(one, layout, args): t for one, t in {**copy[kind], **parts[kind]}.items()}
            for kind in parts
        }
        content["optimizer"] = without_zero(both, layout)
    name = f"mp_rank_{rank:02d}_model_states.pt"
    for data in range(layout.data if layout.zero == 3 else 1):
        prefix = f"zero_pp_rank_{data}_" if layout.zero == 3 else ""
        torch.save(content, directory / f"{prefix}{name}")
    if layout.zero:
        flats = {
            kind: {tied(one, layout, args): tensor.flatten() for one, tensor in tensors.items()}
            for kind, tensors in parts.items()
        }
        for data in range(layout.data):
            optimizer = (stage_3 if layout.zero == 3 else stage_1)(flats, groups, data, layout)
            file = f"bf16_zero_pp_rank_{data}_mp_rank_{rank:02d}_optim_states.pt"
            torch.save({"optimizer_state_dict": optimizer, "ds_config": {}}, directory / file)


def tied(name: str, layout: Layout, args: argparse.Namespace) -> str:
    """Return the name that the optimizer of a pipeline has for a tied embedding."""
    both = layout.stages and not args.untie_embeddings_and_output_weights
    return name.replace("1.", "tied_modules.embed.", 1) if both and name[:2] == "1." else name


def stage_1(flats: Parts, groups: list[list[str]], data: int, layout: Layout) -> dict[str, Any]:
    """Return one rank's partition of ZeRO-1: an equal part of each group's padded vector."""
    saved: dict[str, list[torch.Tensor]] = {kind: [] for kind in flats}
    mappings: list[dict[str, FragmentAddress]] = []
    for group in groups:
        mapping = {}
        for kind, tensors in flats.items():
            row = torch.cat([tensors[name] for name in group])
            multiple = 2 * layout.data
            padding = -row.numel() % multiple
            size = (row.numel() + padding) // layout.data
            part = torch.cat([row, torch.full((padding,), 9.0)])[data * size : (data + 1) * size]
            if kind == WEIGHT and data == layout.data - 1 and padding:
                part = part[:-padding]
            saved[kind].append(part.clone())
            position = -data * size
            for name in group:
                numel = tensors[name].numel()
                start, end = max(position, 0), min(position + numel, size)
                if start < end:
                    mapping[name] = FragmentAddress(end - start, start)
                position += numel
        mappings.append(mapping)
    found = {
        "zero_stage": Stage.one,
        "partition_count": [layout.data] * len(groups),
        "single_partition_of_fp32_groups": saved.pop(WEIGHT),
        "base_optimizer_state": optimizer(saved),
    }
    return found | ({"param_slice_mappings": mappings} if layout.mapped else {})


def stage_3(flats: Parts, groups: list[list[str]], data: int, layout: Layout) -> dict[str, Any]:
    """Return one rank's partition of ZeRO-3: a share of each parameter."""
    saved: dict[str, list[torch.Tensor]] = {kind: [] for kind in flats}
    for group in groups:
        for kind, tensors in flats.items():
            shares = []
            for name in group:
                share = -(-tensors[name].numel() // layout.data)
                padded = torch.full((share * layout.data,), 9.0)
                padded[: tensors[name].numel()] = tensors[name]
                shares.append(padded[data * share : (data + 1) * share])
            saved[kind].append(torch.cat(shares))
    return {
        "zero_stage": Stage.three,
        "partition_count": layout.data,
        "fp32_flat_groups": saved.pop(WEIGHT),
        "optimizer_state_dict": optimizer(saved),
    }


def without_zero(parts: Parts, layout: Layout) -> dict[str, Any]:
    """Return the state of the optimizer as a rank's model file has it without ZeRO."""
    weights = parts[WEIGHT]
    groups = [
        [name for name, tensor in weights.items() if (tensor.ndim > 1) == matrices]
        for matrices in (True, False)
    ]
    if layout.form == "named":
        flats = {
            kind: {name: tensor.flatten() for name, tensor in tensors.items()}
            for kind, tensors in parts.items()
        }
        return stage_1(flats, groups, 0, layout)
    scale = {"dynamic_loss_scale": layout.dtype == torch.float16, "cur_scale": 4096.0}
    scale |= {"cur_iter": 7, "last_overflow_iter": 1, "scale_factor": 2.0, "scale_window": 1000}
    if layout.form == "fused":
        rows = {
            kind: [torch.cat([tensors[name].flatten() for name in group]) for group in groups]
            for kind, tensors in parts.items()
        }
        flat = rows.pop(WEIGHT)
        return {**scale, "optimizer_state_dict": optimizer(rows), "fp32_groups_flat": flat}
    order = [name for group in groups for name in group]
    inner = optimizer({kind: [parts[kind][name] for name in order] for kind in ADAM})
    first = len(groups[0])
    inner["param_groups"] = [
        {"params": list(range(first)), "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
        {"params": list(range(first, len(order))), "weight_decay": 0.0},
    ]
    if layout.form == "plain":
        return inner
    listed = [[weights[name] for name in group] for group in groups]
    return {**scale, "optimizer_state_dict": inner, "fp32_groups": listed}


def optimizer(saved: dict[str, list[torch.Tensor]]) -> dict[str, Any]:
    """Return the state of Adam as torch's optimizers save it."""
    count = len(next(iter(saved.values()), []))
    states = {
        group: {"step": torch.tensor(6.0), **{kind: saved[kind][group] for kind in saved}}
        for group in range(count)
    }
    return {"state": states, "param_groups": [{"params": [group]} for group in range(count)]}


@contextlib.contextmanager
def importable() -> Iterator[None]:
    """Let pickle find the stand-ins under the names that files of DeepSpeed have."""
    places = {
        "deepspeed.utils.tensor_fragment": (FragmentAddress, "fragment_address"),
        "deepspeed.runtime.zero.config": (Stage, "ZeroStageEnum"),
        "deepspeed.runtime.fp16.loss_scaler": (DynamicLossScaler, "DynamicLossScaler"),
    }
    packages = {"deepspeed", "deepspeed.utils", "deepspeed.runtime", "deepspeed.runtime.zero"}
    packages |= {"deepspeed.runtime.fp16"}
    before = {name: sys.modules.get(name) for name in packages | set(places)}
    for name in before:
        sys.modules[name] = types.ModuleType(name)
    for module, (kind, name) in places.items():
        kind.__module__, kind.__qualname__, kind.__name__ = module, name, name
        setattr(sys.modules[module], name, kind)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def edit(path: Path, change: Any) -> None:
    """Replace a file by its content after *change*."""
    with importable():
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)
