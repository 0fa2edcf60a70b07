"""`TextModel`: what generation needs of a model, in one process or in several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lmcore.contract.device import Device
    from lmcore.model.shape import ModelShape

__all__ = [
    "PLAIN",
    "BranchingCache",
    "Execution",
    "SourceCache",
    "TextCache",
    "TextModel",
    "compute_dtype",
    "set_source",
]


def _nothing() -> None:
    """Do nothing: the device computes what is queued."""


@dataclass(frozen=True)
class Execution:
    """Context of a model's passes for generation on a device, and what follows each token.

    Attributes:
        precision: Returns the context of a forward pass, which sets the precision.
        inference_mode: See `Device.inference_mode`.
        step_boundary: See `Device.step_boundary`; called after each token.
    """

    precision: Callable[[], AbstractContextManager[Any]] = nullcontext
    inference_mode: bool = True
    step_boundary: Callable[[], None] = _nothing

    @classmethod
    def on(cls, device: Device, precision: Callable[[], AbstractContextManager[Any]]) -> Execution:
        """Return how passes run on *device*, with the context of a precision."""
        return cls(precision, device.inference_mode, device.step_boundary)

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Run forward passes within this context: without gradients, in the precision."""
        # A precision policy that casts weights casts them once in a context.
        no_gradients = torch.inference_mode if self.inference_mode else torch.no_grad
        with no_gradients(), self.precision():
            yield


PLAIN = Execution()
"""Passes in the dtype of the weights, on a device that has inference mode."""


class TextCache(Protocol):
    """Keys and values of sequences of different lengths; see `SlotCache`.

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
        """Replace the content of slot i by the content of slot `slots[i]`."""
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


@runtime_checkable
class BranchingCache(TextCache, Protocol):
    """Cache whose sequences may have several continuations each."""

    def branches(self, slots: Sequence[int], lengths: Sequence[int], width: int) -> Any:
        """Return the view for continuations of sequences, which are not extended by them."""
        ...


@runtime_checkable
class SourceCache(TextCache, Protocol):
    """Cache of an encoder-decoder model, with the encoder's output for each sequence.

    `move`, `clear` and `select` include it.
    """

    def set_source(self, slot: int, tokens: Sequence[int]) -> None:
        """Take the input of a sequence's encoder, before any pass over its slot."""
        ...


def set_source(cache: TextCache, slot: int, tokens: Sequence[int]) -> None:
    """Give the input of a sequence's encoder to a model that has one.

    Args:
        cache: Cache of the model.
        slot: Slot of the sequence.
        tokens: Input of the encoder; empty for a model without an encoder.

    Raises:
        TypeError: The model has no encoder.
    """
    if isinstance(cache, SourceCache):
        cache.set_source(slot, tokens)
    elif tokens:
        raise TypeError("the request has a source, and the model has no encoder")


class TextModel(Protocol):
    """Causal language model, or decoder, that generates; a call returns hidden states [B, S, H].

    The cache of a decoder with an encoder is a `SourceCache`.
    """

    @property
    def causal(self) -> bool:
        """True if no token attends to later ones."""
        ...

    @property
    def answers(self) -> bool | None:
        """True if the text answers the input of an encoder; see `SourceLM`."""
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
