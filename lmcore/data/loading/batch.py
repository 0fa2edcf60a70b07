"""Micro-batches: the tensors of some samples, and how samples of a kind become one.

Shapes: B micro-batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lmcore.base.errors import DataError
from lmcore.data.dataset.document_mask import DocumentMasks

__all__ = ["Batch", "CausalLMCollation", "Collation", "check_vocabulary"]

Batch = dict[str, Tensor]
"""Micro-batch, on the host or on a device: tensors by the names of `Family.batch`."""


class Collation(Protocol):
    """Function that makes a micro-batch of samples."""

    def __call__(self, samples: Sequence[Any], first: int) -> Batch:
        """Return the batch of *samples*, on the host.

        Args:
            samples: Samples of consecutive positions.
            first: Position of the first one in its dataset, for messages.

        Raises:
            DataError: A token is not in the vocabulary.
        """


@dataclass(frozen=True)
class CausalLMCollation:
    """Collation of samples of S + 1 tokens, int64.

    The batch has the tensors

    - tokens_BS: int64, input token ids;
    - targets_BS: int64, the next token of each input token;
    - loss_weight_BS: float32, weight of each target in the loss;
    - positions_BS: int64, position ids; without them positions are those in the sample;
    - documents_BS: int32, number of each token's document in the sample, for attention within
      documents; without them tokens attend to all tokens before them.

    Attributes:
        vocab_size: Number of ids in the vocabulary, to check tokens against; None: no check.
        masks: Document-boundary masks; None: samples are treated as one document.
    """

    vocab_size: int | None = None
    masks: DocumentMasks | None = None

    def __call__(self, samples: Sequence[Any], first: int) -> Batch:
        """Return the batch of *samples*; see `Collation`."""
        tokens = torch.from_numpy(np.stack(samples))
        if self.vocab_size is not None:
            check_vocabulary(tokens, self.vocab_size, first)
        inputs_BS, targets_BS = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        batch = {"tokens_BS": inputs_BS, "targets_BS": targets_BS}
        if self.masks is None:
            return batch | {"loss_weight_BS": torch.ones(inputs_BS.shape, dtype=torch.float32)}
        found = {
            "loss_weight_BS": self.masks.loss_mask(inputs_BS),
            "positions_BS": self.masks.positions(inputs_BS),
            "documents_BS": self.masks.documents(inputs_BS),
        }
        return batch | {name: tensor for name, tensor in found.items() if tensor is not None}


def check_vocabulary(tokens: Tensor, vocab_size: int, first: int) -> None:
    """Raise unless all tokens are in the vocabulary.

    Args:
        tokens: Token ids, one row for each sample.
        vocab_size: Number of ids in the vocabulary.
        first: Position of the first sample in its dataset.

    Raises:
        DataError: A token is not; the message names it and its samples.
    """
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise DataError(
            f"the data contains token {low if low < 0 else high}; the vocabulary has {vocab_size} "
            "ids",
            why=f"found in samples {first} to {first + len(tokens) - 1}; the dataset was prepared "
            "with another tokenizer, or is damaged",
            hint="give the tokenizer of the dataset, or prepare it again",
        )
