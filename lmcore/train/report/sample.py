"""Sample of text from the trained model at the end of a run."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from lmcore.checkpoint import read_manifest
from lmcore.families.protocol import CausalLM, Model, SourceLM
from lmcore.generation.generate import generate
from lmcore.generation.sampling.options import SamplingOptions
from lmcore.generation.text.stream import continuation
from lmcore.inference.fix_weights import device_attention
from lmcore.inference.load import load_weights, weight_bytes
from lmcore.inference.text_model import Execution

if TYPE_CHECKING:
    from lmcore.config.derived.data_source import Part
    from lmcore.config.plan import RunPlan
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.datasets import RunDatasets
    from lmcore.train.engine import Engine

__all__ = ["SampleText", "can_generate", "generate_sample", "take_sample", "whole_model"]

logger = logging.getLogger(__name__)

_PROMPT_SHARE = 8
_LONGEST_PROMPT = 32
"""Tokens of a prompt from the data at most: more of it than of the model's text would mislead."""
_TEMPERATURE = 0.8
_LARGEST_BYTES = 2 * 2**30
"""Largest size of the weights that one process loads for a sample."""


@dataclass(frozen=True)
class SampleText:
    """A prompt and the text that the model continues it with."""

    prompt: str
    text: str


def can_generate(model: Model) -> TypeGuard[CausalLM]:
    """Return True if a model can continue a text, not an answer to one."""
    if isinstance(model, SourceLM):
        return False
    return isinstance(model, CausalLM) and model.causal and not model.shape.task


def take_sample(
    engine: Engine,
    datasets: RunDatasets,
    plan: RunPlan,
    runtime: Runtime,
    checkpoint: Path | None,
) -> SampleText | None:
    """Return text from the trained model; None if no text is wanted or possible.

    A model that is divided is loaded whole from its last checkpoint, unless it is too large.

    Args:
        engine: The engine after training.
        datasets: Datasets of the run, for prompt and tokenizer.
        plan: The run.
        runtime: Device and random numbers.
        checkpoint: The last checkpoint of the run; None without one.
    """
    if not engine.divided:
        with engine.state.evaluation_weights():
            return generate_sample(engine.state.model, datasets, plan, runtime)
    if plan.config.training.sample_tokens == 0 or checkpoint is None:
        return None
    if not can_generate(engine.state.model):
        return None
    model = whole_model(checkpoint, runtime)
    return generate_sample(model, datasets, plan, runtime) if model else None


def whole_model(checkpoint: Path, runtime: Runtime) -> Model | None:
    """Return the model of a checkpoint; None if it is too large to be loaded by one process."""
    manifest = read_manifest(checkpoint)
    size = weight_bytes(manifest)
    if size > _LARGEST_BYTES:
        logger.info(
            "no sample: the whole model has %.1f GiB of weights; "
            "`lmcore generate --load %s` takes one",
            size / 2**30,
            checkpoint,
        )
        return None
    return load_weights(checkpoint, manifest, runtime)


def generate_sample(
    model: Model, datasets: RunDatasets, plan: RunPlan, runtime: Runtime
) -> SampleText | None:
    """Return text; None with `--sample-tokens 0`, or if model or tokenizer make no text.

    The prompt is `--sample-prompt`, or the first tokens of a validation document (of a training
    document if the run has none), at most 32.  The random state of training is restored afterwards.

    Args:
        model: The model.
        datasets: Datasets of the run, for prompt and tokenizer.
        plan: The run.
        runtime: Device and random numbers.
    """
    training, tokenizer = plan.config.training, datasets.tokenizer
    if training.sample_tokens == 0 or not tokenizer.encodes_any_text:
        return None
    if not can_generate(model):
        return None
    room = model.shape.max_position_embeddings
    if training.sample_prompt is not None:
        prompt = tokenizer.encode(training.sample_prompt)[-max(1, room - 1) :]
    else:
        prompt = _opening(datasets, min(max(1, room // _PROMPT_SHARE), _LONGEST_PROMPT))
    if not prompt or len(prompt) >= room:
        return None
    with runtime.rng.preserved(), device_attention(model, runtime):
        (made,) = generate(
            model,
            [prompt],
            num_tokens=min(training.sample_tokens, room - len(prompt)),
            options=SamplingOptions(temperature=_TEMPERATURE),
            seed=training.seed,
            eod=tokenizer.eod,
            vocab_size=tokenizer.vocab_size,
            execution=Execution.on(runtime.device, runtime.precision.context),
        )
    return SampleText(tokenizer.decode(prompt), continuation(tokenizer, prompt, made.tokens))


def _opening(datasets: RunDatasets, length: int) -> list[int]:
    part: Part = "valid" if datasets.valid is not None else "train"
    source = datasets.sources[part][0]
    first = int(source.indexed.document_indices[source.documents[0]])
    tokens = [int(token) for token in source.indexed.get(first)[:length]]
    return [token for token in tokens if token != datasets.tokenizer.eod]
