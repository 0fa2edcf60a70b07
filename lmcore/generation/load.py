"""Load a trained model with its tokenizer from a checkpoint, without training state.

A checkpoint may come from anywhere, so its metadata is checked before memory is allocated: the
shape against bounds, the tensors against the shape, the tokenizer against the run's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from lmcore.checkpoint import Manifest, load_checkpoint, num_bytes
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.conversion.native import LmcoreState, require_weights
from lmcore.conversion.state import notes_beside
from lmcore.conversion.tokenizer import NO_CHOICE, tokenizer_of
from lmcore.conversion.weights import WeightReader
from lmcore.data.tokenizer import Tokenizer, TokenizerFactory
from lmcore.errors import CheckpointError, ConfigError
from lmcore.generation.weights import fix_weights
from lmcore.model.build import op_binding
from lmcore.model.protocol import CausalLM
from lmcore.model.registry import create_model
from lmcore.model.saved_shape import read_shape
from lmcore.model.shape import ModelShape

if TYPE_CHECKING:
    from lmcore.runtime.runtime import Runtime

__all__ = ["LoadedModel", "load_model", "load_weights", "weight_bytes"]

logger = logging.getLogger(__name__)

_PREFIX = "model."
_NONE: Mapping[str, TokenizerFactory] = MappingProxyType({})


@dataclass(frozen=True)
class LoadedModel:
    """Model ready to generate.

    Attributes:
        model: Model in evaluation mode, on the run's device.
        tokenizer: Tokenizer that the model was trained with.
        checkpoint: Directory of the checkpoint.
        context: Returns the context of a forward pass, which sets the precision.
    """

    model: CausalLM
    tokenizer: Tokenizer
    checkpoint: Path
    context: Callable[[], AbstractContextManager[Any]]


def load_model(
    path: Path,
    runtime: Runtime,
    *,
    choice: TokenizerSettings = NO_CHOICE,
    extra: Mapping[str, TokenizerFactory] = _NONE,
    rows: int = 1,
    require: Callable[[ModelShape], None] | None = None,
    quantization: str | None = None,
) -> LoadedModel:
    """Return the model of a checkpoint of any format, with its tokenizer.

    Args:
        path: Run directory, its `checkpoints`, or one `iter_XXXXXXX`; or the directory of a
            checkpoint of another format, such as Hugging Face's.  In a run directory the newest
            checkpoint whose files match their checksums is taken; damaged ones are passed over
            with a warning.
        runtime: Device, precision and kernels.
        choice: Tokenizer chosen by the user instead of the checkpoint's own.
        extra: Tokenizer types that plugins registered.
        rows: Usual number of sequences that are decoded together.
        require: Check of the model's shape, which raises an error, before weights are read.
        quantization: Integers that the weights are rounded to, one of `QUANTIZATIONS`; None: none.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or its model cannot generate.
        ConfigError, DataError: The tokenizer is missing, or is not the run's; the precision does
            not go with quantization.
    """
    weights = WeightReader(path)
    state = weights.state
    if require is not None:
        require(state.shape)
    tokenizer = tokenizer_of(state, choice, extra)
    if tokenizer is None:
        raise ConfigError(
            f"`{path}` has no tokenizer",
            hint="name the tokenizer that the model was trained with by `--tokenizer-type` and its "
            "files",
        )
    for note in notes_beside(state.notes, tokenizer):
        logger.warning("%s: %s", path, note)
    if isinstance(state, LmcoreState):
        model = load_weights(state.checkpoint, state.manifest, runtime)
        context = fix_weights(model, runtime, rows, quantization)
        return LoadedModel(model, tokenizer, state.checkpoint, context)
    model = _described(state.shape, runtime, path)
    _allocate(model, runtime)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.read(name))
    model.eval()
    context = fix_weights(model, runtime, rows, quantization)
    return LoadedModel(model, tokenizer, path, context)


def load_weights(checkpoint: Path, manifest: Manifest, runtime: Runtime) -> CausalLM:
    """Return the whole model of a checkpoint, on the run's device and in evaluation mode.

    Args:
        checkpoint: Directory `iter_XXXXXXX` with verified files, saved in any parallel layout.
        manifest: Manifest of the checkpoint.
        runtime: Device, precision and kernels.

    Raises:
        CheckpointError: The checkpoint is damaged, or its model cannot generate.
    """
    shape = read_shape(manifest.model_shape, checkpoint)
    model = _described(shape, runtime, checkpoint)
    require_weights(shape, manifest, checkpoint)
    _allocate(model, runtime)
    tensors = {_PREFIX + name: tensor for name, tensor in model.named_parameters()}
    load_checkpoint(checkpoint, tensors, manifest, verify=False)
    return model.eval()


def _described(shape: ModelShape, runtime: Runtime, path: Path) -> CausalLM:
    """Return a model whose parameters have no memory."""
    with torch.device("meta"):
        # With a mask: texts of different lengths are continued together.
        model = create_model(shape, op_binding(runtime), masked=True)
    if not isinstance(model, CausalLM) or not model.causal:
        raise CheckpointError(f"the {shape.family} model of `{path}` cannot generate text")
    return model


def _allocate(model: CausalLM, runtime: Runtime) -> None:
    """Give the parameters of a model memory on the run's device, without values."""
    model.to_empty(device=runtime.device.torch_device)
    runtime.precision.apply(model)


def weight_bytes(manifest: Manifest) -> int:
    """Return the size of a checkpoint's weights in bytes."""
    weights = (entry for name, entry in manifest.tensors.items() if name.startswith(_PREFIX))
    return sum(num_bytes(entry) for entry in weights)
