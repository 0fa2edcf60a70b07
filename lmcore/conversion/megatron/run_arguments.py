"""Arguments of a run, notes and numbers of rows that both of Megatron's written formats share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.config.derived.model_math import (
    USUAL_MULTIPLE,
    pad_vocab_size,
    vocabulary_multiple,
)
from lmcore.conversion.megatron.arguments import architecture_arguments
from lmcore.conversion.megatron.schedule import schedule_arguments
from lmcore.errors import counted
from lmcore.model.parameters import ROW_FOR_EACH_TOKEN

if TYPE_CHECKING:
    from lmcore.conversion.megatron.layout import Layout
    from lmcore.conversion.state import ModelState
    from lmcore.data.tokenizer import Tokenizer
    from lmcore.model.shape import ModelShape

__all__ = [
    "VERSION",
    "activation_notes",
    "directory_name",
    "padded",
    "run_arguments",
    "start_notes",
    "tracked_name",
    "vocabulary_notes",
    "vocabulary_rows",
]

VERSION = 3.0
"""Value of `checkpoint_version`."""


def directory_name(state: ModelState) -> str:
    """Return the name of the checkpoint's directory, `iter_XXXXXXX` or `release`.

    Args:
        state: Model to write.
    """
    progress = state.progress
    return "release" if progress is None else f"iter_{progress.iteration:07d}"


def tracked_name(state: ModelState) -> bytes:
    """Return the content of `latest_checkpointed_iteration.txt`.

    Args:
        state: Model to write.
    """
    progress = state.progress
    return b"release" if progress is None else str(progress.iteration).encode()


def padded(name: str, tensor: Tensor, rows: int) -> Tensor:
    """Return a tensor, with further rows of 0 if it is an embedding.

    Args:
        name: Name of the parameter in lmcore.
        tensor: Tensor of the parameter.
        rows: Number of rows of the embeddings.
    """
    missing = rows - tensor.shape[0] if name in ROW_FOR_EACH_TOKEN else 0
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def vocabulary_rows(state: ModelState, ranks: int) -> tuple[int, int]:
    """Return Megatron's `--make-vocab-size-divisible-by` and the number of rows for *ranks*.

    The rows of the checkpoint are kept if they can be divided; otherwise there are more.

    Args:
        state: Model to write.
        ranks: Number of ranks of tensor parallelism.
    """
    rows = state.shape.padded_vocab_size
    tokens = state.vocab_size or rows
    if rows % ranks:
        rows = pad_vocab_size(rows, divisible_by=USUAL_MULTIPLE, tensor_parallel_size=ranks)
    return vocabulary_multiple(tokens, rows, tensor_parallel_size=ranks), rows


def vocabulary_notes(state: ModelState, ranks: int, *, program: str = "Megatron") -> list[str]:
    """Return what the user of Megatron should know of the rows of the vocabulary.

    Args:
        state: Model that was written.
        ranks: Number of ranks of tensor parallelism.
        program: Name of the program that loads the checkpoint.
    """
    multiple, rows = vocabulary_rows(state, ranks)
    notes = []
    added = rows - state.shape.padded_vocab_size
    if added:
        are = "is" if added == 1 else "are"
        notes.append(
            f"{counted(added, 'row')} of 0 {are} added to the vocabulary, for {ranks} ranks: "
            "losses differ, since the softmax includes them"
        )
    if multiple != USUAL_MULTIPLE:
        notes.append(f"start {program} with `--make-vocab-size-divisible-by {multiple}`")
    return notes


def run_arguments(
    state: ModelState,
    shape: ModelShape,
    tokenizer: Tokenizer | None,
    layout: Layout,
    dtype: torch.dtype,
) -> argparse.Namespace:
    """Return the arguments of a run of Megatron that would write a checkpoint of *state*.

    Args:
        state: Model to write.
        shape: Shape with the number of rows that are written.
        tokenizer: Tokenizer of the model; None: it is not known.
        layout: Parallel layout.
        dtype: Dtype of the weights.
    """
    parts = layout.virtual
    progress = state.progress
    multiple, _ = vocabulary_rows(state, layout.tensor)
    arguments = (
        architecture_arguments(shape)
        | {name: value for name, value in state.settings.items() if name != "precision"}
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
            "make_vocab_size_divisible_by": multiple,
            "true_vocab_size": state.vocab_size,
            **_tokenizer_arguments(state, tokenizer),
        }
    )
    return argparse.Namespace(**arguments)


def _tokenizer_arguments(state: ModelState, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the arguments of Megatron that name the tokenizer."""
    if tokenizer is None:
        return {"tokenizer_type": state.tokenizer_type}
    size = tokenizer.describe().get("vocab_size")
    return {"tokenizer_type": tokenizer.name, **({} if size is None else {"vocab_size": size})}


def activation_notes(shape: ModelShape, *, program: str = "Megatron") -> list[str]:
    """Return a note if Megatron computes another activation than lmcore.

    Its fused kernel, lmcore's tanh approximation of GELU, needs a bias.

    Args:
        shape: Shape of the model.
        program: Name of the program that loads the checkpoint.
    """
    if shape.swiglu or shape.add_bias_linear:
        return []
    note = (
        f"without biases {program} computes GELU exactly (`--no-bias-gelu-fusion`), lmcore its "
        "tanh approximation: losses differ slightly"
    )
    return [note]


def start_notes(state: ModelState, layout: Layout, flags: str, *, optimizer: bool) -> list[str]:
    """Return what the user of Megatron should know.

    Args:
        state: Model that was written.
        layout: Parallel layout.
        flags: Flags with which Megatron reads the format.
        optimizer: True if the state of the optimizer was written.
    """
    notes = activation_notes(state.shape) + vocabulary_notes(state, layout.tensor)
    scheduled = state.progress is not None and state.progress.schedule is not None
    if optimizer and not scheduled:
        notes.append("Megatron loads an optimizer with its schedule only, which is not known here")
    loaded = "--no-load-optim"
    if optimizer and scheduled:
        loaded = "--use-checkpoint-opt_param-scheduler"
    notes.append(f"start Megatron with `--use-checkpoint-args {flags} {loaded} --no-load-rng`")
    return notes
