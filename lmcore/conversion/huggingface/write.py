"""Writing of a Hugging Face directory: `config.json`, safetensors files and tokenizer files."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lmcore.base.errors import counted
from lmcore.base.threads import read_ahead
from lmcore.conversion.huggingface.directory import CONFIG_NAME, INDEX_NAME, SINGLE_NAME
from lmcore.conversion.huggingface.read import HuggingFaceState
from lmcore.conversion.huggingface.recipes import recipes_of
from lmcore.conversion.huggingface.safetensors_writer import SafetensorsWriter, shards
from lmcore.conversion.huggingface.tokenizer_files import write_tokenizer
from lmcore.conversion.huggingface.written_config import architecture_of, config_of
from lmcore.model.family import vocabulary_parameters

if TYPE_CHECKING:
    from torch import Tensor

    from lmcore.conversion.recipe import Recipe
    from lmcore.conversion.state import ModelState
    from lmcore.data.tokenizer import Tokenizer

__all__ = ["write_huggingface"]


def write_huggingface(
    state: ModelState,
    directory: Path,
    tokenizer: Tokenizer | None,
    *,
    dtype: torch.dtype = torch.float32,
    largest_file: int = 5 * 10**9,
) -> list[str]:
    """Write a model into *directory* and return notes for the user.

    The rows that pad the vocabulary are left out.

    Args:
        state: Model to write.
        directory: Empty directory.
        tokenizer: Tokenizer of the model; None: no tokenizer files are written.
        dtype: Dtype of the weights: float32, float16 or bfloat16.
        largest_file: Largest size of a weight file in bytes, by default 5 GB, as in transformers.

    Raises:
        CheckpointError: transformers has no such model, or the checkpoint is damaged.
        OSError: The file system refuses.
    """
    rows = state.vocab_size or state.shape.padded_vocab_size
    shape = dataclasses.replace(state.shape, padded_vocab_size=rows)
    kind = architecture_of(shape)
    recipes = recipes_of(kind.model_type, shape)
    shapes = {
        source: size for recipe in recipes.values() for source, size in recipe.sources.items()
    }
    sizes = {name: math.prod(size) * dtype.itemsize for name, size in shapes.items()}
    files = shards(sizes, largest_file)
    names = [SINGLE_NAME]
    if len(files) > 1:
        names = [
            f"model-{number:05d}-of-{len(files):05d}.safetensors"
            for number in range(1, len(files) + 1)
        ]
    tensors = _tensors(state, recipes, rows)
    for name, held in zip(names, files, strict=True):
        with SafetensorsWriter(
            directory / name, {one: shapes[one] for one in held}, dtype
        ) as writer:
            for _ in held:
                writer.write(*next(tensors))
    if len(files) > 1:
        weight_map = {one: name for name, held in zip(names, files, strict=True) for one in held}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        _write_json(directory / INDEX_NAME, index)
    notes = ["no tokenizer files are written: the checkpoint has no tokenizer"]
    if tokenizer is not None:
        notes = write_tokenizer(tokenizer, directory, shape)
    eos = tokenizer.eod if tokenizer is not None else None
    bos = _bos(tokenizer) if tokenizer is not None else None
    name = str(dtype).removeprefix("torch.")
    _write_json(directory / CONFIG_NAME, config_of(shape, dtype=name, eos=eos, bos=bos))
    # The tokenizer's copy stays: a chat model may end its texts with several tokens.
    named = kind.generates and eos is not None
    if named and not (directory / "generation_config.json").exists():
        generation = {"bos_token_id": bos if bos is not None else eos, "eos_token_id": eos}
        _write_json(directory / "generation_config.json", generation)
    if state.vocab_size is None and not isinstance(state, HuggingFaceState):
        notes.append(
            f"all {rows} rows of the vocabulary are written, as the number of tokens is not known: "
            "with a tokenizer (`--tokenizer-type`) rows that pad it are left out"
        )
    if rows != state.shape.padded_vocab_size:
        left = state.shape.padded_vocab_size - rows
        notes.append(
            f"{counted(left, 'row that pads', 'rows that pad')} the vocabulary "
            f"{'is' if left == 1 else 'are'} left out: the softmax of transformers has "
            f"{counted(rows, 'token')}"
        )
    return notes


def _tensors(
    state: ModelState, recipes: dict[str, Recipe], rows: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the foreign tensors in the order of the recipes, two parameters in memory at a time."""
    for name, tensor in read_ahead((name, state.read(name)) for name in recipes):
        recipe = recipes[name]
        kept = tensor[:rows] if name in vocabulary_parameters(state.shape) else tensor
        yield from zip(recipe.sources, recipe.split(kept), strict=True)
        del tensor, kept  # before the next is waited for


def _bos(tokenizer: Tokenizer) -> int | None:
    special = getattr(tokenizer, "special", None)
    return special.bos if special is not None and special.bos is not None else tokenizer.eod


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
