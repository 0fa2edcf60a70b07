"""Load a trained model with its tokenizer from a checkpoint, without training state.

A checkpoint may come from anywhere, so its metadata is checked before memory is allocated: the
shape against bounds, the tensors against the shape, the tokenizer against the run's.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from lmcore.base.errors import CheckpointError, RunError
from lmcore.checkpoint import Manifest, load_checkpoint, num_bytes
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.conversion.loading.checkpoint_tokenizer import NO_CHOICE, no_tokenizer, tokenizer_of
from lmcore.conversion.loading.weights import WeightReader
from lmcore.conversion.native.manifest import WEIGHT_PREFIX, require_weights
from lmcore.conversion.native.read import LmcoreState
from lmcore.conversion.state import notes_beside
from lmcore.data.tokenizer import Tokenizer, TokenizerFactory
from lmcore.families.build import create_model, op_binding
from lmcore.families.protocol import CausalLM, MaskedLM, Model
from lmcore.families.saved_shape import read_shape
from lmcore.inference.fix_weights import fix_weights
from lmcore.inference.text_model import PLAIN
from lmcore.model.family import answers_prompts, family_of
from lmcore.model.shape import ModelPart, ModelShape
from lmcore.runtime.host_memory import memory_of_process

if TYPE_CHECKING:
    from lmcore.inference.text_model import Execution, TextModel
    from lmcore.runtime.runtime import Runtime

__all__ = [
    "LoadedModel",
    "NoTextError",
    "allocate",
    "described_model",
    "headed",
    "load_model",
    "load_weights",
    "open_checkpoint",
    "weight_bytes",
]

logger = logging.getLogger(__name__)

_NONE: Mapping[str, TokenizerFactory] = MappingProxyType({})


class NoTextError(CheckpointError):
    """A model that does not predict the next token of a text."""


@dataclass(frozen=True)
class LoadedModel:
    """Model ready to generate.

    Attributes:
        model: Model in evaluation mode, on the run's device.
        tokenizer: Tokenizer that the model was trained with.
        checkpoint: Directory of the checkpoint.
        execution: Context of forward passes on the device, and what follows each token.
        num_parameters: Number of parameters, tied ones once.
    """

    model: TextModel
    tokenizer: Tokenizer
    checkpoint: Path
    execution: Execution
    num_parameters: int = 0

    @property
    def reads_source(self) -> bool:
        """True if a prompt is the input of an encoder, and the text the decoder's answer."""
        return self.model.answers is True

    @property
    def reads_neighbors(self) -> bool:
        """True if a text has neighbours, which an encoder reads beside the prompt."""
        return self.model.answers is False


def load_model(
    path: Path,
    runtime: Runtime,
    *,
    choice: TokenizerSettings = NO_CHOICE,
    extra: Mapping[str, TokenizerFactory] = _NONE,
    rows: int = 1,
    require: Callable[[ModelShape], None] | None = None,
    quantization: str | None = None,
    check: Callable[[LoadedModel], None] | None = None,
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
        check: Check of the model, whose weights have no memory yet, and of its tokenizer; it raises
            an error.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or its model cannot generate.
        ConfigError, DataError: The tokenizer is missing, or is not the run's; the precision does
            not go with quantization.
    """
    weights, tokenizer = open_checkpoint(path, choice, extra, require)
    state = weights.state
    directory = state.checkpoint if isinstance(state, LmcoreState) else path

    def described(model: CausalLM) -> None:
        if check is not None:
            check(LoadedModel(model, tokenizer, directory, PLAIN))

    if isinstance(state, LmcoreState):
        model = load_weights(directory, state.manifest, runtime, described)
    else:
        model = _foreign_model(weights, runtime, path, described)
    count = model.parameter_count()
    execution = fix_weights(model, runtime, rows, quantization)
    return LoadedModel(model, tokenizer, directory, execution, count)


def _foreign_model(
    weights: WeightReader, runtime: Runtime, path: Path, check: Callable[[CausalLM], None]
) -> CausalLM:
    """Return the model of a checkpoint of another program, in evaluation mode."""
    model = described_model(weights.state.shape, runtime, path)
    check(model)
    allocate(model, runtime)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.read(name))
    return model.eval()


def open_checkpoint(
    path: Path,
    choice: TokenizerSettings,
    extra: Mapping[str, TokenizerFactory],
    require: Callable[[ModelShape], None] | None,
) -> tuple[WeightReader, Tokenizer]:
    """Return the weights of a checkpoint, which are not read yet, and its tokenizer.

    For the arguments and errors see `load_model`.
    """
    weights = WeightReader(path)
    state = weights.state
    if require is not None:
        require(state.shape)
    tokenizer = tokenizer_of(state, choice, extra)
    if tokenizer is None:
        raise no_tokenizer(path, state.tokenizer_type, sentinels=answers_prompts(state.shape))
    for note in notes_beside(state.notes, tokenizer):
        logger.warning("%s: %s", path, note)
    return weights, tokenizer


def load_weights(
    checkpoint: Path,
    manifest: Manifest,
    runtime: Runtime,
    check: Callable[[CausalLM], None] | None = None,
) -> CausalLM:
    """Return the whole model of a checkpoint, on the run's device and in evaluation mode.

    Args:
        checkpoint: Directory `iter_XXXXXXX` with verified files, saved in any parallel layout.
        manifest: Manifest of the checkpoint.
        runtime: Device, precision and kernels.
        check: Check of the model before its weights are read, which raises an error.

    Raises:
        CheckpointError: The checkpoint is damaged, or its model cannot generate.
    """
    shape = read_shape(manifest.model_shape, checkpoint)
    model = described_model(shape, runtime, checkpoint)
    require_weights(shape, manifest, checkpoint)
    if check is not None:
        check(model)
    allocate(model, runtime)
    tensors = {WEIGHT_PREFIX + name: tensor for name, tensor in model.named_parameters()}
    load_checkpoint(checkpoint, tensors, manifest, verify=False)
    return model.eval()


def described_model(
    shape: ModelShape, runtime: Runtime, path: Path, part: ModelPart | None = None
) -> CausalLM:
    """Return a model whose parameters have no memory.

    Args:
        shape: Sizes of the model.
        runtime: Kernels.
        path: Directory of the checkpoint, for messages.
        part: Part of the model; None: all of it.

    Raises:
        CheckpointError: The model cannot generate.
    """
    with torch.device("meta"):
        # With a mask: texts of different lengths are continued together.
        model = create_model(shape, op_binding(runtime), masked=True, part=part)
    if not isinstance(model, CausalLM) or not model.causal or shape.task:
        name = family_of(shape).name
        why, hint = _uses(model, shape, path)
        raise NoTextError(f"the {name} model of `{path}` cannot generate text", why=why, hint=hint)
    return model


def _uses(model: Model, shape: ModelShape, path: Path) -> tuple[str, str]:
    """Return why a model does not generate, and what can be done with it instead."""
    if shape.task:
        return headed(shape)
    if isinstance(model, MaskedLM):
        command = f"lmcore generate --load {shlex.quote(str(path))} --fill-mask"
        return (
            "it predicts the tokens in the place of masks",
            f"fill masks: `{command} --prompt 'The capital of [MASK] is Paris.'`",
        )
    return (
        "its family does not predict the next token from those before it",
        "load a GPT or Llama model to generate text, or a BERT to fill masks",
    )


def headed(shape: ModelShape) -> tuple[str, str]:
    """Return why a model with a head for a task has no predictions of tokens, and what it does."""
    hint = (
        "load the model from before its fine-tuning; `lmcore evaluate RUN --task NAME` scores this "
        "one on RACE and GLUE, and `--task-valid-data` of `lmcore train` on other data"
    )
    return f"its head is for the task `{shape.task}`", hint


def allocate(model: Model, runtime: Runtime) -> None:
    """Give the parameters of a model memory on the run's device, without values.

    Raises:
        RunError: The host, which would end the process without a message, lacks the memory.
    """
    memory, need = memory_of_process(runtime.device), sum(one.nbytes for one in model.parameters())
    if memory is not None and need > memory:
        raise RunError(
            "the model does not fit in the memory of this host",
            why=f"its weights take {need / 2**30:.4g} GiB, and this host has "
            f"{memory / 2**30:.4g} GiB for them, swap space included",
            hint="use a host with more memory, or a smaller model",
        )
    model.to_empty(device=runtime.device.torch_device)
    runtime.precision.apply(model)


def weight_bytes(manifest: Manifest) -> int:
    """Return the size of a checkpoint's weights in bytes."""
    weights = (entry for name, entry in manifest.tensors.items() if name.startswith(WEIGHT_PREFIX))
    return sum(num_bytes(entry) for entry in weights)
