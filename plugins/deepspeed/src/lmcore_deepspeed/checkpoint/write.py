"""Writing of Megatron-DeepSpeed's checkpoints: layer files or rank files, and a universal part.

Weights are in the files that a run loads by default.  The state of Adam is in a universal
checkpoint in the same directory, with the weights in float32, which a run of any layout loads with
`--universal-checkpoint`.

With ZeRO-3, which has no pipeline, DeepSpeed looks for a model's file of another name, takes the
number of updates from another place, and adds no rows to the vocabulary.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.base.durable import write_atomically
from lmcore.base.errors import CheckpointArgumentError, CheckpointError
from lmcore.conversion.cast import cast
from lmcore.conversion.megatron.directory import TRACKER_NAME
from lmcore.conversion.megatron.parameters.layout import Layout
from lmcore.conversion.megatron.parameters.names import require_names
from lmcore.conversion.megatron.parameters.packing import Packing
from lmcore.conversion.megatron.parameters.vocabulary import (
    padded_parts,
    padded_shape,
    vocabulary_notes,
    vocabulary_rows,
)
from lmcore.conversion.megatron.rank_files.write import nested
from lmcore.conversion.megatron.run.schedule import schedule_content
from lmcore.conversion.megatron.run.written_arguments import (
    VERSION,
    activation_notes,
    run_arguments,
)
from lmcore.conversion.state import ADAM, WEIGHT, recorded_samples
from lmcore.conversion.torch_file import save_file, separate
from lmcore.families.gpt.megatron import NAMES as GPT_NAMES
from lmcore.model.family import vocabulary_parameters
from lmcore.model.megatron_names import names_for
from lmcore_deepspeed.checkpoint.directory import LATEST, LATEST_UNIVERSAL, STYLES
from lmcore_deepspeed.checkpoint.loss_scaler import (
    loss_scaler,
    loss_scaler_note,
    save_with_scaler,
)
from lmcore_deepspeed.checkpoint.names import (
    deepspeed_name,
    pipeline_place,
    universal_name,
)

if TYPE_CHECKING:
    from lmcore.conversion.state import ModelState
    from lmcore.data.tokenizer import Tokenizer
    from lmcore.model.shape import ModelShape

__all__ = ["write_deepspeed"]

_WHOLE = Layout()
_VERSION = "0.19.8"
"""Version of DeepSpeed whose files these are; it refuses files without one."""
_UNIVERSAL_VERSION = 0.2
_STAGE_3 = "zero_pp_rank_0_mp_rank_00_model_states.pt"
"""File from which DeepSpeed takes the counters of a universal checkpoint with ZeRO-3."""
_GROUPS = 64
"""Number of groups of parameters for which the optimizer's settings are written.

DeepSpeed leaves out groups beyond the saved ones; a run of Megatron has at most eight.
"""


def write_deepspeed(
    state: ModelState,
    directory: Path,
    tokenizer: Tokenizer | None,
    *,
    layout: Layout = _WHOLE,
    style: str = STYLES[0],
    dtype: torch.dtype = torch.float32,
) -> list[str]:
    """Write a model into *directory* for Megatron-DeepSpeed; return notes for the user.

    Memory is bounded by one layer, without a pipeline by one rank's share of the model.

    Args:
        state: Model to write.
        directory: Empty directory.
        tokenizer: Tokenizer of the model, whose name is recorded; None: it is not known.
        layout: Parallel layout.
        style: Set of names, one of `STYLES`.
        dtype: Dtype of the weights in layer files and rank files.

    Raises:
        CheckpointError: The layout cannot divide the model, Megatron-DeepSpeed has no such model,
            or *state* is damaged.
        OSError: The file system refuses.
    """
    names = names_for(state.shape)
    require_names(state, "Megatron-DeepSpeed", names if names == GPT_NAMES else None, "legacy")
    _check(state.shape, layout, style)
    shape = padded_shape(state, layout.tensor)
    progress = state.progress
    iteration = progress.iteration if progress else 0
    checkpoint = directory / f"global_step{iteration}"
    checkpoint.mkdir(parents=True)
    writer = _Writer(state, shape, layout, style, dtype)
    content = writer.content(tokenizer)
    if style == "pipeline":
        writer.write_layers(checkpoint)
    for stage in range(layout.pipeline):
        for rank in range(layout.tensor):
            module = writer.module(rank) if style == "legacy" else None
            name = f"mp_rank_{stage * layout.tensor + rank:02d}_model_states.pt"
            save_file({"module": module, **content}, checkpoint / name)
    pointers = {LATEST: checkpoint.name, TRACKER_NAME: str(iteration)}
    if len(state.kinds) > 1:
        writer.write_universal(checkpoint / "zero")
        if style == "legacy":
            save_file({"module": None, **content}, checkpoint / _STAGE_3)
        pointers[LATEST_UNIVERSAL] = checkpoint.name
    for name, value in pointers.items():
        write_atomically(directory / name, value.encode())
    notes = _notes(state, layout, style)
    if len(state.kinds) > 1:
        notes += loss_scaler_note(progress, state.settings, dtype)
    return notes


class _Writer:
    """Writer of one model's files."""

    def __init__(
        self, state: ModelState, shape: ModelShape, layout: Layout, style: str, dtype: torch.dtype
    ) -> None:
        self._state, self._shape, self._layout = state, shape, layout
        self._style, self._dtype = style, dtype
        self._packing = Packing(shape, layout.tensor)
        self._functions = int(_of_bigscience(shape))

    def write_layers(self, directory: Path) -> None:
        """Write the files of a pipeline's layers, one layer in memory at a time."""
        layers: dict[int, dict[str, str]] = {}
        for name in self._state.parameters:
            layer, inside = pipeline_place(name, self._shape.num_layers, self._functions)
            layers.setdefault(layer, {})[inside] = name
        for layer, names in layers.items():
            shares = {inside: self._shares(name) for inside, name in names.items()}
            for rank in range(self._layout.tensor):
                held = {inside: parts[rank] for inside, parts in shares.items()}
                save_file(held, directory / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")

    def module(self, rank: int) -> dict[str, Any]:
        """Return the weights of one rank, without a pipeline."""
        return nested(
            {deepspeed_name(name): self._shares(name)[rank] for name in self._state.parameters}
        )

    def write_universal(self, directory: Path) -> None:
        """Write the parameters, one at a time, as DeepSpeed converts them from any layout."""
        progress = self._state.progress
        step = (progress.optimizer_step or progress.iteration) if progress else 0
        # An integer for DeepSpeed's Adam, whose kernels take one, and a tensor for torch's.
        counter = torch.tensor(step)
        packing = Packing(self._shape, 1)
        for name in self._state.parameters:
            place = directory / universal_name(
                *(name, self._shape.num_layers),
                style=self._style,
                tied=self._shape.tied,
                functions=self._functions,
            )
            place.mkdir(parents=True)
            for kind in (WEIGHT, *ADAM):
                tensor = self._state.read(name, kind).float()
                # DeepSpeed's own have no rows of padding; without these the losses would differ.
                (whole,) = padded_parts(packing, name, tensor)
                content = {"param": separate(whole), **self._joined(name)}
                save_file(content, place / f"{'fp32' if kind == WEIGHT else kind}.pt")
            save_file(counter, place / "step.pt")
        # Settings of the optimizer stay the run's own, but for the number of updates.
        groups = [{"step": step, "params": []} for _ in range(_GROUPS)]
        saved = {
            "ds_version": _VERSION,
            "param_groups": groups,
            # With ZeRO-3 this is the count of all groups: as a tensor they would share it, and each
            # would increase it.
            "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups[:1]},
            **loss_scaler(progress, self._state.settings, self._dtype),
        }
        save_with_scaler(saved, directory / "optimizer_state.pt")

    def content(self, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """Return the content of a rank's file besides its weights."""
        progress, shape = self._state.progress, self._shape
        samples = progress.consumed_samples if progress else 0
        schedule = schedule_content(progress).get("opt_param_scheduler")
        iteration = progress.iteration if progress else 0
        tokens = samples * _sample_length(self._state)
        args = vars(run_arguments(self._state, shape, tokenizer, self._layout, self._dtype)) | {
            "normalization": shape.normalization.lower(),
            "num_key_value_heads": shape.num_query_groups,
            "rope_theta": shape.rotary_base,
            "consumed_train_tokens": tokens,
            "no_pipeline_parallel": self._style == "legacy",
            "deepspeed": True,
            "mos": False,
            "kd": False,
            "num_experts": [1],
        }
        return {
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": None,
            "frozen_param_shapes": None,
            "shared_params": {},
            "frozen_param_fragments": None,
            "lr_scheduler": schedule,
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": 0,
            "global_steps": iteration,
            "global_samples": samples,
            "dp_world_size": 1,
            "mp_world_size": self._layout.tensor * self._layout.pipeline,
            "ds_config": {},
            "ds_version": _VERSION,
            "args": argparse.Namespace(**args),
            "checkpoint_version": VERSION,
            "iteration": iteration,
            "tokens": tokens,
            "universal_checkpoint_info": {
                "universal_checkpoint_version": _UNIVERSAL_VERSION,
                "original_vocab_size": self._tokens,
                "padded_vocab_size": shape.padded_vocab_size,
            },
        }

    @property
    def _tokens(self) -> int:
        """Number of tokens without padding rows."""
        return self._state.vocab_size or self._state.shape.padded_vocab_size

    def _shares(self, name: str) -> list[Tensor]:
        """Return the weights of all ranks, each with separate memory."""
        parts = padded_parts(self._packing, name, self._state.read(name))
        return [separate(cast(name, part, self._dtype)) for part in parts]

    def _joined(self, name: str) -> dict[str, Any]:
        """Return DeepSpeed's rule by which ranks of tensor parallelism divide a parameter."""
        dim = self._packing.split_dim(name)
        if dim is None:
            return {}
        if name in vocabulary_parameters(self._shape):
            return {"cat_dim": dim, "vocab_tensor": True}
        gated = self._shape.gated and ".feed_forward.up" in name
        return {"cat_dim": dim, **({"param_n_sub_params": 2} if gated else {})}


def _of_bigscience(shape: ModelShape) -> bool:
    """Return True if only BigScience's Megatron-DeepSpeed has a model."""
    return shape.alibi or shape.embed_layernorm or bool(shape.glu_activation)


def _check(shape: ModelShape, layout: Layout, style: str) -> None:
    """Raise a `CheckpointError` if Megatron-DeepSpeed has no such model or layout."""
    missing = {
        "scaled rotary embeddings": shape.rope_scaling_factor != 1.0,
        "biases of queries, keys and values alone": shape.add_qkv_bias
        and not shape.add_bias_linear,
    }
    for what, there in missing.items():
        if there:
            raise CheckpointError(
                "Megatron-DeepSpeed does not have this model",
                why=f"it has {what}",
                hint="Megatron-LM has it: `--to megatron`",
            )
    if layout.virtual > 1:
        raise CheckpointArgumentError(
            "the checkpoint cannot be written in this layout",
            why="DeepSpeed's pipelines are not interleaved",
            hint="leave `--num-virtual-stages-per-pipeline-rank` out",
        )
    if style == "legacy" and layout.pipeline > 1:
        raise CheckpointArgumentError(
            "the checkpoint cannot be written in this layout",
            why=f"the names `{style}` are of a model without a pipeline",
            hint="leave `--megatron-names` or `--pipeline-model-parallel-size` out",
        )
    layout.check(shape)


def _sample_length(state: ModelState) -> int:
    """Return the number of tokens of a training sample; the model's positions if not recorded."""
    length = state.settings.get("seq_length")
    return length if isinstance(length, int) else state.shape.max_position_embeddings


def _token_notes(state: ModelState) -> list[str]:
    """Return a note if the number of tokens that the run consumed is not known for sure."""
    if state.progress is None or not state.progress.iteration:
        return []
    what, length = "the number of consumed tokens is not known", _sample_length(state)
    if recorded_samples(state) is None:
        where = "where it counts them (`--train-tokens`, `--lr-decay-tokens`)"
        return [f"{what}: 0 is written, from which Megatron-DeepSpeed counts on {where}"]
    if "seq_length" in state.settings:
        return []
    why = "as the checkpoint does not record `--seq-length`"
    return [f"{what}, {why}: it is written for samples of {length:,} tokens, the model's positions"]


def _notes(state: ModelState, layout: Layout, style: str) -> list[str]:
    notes = activation_notes(state.shape, program="Megatron-DeepSpeed")
    if _of_bigscience(state.shape):
        notes.append("of the forks of Megatron-DeepSpeed only BigScience's has this model")
    notes += vocabulary_notes(state, layout.tensor, program="Megatron-DeepSpeed")
    optimizer = len(state.kinds) > 1
    _, rows = vocabulary_rows(state, layout.tensor)
    if optimizer and rows > (state.vocab_size or rows):
        more = "" if style == "pipeline" else ", with ZeRO 1 or 2 to as many"
        notes.append(
            f"the universal checkpoint has {rows} rows of the vocabulary: Megatron-DeepSpeed has "
            f"to pad it to as many{more} or more"
        )
    notes += _token_notes(state)
    pipeline = "" if style == "pipeline" else " --no-pipeline-parallel"
    if optimizer:
        notes.append(
            f"start Megatron-DeepSpeed with `--universal-checkpoint --no-load-rng{pipeline}`; "
            f"without the state of Adam, with `--finetune{pipeline}`"
        )
    else:
        notes.append(f"start Megatron-DeepSpeed with `--finetune{pipeline}`")
    return notes
