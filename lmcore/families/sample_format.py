"""`SampleFormat`: how the samples of a family are built, and how they become batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError
from lmcore.data.blend.sources import SampleBuilder
from lmcore.data.loading.batch import Collation
from lmcore.model.family import family_of

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.data.tokenizer import Tokenizer

__all__ = ["SampleFormat", "sample_format"]

_TENSORS = {"reset_position_ids": "positions_BS", "reset_attention_mask": "documents_BS"}
"""Tensor that a batch has with an option."""


@dataclass(frozen=True)
class SampleFormat:
    """Samples of one kind, from a dataset to a batch.

    Attributes:
        builder: Builder of the samples of a source.
        collation: Function that makes a micro-batch of samples, with the names of the kind.
        sentences: True if documents are divided into sentences.
    """

    builder: SampleBuilder
    collation: Collation
    sentences: bool = False


def sample_format(plan: RunPlan, tokenizer: Tokenizer) -> SampleFormat:
    """Return the format of the samples that the model of a run takes.

    Args:
        plan: The run.
        tokenizer: Tokenizer of the data.

    Raises:
        ConfigError: The model does not take the tensors of an option, or the data does not fit it.
    """
    family = family_of(plan.shape)
    for option, tensor in _TENSORS.items():
        if getattr(plan.config.data, option) and tensor not in family.batch:
            flag = f"--{option.replace('_', '-')}"
            raise ConfigError(
                f"`{flag}` is not supported by {family.name} models", hint="leave it out"
            )
    found: SampleFormat = family.load_samples()(plan, tokenizer)
    return found
