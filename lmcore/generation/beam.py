"""Beam search: the most probable texts after a prompt that a search of limited width finds.

Shapes: W beams, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmcore.generation.next_token import not_finite
from lmcore.inference.text_model import PLAIN, Execution, compute_dtype, set_source

if TYPE_CHECKING:
    from lmcore.inference.text_model import TextCache, TextModel

__all__ = ["Beam", "BeamSearch", "beam_search"]


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


class BeamSearch:
    """Search for the best texts after one prompt, step by step.

    Source: as Megatron-LM's beam search, where a text ends if its stop token is among the *width*
    best candidates of a step, and the search when no open text can be better than the worst one
    found.

    Attributes:
        ended: True if the search is complete.
    """

    def __init__(
        self,
        model: TextModel,
        prompt: Sequence[int],
        *,
        width: int,
        max_tokens: int,
        vocab_size: int,
        stop_tokens: frozenset[int] = frozenset(),
        length_penalty: float = 1.0,
        execution: Execution = PLAIN,
        source: Sequence[int] = (),
    ) -> None:
        """Begin a search; see `beam_search` for the arguments."""
        assert width > 0
        assert max_tokens > 0
        self.ended = False
        self._model, self._execution = model, execution
        self._prompt, self._length = list(prompt), len(prompt)
        self._source = source
        self._width, self._max_tokens = width, max_tokens
        self._vocab_size, self._stop = vocab_size, stop_tokens
        self._penalty = length_penalty
        self._device = model.device
        self._cache: TextCache | None = None
        self._beams = [_Open()]
        self._found: list[Beam] = []

    def step(self) -> None:
        """Extend every text by a token; without effect at the end.

        Raises:
            RunError: The model's logits are not finite.
        """
        if self.ended:
            return
        with self._execution.passes():
            hidden = self._pass()
            logprobs_WV = _logprobs(self._model.logits(hidden[:, -1]), self._vocab_size)
            order = self._extend(logprobs_WV)
            self.ended = self._is_complete()
            if self.ended:
                self._cache = None
            else:
                assert self._cache is not None
                self._cache.select(order, self._length)
            self._execution.step_boundary()

    def best(self) -> list[Beam]:
        """Return the texts found, the best one first; open ones too after the last token."""
        found = self._found
        if len(found) < self._width or self._reached_length:
            found = found + [one.closed(self._penalty, finished=False) for one in self._beams]
        return _sorted(found, self._width)

    def _pass(self) -> Tensor:
        """Return the hidden states of the prompt, or of each text's last token."""
        if self._cache is None:
            self._cache = self._model.new_cache(compute_dtype(self._model))
            self._cache.reserve(self._width, self._length + self._max_tokens - 1)
            set_source(self._cache, 0, self._source)
            tokens, view = [self._prompt], self._cache.first_tokens([0], self._length)
        else:
            tokens = [[one.tokens[-1]] for one in self._beams]
            view = self._cache.next_tokens([self._length] * len(tokens))
            self._length += 1
        hidden: Tensor = self._model(torch.tensor(tokens, device=self._device), view)
        return hidden

    def _extend(self, logprobs_WV: Tensor) -> list[int]:
        """Take the best candidates; return the text that each of the new ones continues."""
        order: list[int] = []
        following: list[_Open] = []
        # Each text has as many candidates that end it as there are stop tokens.
        count = (1 + max(len(self._stop), 1)) * self._width
        candidates = _best(self._beams, logprobs_WV, count)
        for rank, (row, token, logprob) in enumerate(candidates):
            beam = self._beams[row].extended(token, logprob)
            if token in self._stop:
                if rank < self._width:
                    self._found.append(beam.closed(self._penalty, finished=True))
            elif len(following) < self._width:
                order.append(row)
                following.append(beam)
        self._beams, self._found = following, _sorted(self._found, self._width)
        return order

    def _is_complete(self) -> bool:
        if not self._beams or self._reached_length:
            return True
        best = self._beams[0]
        possible = best.total / len(best.tokens) ** self._penalty
        return len(self._found) == self._width and self._found[-1].score >= possible

    @property
    def _reached_length(self) -> bool:
        return bool(self._beams) and len(self._beams[0].tokens) == self._max_tokens


def beam_search(
    model: TextModel,
    prompt: Sequence[int],
    *,
    width: int,
    max_tokens: int,
    vocab_size: int,
    stop_tokens: frozenset[int] = frozenset(),
    length_penalty: float = 1.0,
    execution: Execution = PLAIN,
    source: Sequence[int] = (),
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
        execution: Context of the passes, and what follows each token.
        source: Token ids of the encoder's input; empty for a model without an encoder.

    Raises:
        RunError: The model's logits are not finite.
    """
    search = BeamSearch(
        model,
        prompt,
        width=width,
        max_tokens=max_tokens,
        vocab_size=vocab_size,
        stop_tokens=stop_tokens,
        length_penalty=length_penalty,
        execution=execution,
        source=source,
    )
    with execution.passes():
        while not search.ended:
            search.step()
    return search.best()


def _sorted(beams: Sequence[Beam], width: int) -> list[Beam]:
    """Return the best texts, the best one first."""
    return sorted(beams, key=lambda one: -one.score)[:width]


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
