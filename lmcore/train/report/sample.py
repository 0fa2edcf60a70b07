"""Text from the model at the end of a run, so that one sees what it has learnt."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.checkpoint import read_manifest
from lmcore.generation.generate import generate
from lmcore.generation.load import load_weights, weight_bytes
from lmcore.generation.sampling import SamplingOptions
from lmcore.model.protocol import CausalLM, Model

if TYPE_CHECKING:
    from lmcore.config.data_source import Part
    from lmcore.config.plan import RunPlan
    from lmcore.data.tokenizer import Tokenizer
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.datasets import Corpus

__all__ = ["Sample", "take_sample", "whole_model"]

logger = logging.getLogger(__name__)

_PROMPT_SHARE = 8
_TEMPERATURE = 0.8
_LARGEST_BYTES = 2 * 2**30
"""Of weights that one process loads for a sample."""


@dataclass(frozen=True)
class Sample:
    """A prompt and what the model made of it."""

    prompt: str
    text: str


def whole_model(checkpoint: Path, runtime: Runtime) -> Model | None:
    """Return the model of a run whose processes have divided it, from a checkpoint just saved.

    None, and a line that says so, where it is too large to be held beside this process's part.
    """
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
    return load_weights(checkpoint, manifest, runtime, verify=False)


def take_sample(
    model: Model, corpus: Corpus, plan: RunPlan, runtime: Runtime, tokenizer: Tokenizer
) -> Sample | None:
    """Return a sample; None with `--sample-tokens 0`, or if model or tokenizer make no text.

    The prompt is `--sample-prompt`, or the first tokens of a document that training did not see
    (of the first training document, where a run has no validation documents).  The random numbers
    of training are afterwards what they were before.
    """
    training = plan.config.training
    if training.sample_tokens == 0 or not tokenizer.encodes_any_text:
        return None
    if not isinstance(model, CausalLM) or not model.causal:
        return None
    room = model.shape.max_position_embeddings
    if training.sample_prompt is not None:
        prompt = tokenizer.encode(training.sample_prompt)[-max(1, room - 1) :]
    else:
        prompt = _opening(corpus, tokenizer, max(1, room // _PROMPT_SHARE))
    if not prompt or len(prompt) >= room:
        return None
    with runtime.rng.preserved():
        (made,) = generate(
            model,
            [prompt],
            num_tokens=min(training.sample_tokens, room - len(prompt)),
            options=SamplingOptions(temperature=_TEMPERATURE),
            seed=training.seed,
            eod=tokenizer.eod,
            vocab_size=plan.vocab_size,
            precision_context=runtime.precision.context,
        )
    return Sample(tokenizer.decode(prompt), tokenizer.decode(made.tokens))


def _opening(corpus: Corpus, tokenizer: Tokenizer, length: int) -> list[int]:
    part: Part = "valid" if corpus.valid is not None else "train"
    source = corpus.sources[part][0]
    first = int(source.indexed.document_indices[source.documents[0]])
    tokens = [int(token) for token in source.indexed.get(first)[:length]]
    return [token for token in tokens if token != tokenizer.eod]
