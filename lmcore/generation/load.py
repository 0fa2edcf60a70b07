"""Load a trained model with its tokenizer from a checkpoint, without training state.

A checkpoint may come from anywhere, so its metadata is checked before memory is allocated: the
shape against bounds, the tensors against the shape, the tokenizer against the run's.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from lmcore.checkpoint import (
    Manifest,
    load_checkpoint,
    newest_verified,
    num_bytes,
    survey,
)
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.data.tokenizer import Tokenizer, TokenizerFactory, tokenizer_from
from lmcore.data.tokenizer.saved import load_tokenizer
from lmcore.errors import CheckpointError, ConfigError
from lmcore.model.build import op_binding
from lmcore.model.protocol import CausalLM
from lmcore.model.registry import create_model
from lmcore.model.saved_shape import read_shape

if TYPE_CHECKING:
    from lmcore.runtime.runtime import Runtime

__all__ = [
    "LoadedModel",
    "find_tokenizer",
    "load_model",
    "load_weights",
    "weight_bytes",
]

logger = logging.getLogger(__name__)

_PREFIX = "model."
_TOKENIZER = "tokenizer"
_RUNS_OWN = TokenizerSettings()
_NONE: Mapping[str, TokenizerFactory] = MappingProxyType({})


@dataclass(frozen=True)
class LoadedModel:
    """Model ready to generate.

    Attributes:
        model: Model in evaluation mode, on the run's device.
        tokenizer: Tokenizer that the model was trained with.
        manifest: Manifest of the checkpoint.
        checkpoint: Directory of the checkpoint.
    """

    model: CausalLM
    tokenizer: Tokenizer
    manifest: Manifest
    checkpoint: Path


def load_model(
    path: Path,
    runtime: Runtime,
    *,
    choice: TokenizerSettings = _RUNS_OWN,
    extra: Mapping[str, TokenizerFactory] = _NONE,
) -> LoadedModel:
    """Return the model of a run with its tokenizer.

    Args:
        path: Run directory, its `checkpoints`, or one `iter_XXXXXXX`.  In a directory the newest
            checkpoint whose files match their checksums is taken; damaged ones are passed over
            with a warning.
        runtime: Device, precision and kernels.
        choice: Tokenizer chosen by the user instead of the run's own copy.
        extra: Tokenizer types that plugins registered.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or its model cannot generate.
        ConfigError, DataError: The tokenizer is missing, or is not the run's.
    """
    found = newest_verified(survey(path))
    warning = found.warning()
    if warning is not None:
        logger.warning("%s", warning)
    checkpoint, manifest = found.path, found.manifest
    shape = read_shape(manifest.model_shape, checkpoint)
    tokenizer = find_tokenizer(checkpoint, manifest, choice, extra)
    if tokenizer.vocab_size > shape.padded_vocab_size:
        raise ConfigError(
            f"tokenizer `{tokenizer.name}` has {tokenizer.vocab_size} ids; the model in "
            f"`{checkpoint}` has {shape.padded_vocab_size}",
            hint="give the tokenizer that the model was trained with",
        )
    model = load_weights(checkpoint, manifest, runtime)
    return LoadedModel(model, tokenizer, manifest, checkpoint)


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
    with torch.device("meta"):
        model = create_model(shape, op_binding(runtime))
    if not isinstance(model, CausalLM) or not model.causal:
        raise CheckpointError(f"the {shape.family} model of `{checkpoint}` cannot generate text")
    tensors = {_PREFIX + name: tensor for name, tensor in model.named_parameters()}
    _require_tensors(tensors, manifest, checkpoint)
    model.to_empty(device=runtime.device.torch_device)
    runtime.precision.apply(model)
    tensors = {_PREFIX + name: tensor for name, tensor in model.named_parameters()}
    load_checkpoint(checkpoint, tensors, manifest, verify=False)
    return model.eval()


def weight_bytes(manifest: Manifest) -> int:
    """Return the size of a checkpoint's weights in bytes."""
    weights = (entry for name, entry in manifest.tensors.items() if name.startswith(_PREFIX))
    return sum(num_bytes(entry) for entry in weights)


def _require_tensors(
    tensors: Mapping[str, torch.Tensor], manifest: Manifest, checkpoint: Path
) -> None:
    """Raise unless the checkpoint has exactly the weights of its shape; allocate no memory."""
    for name, tensor in tensors.items():
        entry = manifest.tensors.get(name)
        if entry is None or entry.shape != tuple(tensor.shape):
            found = "lacks it" if entry is None else f"has {list(entry.shape)}"
            raise CheckpointError(
                f"the weights of checkpoint `{checkpoint}` do not fit its shape",
                why=f"`{name}` should have shape {list(tensor.shape)}; the checkpoint {found}",
            )
    unknown = [
        name for name in manifest.tensors if name.startswith(_PREFIX) and name not in tensors
    ]
    if unknown:
        raise CheckpointError(
            f"the weights of checkpoint `{checkpoint}` do not fit its shape",
            why=f"`{unknown[0]}` does not belong to a model of that shape",
        )


def find_tokenizer(
    checkpoint: Path,
    manifest: Manifest,
    choice: TokenizerSettings,
    extra: Mapping[str, TokenizerFactory],
) -> Tokenizer:
    """Return the tokenizer of a run: the chosen one, the run's copy, or a type without files.

    Args:
        checkpoint: Directory of the checkpoint.
        manifest: Manifest of the checkpoint.
        choice: Tokenizer chosen by the user.
        extra: Tokenizer types that plugins registered.

    Raises:
        ConfigError: It is not the tokenizer of the run, or its options are wrong.
        DataError: No tokenizer was saved, or its files are invalid.
    """
    trained = manifest.meta.get(_TOKENIZER)
    described = trained.get("describe") if isinstance(trained, Mapping) else None
    kind = described.get("type") if isinstance(described, Mapping) else None
    directory = checkpoint.resolve().parent.parent / _TOKENIZER
    if choice != _RUNS_OWN:
        tokenizer = _chosen(choice, kind, extra)
    elif not directory.is_dir() and isinstance(described, Mapping) and _fileless(described):
        tokenizer = tokenizer_from(TokenizerSettings.described(described), extra=extra)
    else:
        tokenizer = load_tokenizer(directory, extra=extra)
    fingerprint = trained.get("fingerprint") if isinstance(trained, Mapping) else None
    if fingerprint is not None and tokenizer.fingerprint() != fingerprint:
        raise ConfigError(
            f"tokenizer `{tokenizer.name}` is not the tokenizer of `{checkpoint}`",
            why=f"its fingerprint is {tokenizer.fingerprint()[:16]}; the run's `{kind}` has "
            f"{str(fingerprint)[:16]}",
            hint="give the files that the data was prepared with",
        )
    return tokenizer


def _chosen(
    choice: TokenizerSettings, kind: object, extra: Mapping[str, TokenizerFactory]
) -> Tokenizer:
    named = choice.tokenizer_type or (kind if isinstance(kind, str) else None)
    if named is None:
        raise ConfigError(
            "the checkpoint does not record its tokenizer",
            hint="add `--tokenizer-type TYPE`",
        )
    return tokenizer_from(dataclasses.replace(choice, tokenizer_type=named), extra=extra)


def _fileless(described: Mapping[str, Any]) -> bool:
    size = described.get("vocab_size")
    plain = size is None or (isinstance(size, int) and not isinstance(size, bool))
    return (
        set(described) <= {"type", "vocab_size"}
        and isinstance(described.get("type"), str)
        and plain
    )
