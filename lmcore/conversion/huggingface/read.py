"""`HuggingFaceState`: a model in a Hugging Face directory, under lmcore's names."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lmcore.conversion.huggingface.directory import CONFIG_NAME, unread_notes
from lmcore.conversion.huggingface.recipes import UNUSED, recipes_of
from lmcore.conversion.huggingface.saved_config import read_config
from lmcore.conversion.huggingface.tokenizer_files import tokenizer_settings
from lmcore.conversion.huggingface.weights import WeightFiles, Weights
from lmcore.conversion.state import WEIGHT, ModelState, require_no_problems

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["HuggingFaceState"]


class HuggingFaceState(ModelState):
    """Model in a Hugging Face directory; see `ModelState`."""

    format = "Hugging Face"

    def __init__(self, path: Path, *, weights: Weights | None = None, compare: bool = True) -> None:
        """Read configuration and headers of the weight files, and compare them.

        Args:
            path: Directory with `config.json` and the weights.
            weights: Weights of another format, under the names of transformers; None: the files
                in *path*.
            compare: True to compare the checksums of files that are read.

        Raises:
            CheckpointError: A file is missing or damaged, lmcore does not have the model, or the
                weights are not the configuration's.
        """
        self.path = path
        config = read_config(path)
        self._files: Weights = weights or WeightFiles(path, compare=compare)
        self.tokenizer = tokenizer_settings(path)
        self.notes = config.notes if weights else (*config.notes, *unread_notes(path))
        rows = self._rows(config.shape.padded_vocab_size)
        self.shape = dataclasses.replace(config.shape, padded_vocab_size=rows)
        self.vocab_size = config.shape.padded_vocab_size
        self._recipes = recipes_of(
            config.model_type, self.shape, attention_bias_only=config.attention_bias_only
        )
        self._names = self._matched()

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

    def _rows(self, stated: int) -> int:
        """Return the rows of the embedding, which may be more than the configuration's tokens."""
        for name, tensor in self._files.tensors.items():
            if name.endswith(("wte.weight", "embed_tokens.weight")) and len(tensor.shape) == 2:
                return tensor.shape[0]
        return stated

    def _matched(self) -> dict[str, str]:
        """Return the name in the files of each tensor that the recipes need.

        Files of a model without its head have no `transformer.` or `model.` before their names.

        Raises:
            CheckpointError: Tensors are missing or surplus, or have another shape.
        """
        stored = self._files.tensors
        needed = {
            source: shape
            for recipe in self._recipes.values()
            for source, shape in recipe.sources.items()
        }
        names = {}
        for source in needed:
            bare = source.partition(".")[2]
            names[source] = source if source in stored or bare not in stored else bare
        problems = [
            f"`{source}` is missing" for source, name in names.items() if name not in stored
        ]
        used = set(names.values())
        tied = {"lm_head.weight"} if self.shape.tied else set()
        problems += [
            f"`{name}` is not part of such a model"
            for name in stored
            if name not in used and name not in tied and not name.endswith(UNUSED)
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
