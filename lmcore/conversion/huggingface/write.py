"""Writing of a Hugging Face directory: `config.json`, safetensors files and tokenizer files.

Safetensors files written tensor by tensor.

The `safetensors` library writes a file from tensors that are all in memory; here their dtypes and
shapes are known first, so that one at a time is enough.  A file is the length of its header (8
bytes, little-endian), the header in JSON with the byte range of each tensor, and the tensors.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from lmcore.base.errors import CheckpointError, counted
from lmcore.base.threads import read_ahead
from lmcore.checkpoint.files.synced_file import SyncedFile
from lmcore.conversion.cast import cast
from lmcore.conversion.huggingface.directory import CONFIG_NAME, INDEX_NAME, SINGLE_NAME
from lmcore.conversion.huggingface.read import HuggingFaceState
from lmcore.conversion.huggingface.recipes import recipes_of
from lmcore.conversion.huggingface.tokenizer_files import write_tokenizer
from lmcore.conversion.other_formats import other_formats
from lmcore.data.tokenizer import special_ids
from lmcore.data.tokenizer.pretrained.chat_files import end_tokens
from lmcore.model.architecture import Architecture, architectures_for
from lmcore.model.family import family_of, vocabulary_parameters
from lmcore.model.shape import ModelShape

if TYPE_CHECKING:
    from torch import Tensor

    from lmcore.conversion.recipe import Recipe
    from lmcore.conversion.state import ModelState
    from lmcore.data.tokenizer import Tokenizer


__all__ = [
    "SafetensorsWriter",
    "architecture_of",
    "config_of",
    "model_type_of",
    "shards",
    "write_huggingface",
]


def architecture_of(shape: ModelShape) -> Architecture:
    """Return the architecture of transformers that computes the same as a model of lmcore.

    Raises:
        CheckpointError: There is none.
    """
    different = {}
    for kind in architectures_for(shape):
        found = kind.differences(shape) if kind.differences is not None else []
        if not found:
            return kind
        different[kind.model_type] = (", ".join(found), kind.hint)
    what = "no supported architecture of transformers computes the same as this model"
    if not different:
        why = f"lmcore knows none for the family {family_of(shape).name}"
        raise CheckpointError(what, why=why, hint=other_formats(shape))
    raise CheckpointError(
        what,
        why="\n".join(f"not `{name}`: it has {listed}" for name, (listed, _) in different.items()),
        hint=f"{next(hint for _, hint in different.values())}; {other_formats(shape)}",
    )


def model_type_of(shape: ModelShape) -> str:
    """Return the `model_type` of `architecture_of`."""
    return architecture_of(shape).model_type


def config_of(
    shape: ModelShape, *, dtype: str, eos: int | None, bos: int | None, pad: int | None = None
) -> dict[str, Any]:
    """Return the `config.json` of a model.

    Args:
        shape: Shape of the model, with as many rows of the embedding as are written.
        dtype: Dtype of the weights.
        eos: Token that ends a text; None: the tokenizer has none.
        bos: Token that begins a text; None: the tokenizer has none.
        pad: Padding; None: the tokenizer has none.
    """
    kind = architecture_of(shape)
    common = {
        "architectures": [kind.class_name(shape)],
        "model_type": kind.model_type,
        "torch_dtype": dtype,
        "vocab_size": shape.padded_vocab_size,
        "initializer_range": shape.init_method_std,
        "tie_word_embeddings": shape.tied,
    }
    if kind.generates:
        common |= {"bos_token_id": bos, "eos_token_id": eos, "use_cache": True}
    if kind.begins_decoder:
        common |= _decoder_tokens(eos, bos, pad)
    return common | kind.write(shape)


def _decoder_tokens(eos: int | None, bos: int | None, pad: int | None) -> dict[str, int]:
    """Return the tokens of an encoder with a decoder by their names in the files.

    Without a tokenizer they are T5's: padding, id 0, begins the decoder's text, and 1 ends it.
    """
    pad = 0 if pad is None else pad
    return {
        "decoder_start_token_id": pad if bos is None else bos,
        "eos_token_id": 1 if eos is None else eos,
        "pad_token_id": pad,
    }


_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_ALIGNMENT = 8


class SafetensorsWriter:
    """One file, to which the tensors of its header are appended in order, synced at its end."""

    def __init__(
        self, path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
    ) -> None:
        """Write the header.

        Args:
            path: Path of the new file.
            shapes: Shape of each tensor, by name, in the order of `write`.
            dtype: Dtype of all tensors.

        Raises:
            OSError: The file system refuses.
        """
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        start = 0
        for name, shape in shapes.items():
            end = start + math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [start, end],
            }
            start = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._left = list(shapes.items())
        self._dtype = dtype
        self._stream = SyncedFile(path)
        self._stream.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: Tensor) -> None:
        """Append the next tensor of the header, in the file's dtype.

        Raises:
            CheckpointError: Values would become infinite.
            OSError: The file system refuses.
        """
        expected, shape = self._left.pop(0)
        assert (name, tuple(tensor.shape)) == (expected, shape), f"`{expected}` {shape} is next"
        content = cast(name, tensor, self._dtype).contiguous().flatten().view(torch.uint8)
        self._stream.write(content.numpy().data)
        self._stream.check()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Sync and close the file, which has all tensors."""
        self._stream.__exit__(kind, error, trace)
        assert kind is not None or not self._left, f"`{self._left[0][0]}` was not written"


def shards(sizes: Mapping[str, int], largest: int) -> list[list[str]]:
    """Return the names of the tensors of each file, in order.

    Args:
        sizes: Bytes of each tensor, by name.
        largest: Largest size of a file in bytes, which only a single tensor may exceed.
    """
    found: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not found or size > room:
            found.append([])
            room = largest
        found[-1].append(name)
        room -= size
    return found


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
    tokens = _text_tokens(kind, tokenizer)
    name = str(dtype).removeprefix("torch.")
    _write_json(directory / CONFIG_NAME, config_of(shape, dtype=name, **tokens))
    generation: dict[str, Any] = _generation_config(kind, **tokens)
    more = end_tokens(tokenizer) - {tokens["eos"]} if tokenizer is not None else frozenset()
    if generation and more and not kind.begins_decoder:
        generation["eos_token_id"] = [tokens["eos"], *sorted(more)]
    # The tokenizer's copy stays: a chat model may end its texts with several tokens.
    if generation and not (directory / "generation_config.json").exists():
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


def _text_tokens(kind: Architecture, tokenizer: Tokenizer | None) -> dict[str, int | None]:
    """Return the tokens that end and begin a text, and pad one, by the arguments of `config_of`."""
    if tokenizer is None:
        return {"eos": None, "bos": None}
    special = special_ids(tokenizer)
    if kind.begins_decoder:
        return {"eos": special.eos, "bos": special.bos, "pad": special.pad}
    return {"eos": tokenizer.eod, "bos": tokenizer.eod if special.bos is None else special.bos}


def _generation_config(
    kind: Architecture, *, eos: int | None, bos: int | None, pad: int | None = None
) -> dict[str, int]:
    """Return the content of `generation_config.json`; empty: there is no such file."""
    if kind.begins_decoder:
        return _decoder_tokens(eos, bos, pad)
    if not kind.generates or eos is None:
        return {}
    return {"bos_token_id": bos if bos is not None else eos, "eos_token_id": eos}


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
