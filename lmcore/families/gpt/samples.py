"""Samples of GPT and Llama: sequences of tokens, each predicted from those before it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError
from lmcore.base.log import ALL_RANKS
from lmcore.data.blend.sources import GPTSamples
from lmcore.data.dataset.document_mask import DocumentMasks
from lmcore.data.loading.batch import CausalLMCollation
from lmcore.families.sample_format import SampleFormat
from lmcore.model.family import family_of

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.data.tokenizer import Tokenizer

__all__ = ["document_masks", "samples"]

logger = logging.getLogger(__name__)

_OF_BERT = ("BertWordPieceCase", "BertWordPieceLowerCase")
"""Tokenizers whose texts begin and end with tokens of BERT."""


def samples(plan: RunPlan, tokenizer: Tokenizer) -> SampleFormat:
    """Return the format of a run's samples.

    Args:
        plan: The run.
        tokenizer: Tokenizer of the data.

    Raises:
        ConfigError: The data does not fit an option.
    """
    if tokenizer.name in _OF_BERT:
        logger.warning(
            "`%s` is the tokenizer of BERT, and the model of the run is a decoder, %s: "
            "`--model-family bert` trains BERT",
            tokenizer.name,
            family_of(plan.shape).name,
            extra=ALL_RANKS,
        )
    return SampleFormat(
        GPTSamples(), CausalLMCollation(plan.vocab_size, document_masks(plan, tokenizer))
    )


def document_masks(plan: RunPlan, tokenizer: Tokenizer) -> DocumentMasks | None:
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
