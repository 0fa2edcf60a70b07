"""Vocabulary rows of a checkpoint for Megatron, padded so that all ranks have the same number."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmcore.base.errors import counted
from lmcore.model.family import vocabulary_parameters
from lmcore.model.vocabulary import USUAL_MULTIPLE, pad_vocab_size, vocabulary_multiple

if TYPE_CHECKING:
    from lmcore.conversion.megatron.parameters.packing import Packing
    from lmcore.conversion.state import ModelState
    from lmcore.model.shape import ModelShape

__all__ = ["padded_parts", "padded_shape", "vocabulary_notes", "vocabulary_rows"]


def padded_shape(state: ModelState, ranks: int) -> ModelShape:
    """Return the shape of a model with the number of rows of the vocabulary for *ranks*.

    Args:
        state: Model to write.
        ranks: Number of ranks of tensor parallelism.
    """
    _, rows = vocabulary_rows(state, ranks)
    return dataclasses.replace(state.shape, padded_vocab_size=rows)


def padded_parts(packing: Packing, name: str, tensor: Tensor) -> list[Tensor]:
    """Return the parts of all ranks of a tensor, with further rows of 0 if it is an embedding.

    Args:
        packing: Rules that split tensors, with the shape of `padded_shape`.
        name: Name of the parameter in lmcore.
        tensor: Tensor of the parameter.
    """
    rows = packing.shape.padded_vocab_size
    has_rows = name in vocabulary_parameters(packing.shape)
    missing = rows - tensor.shape[0] if has_rows else 0
    if missing:
        tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
    return packing.split(name, tensor)


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
    """Return notes about the rows of the vocabulary for the user of Megatron.

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
