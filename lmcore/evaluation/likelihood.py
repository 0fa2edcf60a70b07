"""`Likelihoods`: log-probabilities of tokens after a context, many together.

Requests of similar length are one pass; logits are computed at the tokens that are asked for alone.
A context that several answers follow is computed once, if the model's cache allows it: its keys and
values are in the cache, and all answers are one more pass over it.

The passes follow from the requests and the tokens of a pass, not from the order of the requests.
Shapes: B sequences of a pass, S tokens, H hidden, N tokens that are asked for, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmcore.base.errors import RunError
from lmcore.evaluation.score import LogLikelihood
from lmcore.generation.text_model import BranchingCache, SourceCache, compute_dtype

if TYPE_CHECKING:
    from lmcore.generation.load import LoadedModel

__all__ = ["DEFAULT_TOKENS", "Likelihoods", "Scored"]

DEFAULT_TOKENS = 2048
"""Tokens of a pass."""
_NONE: Mapping[int, LogLikelihood] = MappingProxyType({})
_LOGIT_ROWS = 256
"""Rows of logits that are in memory at once."""


@dataclass(frozen=True)
class Scored:
    """Tokens whose log-probability is asked for.

    Attributes:
        context: Tokens before, at least one.
        targets: The tokens, at least one.
    """

    context: tuple[int, ...]
    targets: tuple[int, ...]

    @property
    def inputs(self) -> tuple[int, ...]:
        """Tokens that the model reads."""
        return (*self.context, *self.targets[:-1])


class Likelihoods:
    """Log-probabilities by one model.

    Attributes:
        positions: Most tokens that the model reads.
    """

    def __init__(self, loaded: LoadedModel, *, tokens: int = DEFAULT_TOKENS) -> None:
        """Take the model.

        Args:
            loaded: Causal language model.
            tokens: Tokens of a pass; a longer sequence is a pass alone.
        """
        self._model, self._execution, self._tokens = loaded.model, loaded.execution, tokens
        self._vocab_size = loaded.tokenizer.vocab_size
        self.positions = loaded.model.shape.max_position_embeddings
        self._cache: BranchingCache | None = None

    def of(
        self,
        requests: Sequence[Scored],
        done: Callable[[Mapping[int, LogLikelihood]], None] = lambda _found: None,
        known: Mapping[int, LogLikelihood] = _NONE,
    ) -> list[LogLikelihood]:
        """Return the log-likelihood of each request, in order.

        Args:
            requests: The requests; none reads more tokens than the model has positions.
            done: Called after each pass with its results by the number of the request.
            known: Results that are known, which are not computed.

        Raises:
            RunError: The model's logits are not finite.
        """
        contexts: dict[tuple[int, ...], list[int]] = {}
        for number, request in enumerate(requests):
            if number not in known:
                contexts.setdefault(request.context, []).append(number)
        found = dict(known)
        with self._execution.passes():
            cache = self._model.new_cache(compute_dtype(self._model))
            # Without its source, a decoder that reads one beside the text has no cache.
            if isinstance(cache, BranchingCache) and not isinstance(cache, SourceCache):
                self._cache = cache
            least = 2 if self._cache is not None else len(requests) + 1
            shared = [held for held in contexts.values() if len(held) >= least]
            alone = [one for held in contexts.values() if len(held) < least for one in held]
            for numbers in self._passes(requests, alone):
                made = self._alone(requests, numbers)
                found |= made
                done(made)
            for groups in self._shared_passes(requests, shared):
                made = self._after_contexts(requests, groups)
                found |= made
                done(made)
            self._cache = None
        return [found[number] for number in range(len(requests))]

    def _passes(self, requests: Sequence[Scored], numbers: Sequence[int]) -> Iterator[list[int]]:
        """Yield the requests of each pass, the longest first: they need the most memory."""

        def order(number: int) -> tuple[int, tuple[int, ...]]:
            inputs = requests[number].inputs
            return -len(inputs), inputs

        held: list[int] = []
        for number in sorted(numbers, key=order):
            longest = len(requests[held[0]].inputs) if held else 0
            if held and longest * (len(held) + 1) > self._tokens:
                yield held
                held = []
            held.append(number)
        if held:
            yield held

    def _alone(
        self, requests: Sequence[Scored], numbers: Sequence[int]
    ) -> dict[int, LogLikelihood]:
        """Return the log-likelihoods of requests without a common context, of one pass."""
        inputs = [requests[number].inputs for number in numbers]
        hidden_BSH = self._model(self._padded(inputs))
        rows: list[int] = []
        places: list[int] = []
        targets: list[tuple[int, ...]] = []
        for row, number in enumerate(numbers):
            request = requests[number]
            first = len(request.context) - 1
            rows += [row] * len(request.targets)
            places += range(first, first + len(request.targets))
            targets += [(token,) for token in request.targets]
        logprobs, greedy = self._scored(hidden_BSH[rows, places], targets)
        self._execution.step_boundary()
        return _joined(logprobs, greedy, {n: len(requests[n].targets) for n in numbers})

    def _shared_passes(
        self, requests: Sequence[Scored], groups: Sequence[list[int]]
    ) -> Iterator[list[list[int]]]:
        """Yield the groups of requests with one context each that are computed together."""

        def order(group: list[int]) -> tuple[int, tuple[int, ...]]:
            context = requests[group[0]].context
            return -len(context), context

        held: list[list[int]] = []
        for group in sorted(groups, key=order):
            both = [*held, group]
            longest = len(requests[both[0][0]].context)
            targets = max(len(requests[one].targets) for each in both for one in each)
            answers = sum(map(len, both))
            # The keys of a context are copied for each answer to it.
            size = max(longest * len(both), answers * targets, answers * (longest + targets) // 4)
            # Padding of the answer to the longest context must have positions, too.
            if held and (size > self._tokens or longest + targets - 1 > self.positions):
                yield held
                both = [group]
            held = both
        if held:
            yield held

    def _after_contexts(
        self, requests: Sequence[Scored], groups: Sequence[Sequence[int]]
    ) -> dict[int, LogLikelihood]:
        """Return the log-likelihoods of answers to some contexts, of two passes."""
        contexts = [requests[group[0]].context for group in groups]
        cache = self._cache
        assert cache is not None
        cache.reserve(len(contexts), max(map(len, contexts)))
        slots = list(range(len(contexts)))
        view = cache.first_tokens(slots, len(contexts[0]))
        hidden_BSH = self._model(self._padded(contexts), view)
        rows = [row for row, group in enumerate(groups) for _ in group]
        numbers = [number for group in groups for number in group]
        last = hidden_BSH[slots, [len(one) - 1 for one in contexts]]
        first = [[requests[number].targets[0] for number in group] for group in groups]
        logprobs, greedy = self._scored(last, first)
        self._execution.step_boundary()
        sizes = dict.fromkeys(numbers, 1)
        found = _joined(logprobs, greedy, sizes)
        longer = [
            (row, n) for row, n in zip(rows, numbers, strict=True) if len(requests[n].targets) > 1
        ]
        if not longer:
            return found
        inputs = [requests[number].targets[:-1] for _, number in longer]
        view = cache.branches(
            [row for row, _ in longer],
            [len(contexts[row]) for row, _ in longer],
            max(map(len, inputs)),
        )
        hidden_BSH = self._model(self._padded(inputs), view)
        rows = [row for row, one in enumerate(inputs) for _ in one]
        places = [place for one in inputs for place in range(len(one))]
        targets = [(token,) for _, number in longer for token in requests[number].targets[1:]]
        logprobs, greedy = self._scored(hidden_BSH[rows, places], targets)
        self._execution.step_boundary()
        rest = _joined(logprobs, greedy, {n: len(requests[n].targets) - 1 for _, n in longer})
        for number, one in rest.items():
            before = found[number]
            found[number] = LogLikelihood(
                before.logprob + one.logprob, before.greedy and one.greedy, 1 + one.tokens
            )
        return found

    def _padded(self, inputs: Sequence[Sequence[int]]) -> Tensor:
        """Return token ids of sequences, padded at the end, to which no other token attends."""
        width = max(map(len, inputs))
        padded = [[*one, *([0] * (width - len(one)))] for one in inputs]
        return torch.tensor(padded, device=self._model.device)

    def _scored(
        self, hidden_NH: Tensor, targets: Sequence[Sequence[int]]
    ) -> tuple[list[float], list[bool]]:
        """Return the log-probability of each target, and whether it is the most probable token.

        Args:
            hidden_NH: Hidden states.
            targets: Token ids that may follow each of them.
        """
        values: list[float] = []
        greedy: list[bool] = []
        for start in range(0, len(hidden_NH), _LOGIT_ROWS):
            logits_NV = self._model.logits(hidden_NH[start : start + _LOGIT_ROWS])
            logprobs_NV = logits_NV[:, : self._vocab_size].float().log_softmax(dim=-1)
            best_N = logprobs_NV.argmax(dim=-1)
            following = targets[start : start + _LOGIT_ROWS]
            rows = [row for row, tokens in enumerate(following) for _ in tokens]
            row = torch.tensor(rows, device=logits_NV.device)
            token = torch.tensor(
                [one for tokens in following for one in tokens], device=logits_NV.device
            )
            values += logprobs_NV[row, token].tolist()
            greedy += (best_N[row] == token).tolist()
        if any(math.isnan(value) for value in values):
            raise RunError(
                "the model's logits are not finite",
                why="the weights are not finite, or the precision overflowed",
                hint="try `--precision fp32`, or an earlier checkpoint",
            )
        return values, greedy


def _joined(
    logprobs: Sequence[float], greedy: Sequence[bool], sizes: dict[int, int]
) -> dict[int, LogLikelihood]:
    """Return the log-likelihood of each request from its tokens', in the same order."""
    found, start = {}, 0
    for number, size in sizes.items():
        end = start + size
        found[number] = LogLikelihood(sum(logprobs[start:end]), all(greedy[start:end]), size)
        start = end
    return found
