"""`TextModel`: what the engine and beam search need of a model, in one process or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lmcore.model.shape import ModelShape

__all__ = ["TextCache", "TextModel", "compute_dtype"]


class TextCache(Protocol):
    """Keys and values of sequences of different lengths; see `lmcore.model.cache.SlotCache`.

    The views that `first_tokens`, `further_tokens` and `next_tokens` return are for one call of the
    model.
    """

    @property
    def num_slots(self) -> int:
        """Number of sequences that have memory."""
        ...

    @property
    def capacity(self) -> int:
        """Number of positions that each has."""
        ...

    def reserve(self, num_slots: int, capacity: int) -> None:
        """Provide memory for that many sequences and positions."""
        ...

    def release(self) -> None:
        """Free all memory."""
        ...

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first *length* positions of a slot to another one."""
        ...

    def clear(self, slot: int) -> None:
        """Set the content of a slot to zero."""
        ...

    def select(self, slots: Sequence[int], length: int) -> None:
        """Replace the content of slot i by that of slot `slots[i]`."""
        ...

    def first_tokens(self, slots: Sequence[int], width: int) -> Any:
        """Return the view for the first tokens of some sequences."""
        ...

    def further_tokens(self, slot: int, start: int, width: int) -> Any:
        """Return the view for tokens of one sequence after its first *start*."""
        ...

    def next_tokens(self, lengths: Sequence[int]) -> Any:
        """Return the view for one more token of each sequence of the first slots."""
        ...


class TextModel(Protocol):
    """Causal language model that generates; calling it returns hidden states [B, S, H]."""

    @property
    def causal(self) -> bool:
        """True if no token attends to later ones."""
        ...

    @property
    def shape(self) -> ModelShape:
        """Sizes of the whole model."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of tokens, hidden states and logits."""
        ...

    @property
    def weight_dtype(self) -> torch.dtype:
        """Dtype of the weights of products."""
        ...

    def __call__(self, tokens_BS: Tensor, cache: Any = None) -> Tensor:
        """Return the hidden states after the final norm.

        Args:
            tokens_BS: Token ids.
            cache: View of the cache of the tokens before; None: there are none.
        """
        ...

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Return the logits of hidden states over the padded vocabulary."""
        ...

    def new_cache(self, dtype: torch.dtype) -> TextCache:
        """Return an empty cache."""
        ...


def compute_dtype(model: TextModel) -> torch.dtype:
    """Return the dtype of the model's products in the context of its precision, for a cache."""
    unit = torch.ones(1, 1, device=model.device, dtype=model.weight_dtype)
    return torch.nn.functional.linear(unit, unit).dtype
