"""Writing of Megatron's rank files, for any number of tensor, pipeline and virtual stages.

`torch.save` needs the whole content of a file in memory, so memory is bounded by the largest file,
one rank's share of the model and of its optimizer, and one tensor.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.conversion.megatron.arguments import architecture_arguments
from lmcore.conversion.megatron.directory import TRACKER_NAME, rank_name
from lmcore.conversion.megatron.layout import Layout
from lmcore.conversion.megatron.names import STYLES
from lmcore.conversion.megatron.optimizer import moments_content
from lmcore.conversion.megatron.packing import Packing
from lmcore.conversion.megatron.schedule import schedule_arguments, schedule_content
from lmcore.conversion.state import WEIGHT
from lmcore.durable import write_atomically

if TYPE_CHECKING:
    from lmcore.conversion.state import ModelState
    from lmcore.data.tokenizer import Tokenizer
    from lmcore.model.shape import ModelShape

__all__ = ["write_megatron"]

_VERSION = 3.0
_WHOLE = Layout()
_ROWS = ("token_embedding.weight", "output_embedding.weight")
_USUAL_MULTIPLE = 128
"""Default of Megatron's `--make-vocab-size-divisible-by`."""


def write_megatron(
    state: ModelState,
    directory: Path,
    tokenizer: Tokenizer | None,
    *,
    layout: Layout = _WHOLE,
    style: str = STYLES[0],
    dtype: torch.dtype = torch.float32,
) -> list[str]:
    """Write a model into *directory* as Megatron's rank files; return what the user should know.

    Args:
        state: Model to write.
        directory: Empty directory.
        tokenizer: Tokenizer of the model, whose name is recorded; None: it is not known.
        layout: Parallel layout.
        style: Set of names, one of `STYLES`.
        dtype: Dtype of the weights: float32, float16 or bfloat16.

    Raises:
        CheckpointError: The model cannot be divided so, or *state* is damaged.
        OSError: The file system refuses.
    """
    layout.check(state.shape)
    multiple, rows = _vocabulary(state, layout.tensor)
    shape = dataclasses.replace(state.shape, padded_vocab_size=rows)
    progress = state.progress
    name = "release" if progress is None else f"iter_{progress.iteration:07d}"
    arguments = _arguments(state, shape, layout, dtype)
    arguments |= {
        "make_vocab_size_divisible_by": multiple,
        "true_vocab_size": state.vocab_size,
        "tokenizer_type": tokenizer.name if tokenizer is not None else None,
    }
    for stage in range(layout.pipeline):
        for rank in range(layout.tensor):
            writer = _Rank(state, shape, layout, style, dtype, rank, stage)
            path = directory / name / rank_name(rank, stage, pipeline=layout.pipeline > 1)
            path.mkdir(parents=True, exist_ok=True)
            content = {"args": argparse.Namespace(**arguments), "checkpoint_version": _VERSION}
            content |= {"iteration": progress.iteration if progress else 0, **writer.content()}
            content |= schedule_content(progress)
            torch.save(content, path / "model_optim_rng.pt")
    iteration = "release" if progress is None else str(progress.iteration)
    write_atomically(directory / TRACKER_NAME, iteration.encode())
    return _notes(state, rows, multiple, style)


class _Rank:
    """Content of one rank's file."""

    def __init__(
        self,
        state: ModelState,
        shape: ModelShape,
        layout: Layout,
        style: str,
        dtype: torch.dtype,
        rank: int,
        stage: int,
    ) -> None:
        self._state, self._shape, self._layout, self._style = state, shape, layout, style
        self._dtype, self._rank, self._stage = dtype, rank, stage
        self._packing = Packing(shape, layout.tensor)

    def content(self) -> dict[str, Any]:
        """Return the model by part, and the state of Adam if there is any."""
        found: dict[str, Any] = {}
        shares = []
        for part in range(self._layout.virtual):
            flat = {}
            for foreign, name in self._layout.parameters(
                self._shape, self._stage, part, self._style
            ):
                share = {kind: self._share(name, kind) for kind in self._state.kinds}
                flat[foreign] = share[WEIGHT].to(self._dtype)
                shares.append(share)
            key = "model" if self._layout.virtual == 1 else f"model{part}"
            found[key] = _nested(flat) if self._style == "legacy" else flat
        if len(self._state.kinds) > 1:
            found["optimizer"] = moments_content(
                shares,
                self._dtype,
                self._state.progress,
                step_of_parameters=self._style != "core",
            )
        return found

    def _share(self, name: str, kind: str) -> Tensor:
        """Return the rank's part of a tensor in float32, with memory of its own."""
        tensor = self._state.read(name, kind).float()
        if name in _ROWS:
            tensor = _with_rows(tensor, self._shape.padded_vocab_size)
        return self._packing.split(name, tensor)[self._rank].clone(
            memory_format=torch.contiguous_format
        )


def _with_rows(tensor: Tensor, rows: int) -> Tensor:
    """Return a tensor with as many rows, further ones 0."""
    missing = rows - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def _nested(flat: dict[str, Tensor]) -> dict[str, Any]:
    """Return the nested mappings of the models before megatron-core.

    The names in the stack of layers stay joined by dots.
    """
    found: dict[str, Any] = {}
    for name, tensor in flat.items():
        prefix, _, inside = name.partition(".encoder.")
        keys = [*prefix.split("."), "encoder"] if inside else name.split(".")[:-1]
        place = found
        for key in keys:
            place = place.setdefault(key, {})
        place[inside or name.split(".")[-1]] = tensor
    return found


def _vocabulary(state: ModelState, ranks: int) -> tuple[int, int]:
    """Return Megatron's `--make-vocab-size-divisible-by` and the number of rows for *ranks*.

    The rows of the checkpoint are kept if they can be divided; otherwise there are more.
    """
    rows = state.shape.padded_vocab_size
    tokens = state.vocab_size or rows
    powers = [_USUAL_MULTIPLE >> shift for shift in range(8)]
    for multiple in (*powers, *range(min(_USUAL_MULTIPLE, rows), 0, -1)):
        step = multiple * ranks
        if -(-tokens // step) * step == rows:
            return multiple, rows
    step = _USUAL_MULTIPLE * ranks
    return _USUAL_MULTIPLE, -(-rows // step) * step


def _arguments(
    state: ModelState, shape: ModelShape, layout: Layout, dtype: torch.dtype
) -> dict[str, Any]:
    parts = layout.virtual
    progress = state.progress
    return (
        architecture_arguments(shape)
        | schedule_arguments(progress)
        | {
            "tensor_model_parallel_size": layout.tensor,
            "pipeline_model_parallel_size": layout.pipeline,
            "virtual_pipeline_model_parallel_size": parts if parts > 1 else None,
            "num_layers_per_virtual_pipeline_stage": (
                shape.num_layers // (layout.pipeline * parts) if parts > 1 else None
            ),
            "world_size": layout.tensor * layout.pipeline,
            "data_parallel_size": 1,
            "context_parallel_size": 1,
            "expert_model_parallel_size": 1,
            "sequence_parallel": False,
            "apply_query_key_layer_scaling": False,
            "data_parallel_random_init": False,
            "phase_transition_iterations": None,
            "use_distributed_optimizer": False,
            "ckpt_format": "torch",
            "params_dtype": dtype,
            "bf16": dtype == torch.bfloat16,
            "fp16": dtype == torch.float16,
            "iteration": progress.iteration if progress else 0,
            "consumed_train_samples": progress.consumed_samples if progress else 0,
            "consumed_valid_samples": 0,
            "skipped_train_samples": 0,
        }
    )


def _notes(state: ModelState, rows: int, multiple: int, style: str) -> list[str]:
    notes = []
    added = rows - state.shape.padded_vocab_size
    if added:
        notes.append(f"{added} rows of 0 are added to the vocabulary, which the ranks divide")
    if multiple != _USUAL_MULTIPLE:
        notes.append(f"start Megatron with `--make-vocab-size-divisible-by {multiple}`")
    layers = {"core-local": " --transformer-impl local", "legacy": " --use-legacy-models"}
    notes.append(
        "start Megatron with `--use-checkpoint-args --ckpt-format torch --no-load-rng"
        f"{layers.get(style, '')}`"
    )
    return notes
