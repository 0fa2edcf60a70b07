"""Beam search: the most probable texts after a prompt that a search of limited width finds.

Shapes: W beams, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.generation.next_token import not_finite

if TYPE_CHECKING:
    from lmcore.model.protocol import CausalLM

__all__ = ["Beam", "beam_search"]


@dataclass(frozen=True)
class Beam:
    """A text that beam search found.

    Attributes:
        tokens: Token ids after the prompt, without the stop token.
        logprobs: Log-probability of each, and of the stop token if the text ended.
        finished: True if the text ended with a stop token.
        score: Sum of the log-probabilities over (their number ^ length penalty).
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: bool
    score: float


@dataclass(frozen=True)
class _Open:
    """A text without a stop token."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    total: float = 0.0

    def extended(self, token: int, logprob: float) -> _Open:
        return _Open((*self.tokens, token), (*self.logprobs, logprob), self.total + logprob)

    def closed(self, penalty: float, *, finished: bool) -> Beam:
        tokens = self.tokens[:-1] if finished else self.tokens
        score = self.total / len(self.tokens) ** penalty
        return Beam(tokens, self.logprobs, finished, score)


def beam_search(
    model: CausalLM,
    prompt: Sequence[int],
    *,
    width: int,
    max_tokens: int,
    vocab_size: int,
    stop_tokens: frozenset[int] = frozenset(),
    length_penalty: float = 1.0,
    precision_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[Beam]:
    """Return the *width* best texts, the best one first.

    Args:
        model: Model in evaluation mode.
        prompt: Token ids, at least one.
        width: Number of texts that are followed at a time.
        max_tokens: Largest number of tokens, at least one.
        vocab_size: Size of the vocabulary without padding.
        stop_tokens: Tokens that end a text.
        length_penalty: Exponent of the number of tokens in the score: 0 prefers short texts, 1
            compares the mean log-probability, more prefers long texts.
        precision_context: Context of a forward pass, which sets the precision.

    Raises:
        RunError: The model's logits are not finite.

    Source: as Megatron-LM's beam search, where a text ends if its stop token is among the *width*
    best candidates of a step, and the search when no open text can be better than the worst one
    found.
    """
    assert width > 0
    assert max_tokens > 0
    device = model.head_weight.device
    found: list[Beam] = []
    with torch.inference_mode(), precision_context():
        unit = model.head_weight.new_ones(1, 1)
        cache = model.new_cache(torch.nn.functional.linear(unit, unit).dtype)
        cache.reserve(width, len(prompt) + max_tokens - 1)
        beams, length = [_Open()], len(prompt)
        hidden = model(torch.tensor([list(prompt)], device=device), cache.first_tokens([0], length))
        while True:
            logprobs_WV = _logprobs(model.logits(hidden[:, -1]), vocab_size)
            candidates = _best(beams, logprobs_WV, 2 * width)
            order: list[int] = []
            following: list[_Open] = []
            for rank, (row, token, logprob) in enumerate(candidates):
                beam = beams[row].extended(token, logprob)
                if token in stop_tokens:
                    if rank < width:
                        found.append(beam.closed(length_penalty, finished=True))
                elif len(following) < width:
                    order.append(row)
                    following.append(beam)
            beams = following
            found = sorted(found, key=lambda one: -one.score)[:width]
            if not beams or len(beams[0].tokens) == max_tokens:
                break
            possible = beams[0].total / len(beams[0].tokens) ** length_penalty
            if len(found) == width and found[-1].score >= possible:
                break
            cache.select(order, length)
            tokens_W1 = torch.tensor([[one.tokens[-1]] for one in beams], device=device)
            hidden = model(tokens_W1, cache.next_tokens([length] * len(beams)))
            length += 1
    if len(found) < width or (beams and len(beams[0].tokens) == max_tokens):
        found += [one.closed(length_penalty, finished=False) for one in beams]
    return sorted(found, key=lambda one: -one.score)[:width]


def _logprobs(logits_WV: Tensor, vocab_size: int) -> Tensor:
    """Return the log-probabilities of the true vocabulary.

    Raises:
        RunError: A row's highest logit is not finite.
    """
    wide = logits_WV[:, :vocab_size].to(torch.promote_types(logits_WV.dtype, torch.float32))
    highest = wide.max(dim=-1).values
    if not highest.isfinite().all():
        raise not_finite(float(highest[~highest.isfinite()][0]))
    return wide.log_softmax(dim=-1)


def _best(beams: Sequence[_Open], logprobs_WV: Tensor, count: int) -> list[tuple[int, int, float]]:
    """Return beam, token and log-probability of the best candidates, in descending order."""
    total_W1 = torch.tensor(
        [[one.total] for one in beams], dtype=logprobs_WV.dtype, device=logprobs_WV.device
    )
    size = logprobs_WV.shape[-1]
    flat = (logprobs_WV + total_W1).flatten()
    index = flat.topk(min(count, flat.numel())).indices
    values = logprobs_WV.flatten()[index].tolist()
    return [
        (at // size, at % size, value) for at, value in zip(index.tolist(), values, strict=True)
    ]
