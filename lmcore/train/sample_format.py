"""Sample formats: how the samples of a model's kind are built, and how they become batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcore.data.blend.sources import GPTSamples, SampleBuilder
from lmcore.data.dataset.document_mask import DocumentMasks
from lmcore.data.loading.batch import CausalLMCollation, Collation
from lmcore.errors import ConfigError
from lmcore.model.protocol import CAUSAL_LM
from lmcore.model.registry import MODEL_CLASSES
from lmcore.model.shape import ModelShape

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.data.tokenizer import Tokenizer

__all__ = ["SAMPLE_FORMATS", "SampleFormat", "sample_format"]

_TENSORS = {"reset_position_ids": "positions_BS", "reset_attention_mask": "documents_BS"}
"""Tensor that a batch has with an option."""


@dataclass(frozen=True)
class SampleFormat:
    """Samples of one kind, from a dataset to a batch.

    Attributes:
        builder: Builder of the samples of a source.
        collation: Function that makes a micro-batch of samples, with the names of the kind.
    """

    builder: SampleBuilder
    collation: Collation


def sample_format(plan: RunPlan, tokenizer: Tokenizer) -> SampleFormat:
    """Return the format of the samples that the model of a run takes.

    Args:
        plan: The run.
        tokenizer: Tokenizer of the data.

    Raises:
        ConfigError: The model does not take the tensors of an option, or the data does not fit it.
    """
    family = ModelShape.from_plan(plan).family
    kind = MODEL_CLASSES[family].sample_kind
    for option, tensor in _TENSORS.items():
        if getattr(plan.config.data, option) and tensor not in kind.options:
            flag = f"--{option.replace('_', '-')}"
            raise ConfigError(f"`{flag}` is not supported by {family} models", hint="leave it out")
    return SAMPLE_FORMATS[kind.name](plan, tokenizer)


def _causal_lm(plan: RunPlan, tokenizer: Tokenizer) -> SampleFormat:
    return SampleFormat(
        GPTSamples(), CausalLMCollation(plan.vocab_size, _document_masks(plan, tokenizer))
    )


SAMPLE_FORMATS: dict[str, Callable[[RunPlan, Tokenizer], SampleFormat]] = {
    CAUSAL_LM.name: _causal_lm
}
"""Function that returns the format of a run's samples, by `SampleKind.name`."""


def _document_masks(plan: RunPlan, tokenizer: Tokenizer) -> DocumentMasks | None:
    """Return the document-boundary masks of a run; None if samples ignore document boundaries."""
    settings = plan.config.data
    asked = {
        "reset_position_ids": settings.reset_position_ids,
        "reset_attention_mask": settings.reset_attention_mask,
        "eod_mask_loss": settings.eod_mask_loss,
    }
    flags = [f"`--{name.replace('_', '-')}`" for name, wanted in asked.items() if wanted]
    if not flags:
        return None
    what = f"{' and '.join(flags)} cannot detect where documents end"
    if tokenizer.eod is None:
        why = f"the tokenizer `{tokenizer.name}` has no end-of-document token"
        raise ConfigError(what, why=why, hint="leave the flag out, or use another tokenizer")
    for blend in plan.sources.blends():
        for source in blend.sources:
            if source.append_eod is False:
                raise ConfigError(
                    what,
                    why=f"`{source.name}` was prepared without end-of-document tokens",
                    hint="prepare it with `--append-eod`, or leave the flag out",
                )
    return DocumentMasks(tokenizer.eod, **asked)
