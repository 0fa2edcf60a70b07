"""`HuggingFaceState`: a model in a Hugging Face directory, under lmcore's names."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.errors import CheckpointArgumentError, CheckpointError, several
from lmcore.conversion.huggingface.directory import CONFIG_NAME, unread_notes
from lmcore.conversion.huggingface.recipes import recipes_of, token_embedding
from lmcore.conversion.huggingface.tokenizer_files import tokenizer_settings, unread_tokens
from lmcore.conversion.huggingface.weights import WeightFiles, Weights
from lmcore.conversion.state import WEIGHT, ModelState, require_no_problems
from lmcore.conversion.unread import buffer_difference, same_values
from lmcore.families.saved_shape import read_shape
from lmcore.model.architecture import Architecture, ConfigReader, architectures
from lmcore.model.shape import ModelShape

if TYPE_CHECKING:
    from torch import Tensor

    from lmcore.model.shape import ModelShape


__all__ = [
    "HFConfig",
    "HuggingFaceState",
    "read_config",
]

_MAX_BYTES = 16 * 1024 * 1024
_COPY = "download or copy the file again"
_HINT = "convert it with the program that it belongs to, or use a supported model"


@dataclass(frozen=True)
class HFConfig:
    """Model described by a `config.json`.

    Attributes:
        architecture: Architecture of transformers.
        shape: Shape of the model.
        notes: Differences between the model and lmcore's, for the user.
        zeros: Pattern of the names of parameters that are 0; see `ConfigReader`.
    """

    architecture: Architecture
    shape: ModelShape
    notes: tuple[str, ...] = ()
    zeros: str = ""


def read_config(directory: Path) -> HFConfig:
    """Read the `config.json` of *directory*.

    Raises:
        CheckpointError: It is missing or damaged, or lmcore does not have the architecture.
    """
    path = directory / CONFIG_NAME
    try:
        config = json.loads(read_bounded_file(path, _MAX_BYTES))
    except OSError as error:
        raise CheckpointArgumentError(
            f"cannot read `{path}`",
            why=error.strerror or str(error),
            hint=f"give the directory that has the model's `{CONFIG_NAME}`",
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"`{path}` is not JSON", why=str(error), hint=_COPY) from None
    if not isinstance(config, dict):
        why = "it is no object"
        raise CheckpointError(f"`{path}` is not a model configuration", why=why, hint=_COPY)
    name, known = config.get("model_type"), architectures()
    if not isinstance(name, str) or name not in known:
        listed = ", ".join(f"`{one}`" for one in sorted(known))
        raise CheckpointError(
            f"lmcore has no model of type `{name!s:.80}`",
            why=f"`{path}` names it; supported are {listed}",
            hint=_HINT,
        )
    reader, kind = ConfigReader(path, config), known[name]
    _require_plain(reader, kind)
    values = kind.read(reader)
    return HFConfig(kind, _shape(path, values), tuple(reader.notes), reader.zeros)


def _require_plain(reader: ConfigReader, kind: Architecture) -> None:
    """Refuse quantized weights, and a model for another task."""
    settings = reader.config.get("quantization_config")
    if settings is not None:
        method = settings.get("quant_method") if isinstance(settings, Mapping) else None
        raise CheckpointError(
            f"the weights of `{reader.path.parent}` are quantized",
            why=f"`{reader.path.name}` has `quantization_config` (`{method}`)",
            hint="load the model that was quantized",
        )
    named = reader.config.get("architectures")
    for name in named if isinstance(named, list) else ():
        if isinstance(name, str) and kind.other_classes.fullmatch(name):
            raise reader.unsupported(f"it is a `{name}`, not {kind.purpose}")


def _shape(path: Path, values: Mapping[str, object]) -> ModelShape:
    try:
        return read_shape(values, path.parent)
    except CheckpointError as error:
        error.what, error.hint = f"`{path}` describes no model", _COPY
        raise


class HuggingFaceState(ModelState):
    """Model in a Hugging Face directory; see `ModelState`.

    As in transformers, an output layer that is tied by the configuration, and whose values in the
    files are other ones, is not tied.
    """

    format = "Hugging Face"

    def __init__(
        self,
        path: Path,
        *,
        weights: Weights | None = None,
        weights_only: bool = False,
        compare: bool = True,
    ) -> None:
        """Read configuration and headers of the weight files, and compare them.

        Args:
            path: Directory with `config.json` and the weights.
            weights: Weights of another format, under the names of transformers; None: the files
                in *path*.
            weights_only: Without effect: a model has weights alone.
            compare: True to compare the checksums of files that are read.

        Raises:
            CheckpointError: A file is missing or damaged, lmcore does not have the model, or the
                weights are not the configuration's.
        """
        del weights_only
        self.path = path
        config = read_config(path)
        self._files: Weights = weights or WeightFiles(path, compare=compare)
        self.tokenizer = tokenizer_settings(path)
        read = {tensor.file for tensor in self._files.tensors.values()}
        self.notes = config.notes if weights else (*config.notes, *unread_notes(path, read))
        self._kind = config.architecture
        described = self._kind.with_tensors(config.shape, self._files.tensors)
        self._embedding = token_embedding(self._kind, described)
        tied = described.tied and not self._has_other_head()
        self.shape = dataclasses.replace(
            described,
            padded_vocab_size=self._rows(described),
            untie_embeddings_and_output_weights=not tied,
        )
        if tied != described.tied:
            note = (
                f"`{self._kind.head}` differs from `{self._stored(self._embedding)}`: the output "
                f"layer has its own weights, as in transformers, though `{CONFIG_NAME}` ties them "
                "(`tie_word_embeddings`)"
            )
            self.notes = (*self.notes, note)
        self.vocab_size = described.padded_vocab_size
        self._recipes = recipes_of(self._kind.model_type, self.shape, zeros=config.zeros)
        self._names = self._matched()
        self.notes = (*self.notes, *self._ignored_notes(), *self._buffer_notes())
        self.notes = (*self.notes, *unread_tokens(path, self.tokenizer))

    def dtype(self, name: str, kind: str = WEIGHT) -> torch.dtype:
        """Return the dtype of a weight; see `ModelState`."""
        assert kind == WEIGHT, "the format has no optimizer state"
        names = [self._names[source] for source in self._recipes[name].sources]
        dtypes = [dtype for one in names if (dtype := self._files.tensors[one].dtype) is not None]
        return functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32

    def read(self, name: str, kind: str = WEIGHT) -> Tensor:
        """Return a whole weight; see `ModelState`."""
        dtype = self.dtype(name, kind)
        recipe = self._recipes[name]
        parts = [self._files.read(self._names[one]).to(dtype) for one in recipe.sources]
        return recipe.join(parts).contiguous()

    def _stored(self, name: str) -> str:
        """Return the name in the files of a tensor, which may be another spelling."""
        spellings = self._kind.spellings(name)
        return next((one for one in spellings if one in self._files.tensors), name)

    def _has_other_head(self) -> bool:
        """Return True if the files have an output layer with other values than the embedding."""
        head = self._kind.head
        held = {head, self._stored(self._embedding)} <= self._files.tensors.keys()
        return held and not self._is_copy(head, self._embedding)

    def _is_copy(self, copy: str, original: str) -> bool:
        """Return True if two tensors of the files have the same values."""
        names = (copy, self._stored(original))
        if len({self._files.tensors[one].shape for one in names}) > 1:
            return False
        return same_values(*(self._files.read(one) for one in names))

    def _rows(self, shape: ModelShape) -> int:
        """Return the rows of the embedding, which may be more than the configuration's tokens."""
        for name in (self._stored(self._embedding), *self._kind.copies):
            tensor = self._files.tensors.get(name)
            if tensor is not None and len(tensor.shape) == 2:
                # Fewer rows than tokens are a fault, which the comparison of shapes names.
                return max(tensor.shape[0], shape.padded_vocab_size)
        return shape.padded_vocab_size

    def _buffer_notes(self) -> list[str]:
        """Return a note about buffers in the files that differ from the model's own."""
        different: dict[str, list[str]] = {}
        for name in self._files.tensors:
            if self._kind.buffers.fullmatch(name):
                difference = buffer_difference(name, self._files.read(name), self.shape)
                if difference is not None:
                    different.setdefault(difference, []).append(name)
        return [
            f"not read, as by transformers: {several(names)} {difference}"
            for difference, names in different.items()
        ]

    def _ignored_notes(self) -> list[str]:
        """Return a note about tensors that the model has no use for."""
        used = set(self._names.values())
        names = [name for name in self._files.tensors if self._is_ignored(name, used)]
        return [f"not read: the model does not use {several(names)}"] if names else []

    def _is_ignored(self, name: str, used: Collection[str]) -> bool:
        ignored = self._kind.ignored
        return name not in used and ignored is not None and bool(ignored.fullmatch(name))

    def _matched(self) -> dict[str, str]:
        """Return the name in the files of each tensor that the recipes need.

        A tensor that others are tied to may be stored under the name of one of these alone.

        Raises:
            CheckpointError: Tensors are missing or surplus, or have another shape.
        """
        stored = self._files.tensors
        needed = {
            source: shape
            for recipe in self._recipes.values()
            for source, shape in recipe.sources.items()
        }
        names = {source: self._stored(source) for source in needed}
        copies = {
            copy: original
            for copy, original in self._kind.copies.items()
            if copy in stored and (self.shape.tied or copy != self._kind.head)
        }
        names |= {
            original: copy for copy, original in copies.items() if names[original] not in stored
        }
        problems = [
            f"`{source}` is missing" for source, name in names.items() if name not in stored
        ]
        problems += [
            f"`{copy}` differs from `{names[original]}`, which the model has in its place"
            for copy, original in copies.items()
            if copy not in {names[original], self._kind.head}  # another head is read, not a fault
            and not self._is_copy(copy, original)
        ]
        used = {*names.values(), *copies}
        problems += [
            f"`{name}` is not part of such a model"
            for name in stored
            if name not in used
            and not self._kind.buffers.fullmatch(name)
            and not self._is_ignored(name, used)
        ]
        for source, name in names.items():
            if name in stored and stored[name].shape != needed[source]:
                found, expected = list(stored[name].shape), list(needed[source])
                problems.append(f"`{name}` has shape {found} instead of {expected}")
            elif name in stored and stored[name].dtype is None:
                problems.append(f"`{name}` is quantized or has no floating-point values")
        require_no_problems(
            self.path,
            problems,
            description=f"its `{CONFIG_NAME}`",
            hint="download or copy the directory again",
        )
        return names
