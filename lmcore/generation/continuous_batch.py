"""`ContinuousBatch`: continues many requests together, each in its own time (continuous batching).

A step generates one token of every running request (decode), then takes the prompts of new
requests in chunks and generates their first token (prefill).  Requests join and leave between
steps.  Each has a slot of the key-value cache; the slots in use are the first ones.

Shapes: B requests of a pass, S tokens, H hidden, V padded vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmcore.generation.next_token import extend, probabilities
from lmcore.generation.request import Continuation, Request
from lmcore.generation.sampling.logits import new_generator
from lmcore.inference.text_model import PLAIN, Execution, compute_dtype, set_source

if TYPE_CHECKING:
    from lmcore.inference.text_model import TextCache, TextModel

__all__ = ["ContinuousBatch"]

_PREFILL_TOKENS = 2048
"""Tokens of a prefill pass while no request waits for its next token."""
_SHARED_PREFILL_TOKENS = 128
"""Tokens of a prefill pass between the tokens of other requests: they wait for it."""
_MAX_PADDING = 1 / 4
"""Largest share of padding among the tokens of a prefill pass."""
_LOGIT_ROWS = 256
"""Positions of a prompt whose logits are in memory at once."""


@dataclass(eq=False)
class _Slot:
    """Request that has memory in the cache.

    Attributes:
        continuation: The request and its tokens.
        arrival: Number of requests that had a slot before.
        length: Number of tokens in the cache.
        next_token: Token to feed next; None: the prompt is not complete.
    """

    continuation: Continuation
    arrival: int
    length: int = 0
    next_token: int | None = None


def _needed(request: Request) -> int:
    """Return the positions of a whole text; the last generated token needs none."""
    return len(request.prompt) + max(request.max_tokens - 1, 0)


class ContinuousBatch:
    """Continuation of requests by one model.

    Not thread-safe: one thread calls all methods.
    """

    def __init__(
        self,
        model: TextModel,
        *,
        vocab_size: int,
        max_requests: int = 16,
        execution: Execution = PLAIN,
    ) -> None:
        """Take a model in evaluation mode.

        Args:
            model: Model with its weights loaded; built with *masked* if requests of different
                lengths are to be decoded together.
            vocab_size: Size of the vocabulary without padding, which is never generated.
            max_requests: Largest number of requests that are decoded together; others wait.
            execution: Context of the passes, and what follows each step.
        """
        assert model.causal, "generation needs causal attention"
        self._model, self._vocab_size = model, vocab_size
        self._max_requests = max_requests
        self._execution = execution
        self._device = model.device
        self._waiting: deque[Continuation] = deque()
        self._slots: list[_Slot] = []
        self._num_admitted = 0
        self._cache: TextCache | None = None

    def add(self, request: Request) -> Continuation:
        """Queue a request and return its continuation, which `step` extends.

        The request must fit the model's vocabulary and positions; see `require_room`.
        """
        continuation = Continuation(request, new_generator(request.seed))
        if request.max_tokens == 0 and not request.prompt_logprobs:
            continuation.finish_reason = "length"
        else:
            self._waiting.append(continuation)
        return continuation

    def cancel(self, continuation: Continuation) -> None:
        """End a request before the next step; without effect if it has ended."""
        if not continuation.ended:
            continuation.finish_reason = "cancelled"
            self._waiting = deque(one for one in self._waiting if not one.ended)

    @property
    def num_running(self) -> int:
        """Number of requests that have a slot."""
        return len(self._slots)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._waiting)

    def step(self) -> list[Continuation]:
        """Generate at most one token of each request; return the continuations that changed.

        The list is empty if there is nothing to do, or if a step took only a part of a prompt.
        """
        with self._execution.passes():
            return self._step()

    def run(self, on_step: Callable[[Sequence[Continuation]], None] | None = None) -> None:
        """Step until every request has ended, within one context of the precision.

        Args:
            on_step: Called with the continuations that each step changed.
        """
        with self._execution.passes():
            while self._waiting or self._slots:
                changed = self._step()
                if on_step is not None:
                    on_step(changed)

    def _step(self) -> list[Continuation]:
        self._remove_ended()
        decoded = self._decode()
        self._remove_ended()
        refused = self._admit()
        begun = self._prefill()
        self._remove_ended()
        self._execution.step_boundary()
        return decoded + refused + begun

    def _admit(self) -> list[Continuation]:
        """Give slots to waiting requests; return the ones that end for lack of memory."""
        room = self._max_requests - len(self._slots)
        new = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        if not new:
            return []
        try:
            self._give_slots(new)
        except RuntimeError:  # torch's error of an allocation, on any device
            return [one for one in new if not self._fits(one)]
        return []

    def _fits(self, continuation: Continuation) -> bool:
        """Give a request a slot; end it with the error if there is no memory for its keys."""
        try:
            self._give_slots([continuation])
        except RuntimeError as error:
            continuation.error = error
        return continuation.error is None

    def _give_slots(self, new: Sequence[Continuation]) -> None:
        """Provide memory for some requests and encode their sources, then add their slots.

        Raises:
            RuntimeError: There is not enough; nothing has changed.
        """
        if self._cache is None:
            self._cache = self._model.new_cache(compute_dtype(self._model))
        elif all(slot.length == 0 for slot in self._slots):
            self._cache.release()  # what earlier requests needed
        requests = [slot.continuation.request for slot in self._slots]
        requests += [one.request for one in new]
        slots, capacity = len(requests), max(map(_needed, requests))
        # A growing cache is copied: it grows by factors.
        if 0 < self._cache.num_slots < slots:
            slots = max(slots, min(2 * self._cache.num_slots, self._max_requests))
        if 0 < self._cache.capacity < capacity:
            positions = self._model.shape.max_position_embeddings
            capacity = max(capacity, min(2 * self._cache.capacity, positions))
        self._cache.reserve(slots, capacity)
        for number, one in enumerate(new, len(self._slots)):
            set_source(self._cache, number, one.request.source)
        for one in new:
            self._slots.append(_Slot(one, self._num_admitted))
            self._num_admitted += 1

    def _remove_ended(self) -> None:
        """Free the slots of ended requests; the last ones move into them."""
        for number in reversed(range(len(self._slots))):
            slot = self._slots[number]
            if not slot.continuation.ended:
                continue
            assert self._cache is not None
            if slot.continuation.error is not None or slot.next_token is None:
                self._cache.clear(number)  # its numbers are not known to be finite
            last = self._slots.pop()
            if number < len(self._slots):
                self._slots[number] = last
                self._cache.move(len(self._slots), number, last.length)

    def _prefill(self) -> list[Continuation]:
        """Take a chunk of the prompts that are not complete."""
        incomplete = [number for number, slot in enumerate(self._slots) if slot.next_token is None]
        if not incomplete:
            return []
        alone = len(incomplete) == len(self._slots)
        budget = _PREFILL_TOKENS if alone else _SHARED_PREFILL_TOKENS
        begun = [number for number in incomplete if self._slots[number].length][:1]
        taken = begun or self._taken_together(incomplete, budget)
        try:
            if begun:
                return self._prefill_further(begun[0], budget)
            return self._prefill_first(taken, budget)
        except RuntimeError as error:  # such as too little memory: the others continue
            failed = [self._slots[number].continuation for number in taken]
            for one in failed:
                one.error = error
            return failed

    def _prefill_first(self, taken: Sequence[int], budget: int) -> list[Continuation]:
        """Take the first tokens of several prompts in one pass, padded to the same length."""
        assert self._cache is not None
        widths = [min(len(self._prompt(number)), budget) for number in taken]
        width = max(widths)
        tokens = [
            [*self._prompt(number)[:own], *[0] * (width - own)]
            for number, own in zip(taken, widths, strict=True)
        ]
        view = self._cache.first_tokens(taken, width)
        hidden_BSH = self._model(torch.tensor(tokens, device=self._device), view)
        return self._after_chunk(taken, widths, hidden_BSH)

    def _taken_together(self, numbers: Sequence[int], budget: int) -> list[int]:
        """Return the slots of the oldest prompt and of prompts of about its length."""
        lengths = {number: len(self._prompt(number)) for number in numbers}
        oldest = min(numbers, key=lambda number: self._slots[number].arrival)
        taken, width, total = [oldest], lengths[oldest], lengths[oldest]
        near = sorted(numbers, key=lambda number: abs(lengths[number] - lengths[oldest]))
        for number in near:
            if number == oldest:
                continue
            wider = max(width, lengths[number])
            padded, tokens = (len(taken) + 1) * wider, total + lengths[number]
            if padded > budget or padded - tokens > _MAX_PADDING * padded:
                break
            taken.append(number)
            width, total = wider, tokens
        return taken

    def _prefill_further(self, number: int, budget: int) -> list[Continuation]:
        """Take the next chunk of a long prompt."""
        assert self._cache is not None
        start = self._slots[number].length
        chunk = list(self._prompt(number)[start : start + budget])
        view = self._cache.further_tokens(number, start, len(chunk))
        hidden_1SH = self._model(torch.tensor([chunk], device=self._device), view)
        return self._after_chunk([number], [len(chunk)], hidden_1SH)

    def _after_chunk(
        self, numbers: Sequence[int], widths: Sequence[int], hidden_BSH: Tensor
    ) -> list[Continuation]:
        """Note the tokens of a prefill pass; sample after the prompts that are complete."""
        complete = []
        for row, (number, width) in enumerate(zip(numbers, widths, strict=True)):
            slot = self._slots[number]
            if slot.continuation.request.prompt_logprobs:
                self._score_prompt(slot, hidden_BSH[row, :width])
            slot.length += width
            if slot.length == len(self._prompt(number)):
                complete.append((row, width - 1, slot))
        if not complete:
            return []
        rows, places, slots = zip(*complete, strict=True)
        return self._sample(self._model.logits(hidden_BSH[list(rows), list(places)]), slots)

    def _score_prompt(self, slot: _Slot, hidden_SH: Tensor) -> None:
        """Report the probability of the next token at each place of a chunk."""
        continuation, start = slot.continuation, slot.length + 1
        following = list(continuation.request.prompt[start : start + len(hidden_SH)])
        for begin in range(0, len(following), _LOGIT_ROWS):
            tokens = following[begin : begin + _LOGIT_ROWS]
            logits = self._model.logits(hidden_SH[begin : begin + len(tokens)])
            continuation.prompt_logprobs += probabilities(
                logits[:, : self._vocab_size], tokens, continuation.request.top_logprobs or 0
            )

    def _decode(self) -> list[Continuation]:
        """Feed the last token of every request whose prompt is complete."""
        fed = [number for number, slot in enumerate(self._slots) if slot.next_token is not None]
        if not fed:
            return []
        assert self._cache is not None
        # Slots without a token to feed take part with any: it is overwritten.
        tokens = [slot.next_token if slot.next_token is not None else 0 for slot in self._slots]
        lengths = [slot.length for slot in self._slots]
        view = self._cache.next_tokens(lengths)
        hidden_B1H = self._model(torch.tensor(tokens, device=self._device)[:, None], view)
        hidden_BH = hidden_B1H[:, 0]
        if len(fed) < len(self._slots):
            hidden_BH = hidden_BH[fed]
        slots = [self._slots[number] for number in fed]
        for slot in slots:
            slot.length += 1
        return self._sample(self._model.logits(hidden_BH), slots)

    def _sample(self, logits_BV: Tensor, slots: Sequence[_Slot]) -> list[Continuation]:
        """Choose the next token of some requests; return their continuations."""
        continuations = [slot.continuation for slot in slots]
        tokens = extend(continuations, logits_BV, self._vocab_size)
        for slot, token in zip(slots, tokens, strict=True):
            slot.next_token = token
        return continuations

    def _prompt(self, number: int) -> Sequence[int]:
        return self._slots[number].continuation.request.prompt
