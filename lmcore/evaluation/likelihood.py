"""`Likelihoods`: log-probabilities of tokens after a context, many together.

Logits are computed at the tokens that are asked for alone.  A context that several answers follow
is computed once, if the model's cache allows it: its keys and values are in the cache, and the
answers are further passes over it.

Every pass has one of a few shapes (`passes`), whatever else is asked for, so that the result of a
request is the same bit by bit.
Shapes: B sequences of a pass, S tokens, H hidden, N rows of hidden states, M targets, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor

from lmcore.base.errors import RunError
from lmcore.evaluation.passes import (
    ACCELERATOR_BLOCK,
    BLOCK,
    AnyPass,
    Pass,
    Pending,
    Scored,
    Shapes,
    SharedPass,
)
from lmcore.evaluation.score import LogLikelihood
from lmcore.inference.text_model import BranchingCache, SourceCache, compute_dtype

if TYPE_CHECKING:
    from lmcore.inference.load import LoadedModel

__all__ = ["DEFAULT_TOKENS", "Likelihoods", "PassPool", "Scored"]

DEFAULT_TOKENS = 2048
"""Tokens whose results are read together."""
_NONE: Mapping[int, LogLikelihood] = MappingProxyType({})
_LOGIT_ROWS = 64
"""Rows of logits that are computed together."""
_K = TypeVar("_K", bound=Hashable)


@dataclass(frozen=True)
class _Found:
    """Log-probabilities of targets, on the device.

    Attributes:
        owners: Number of the request of each target.
        logprobs_M: Log-probability of each.
        greedy_M: True if it is the most probable token.
    """

    owners: Sequence[int]
    logprobs_M: Tensor
    greedy_M: Tensor


class PassPool(Protocol):
    """Models that compute passes at the same time, such as replicas in other processes."""

    @property
    def size(self) -> int:
        """Number of models."""
        ...

    def compute(
        self,
        passes: Sequence[AnyPass],
        own: Callable[[Sequence[AnyPass]], list[list[LogLikelihood]]],
    ) -> list[list[LogLikelihood]]:
        """Return the results of the requests of each pass.

        Args:
            passes: The passes.
            own: Function that computes passes by the model of the caller.
        """
        ...


class Likelihoods:
    """Log-probabilities by one model.

    Attributes:
        positions: Most tokens that the model reads.
        shapes: Sizes of the passes.
    """

    def __init__(
        self, loaded: LoadedModel, *, tokens: int = DEFAULT_TOKENS, pool: PassPool | None = None
    ) -> None:
        """Take the model.

        Args:
            loaded: Causal language model.
            tokens: Tokens whose results are read from the device together; no result depends on
                it.
            pool: Models that compute the passes; None: this one alone.
        """
        self._model, self._execution = loaded.model, loaded.execution
        self._vocab_size = loaded.tokenizer.vocab_size
        self.positions = loaded.model.shape.max_position_embeddings
        block = BLOCK if loaded.model.device.type == "cpu" else ACCELERATOR_BLOCK
        self.shapes = Shapes(block, self.positions)
        self._pool = pool
        self._together = max(1, tokens // block) * (1 if pool is None else pool.size)
        self._cache: BranchingCache | None = None

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Let passes be computed within the context: in the precision, with a cache."""
        with self._execution.passes():
            cache = self._model.new_cache(compute_dtype(self._model))
            # Without its source, a decoder that reads one beside the text has no cache.
            if isinstance(cache, BranchingCache) and not isinstance(cache, SourceCache):
                self._cache = cache
            try:
                yield
            finally:
                self._cache = None

    def of(
        self,
        requests: Sequence[Scored],
        done: Callable[[Mapping[int, LogLikelihood]], None] = lambda _found: None,
        known: Mapping[int, LogLikelihood] = _NONE,
    ) -> list[LogLikelihood]:
        """Return the log-likelihood of each request, in order.

        Args:
            requests: The requests; none reads more tokens than the model has positions.
            done: Called after some passes with their results by the number of the request.
            known: Results that are known, which are not computed.

        Raises:
            RunError: The model's logits are not finite.
        """
        found = dict(known)
        with self.ready():
            for made in self.run(self._passes(requests, known)):
                found |= made
                done(made)
        return [found[number] for number in range(len(requests))]

    def run(self, passes: Iterable[tuple[list[_K], AnyPass]]) -> Iterator[dict[_K, LogLikelihood]]:
        """Yield the results of passes; only within `ready`.

        Args:
            passes: Keys of the requests of each pass, and the pass; taken as they are needed.

        Raises:
            RunError: The model's logits are not finite.
        """
        left = iter(passes)
        while batch := list(itertools.islice(left, self._together)):
            asked = [one for _, one in batch]
            pool = self._pool
            found = self.compute(asked) if pool is None else pool.compute(asked, self.compute)
            yield {
                key: value
                for (keys, _), values in zip(batch, found, strict=True)
                for key, value in zip(keys, values, strict=True)
            }

    def compute(self, passes: Sequence[AnyPass]) -> list[list[LogLikelihood]]:
        """Return the results of the requests of each pass, by this model.

        Args:
            passes: The passes, which are queued on the device together.

        Raises:
            RunError: The model's logits are not finite.
        """
        found = []
        for one in passes:
            found.append(self._alone(one) if isinstance(one, Pass) else self._after_contexts(one))
            self._execution.step_boundary()
        # One wait for the device.
        parts = [part for each in found for part in each]
        logprobs = torch.cat([part.logprobs_M for part in parts]).tolist()
        greedy = torch.cat([part.greedy_M for part in parts]).tolist()
        if any(math.isnan(value) for value in logprobs):
            raise RunError(
                "the model's logits are not finite",
                why="the weights are not finite, or the precision overflowed",
                hint="try `--precision fp32`, or an earlier checkpoint",
            )
        values = iter(zip(logprobs, greedy, strict=True))
        return [
            _joined(one.requests, [owner for part in each for owner in part.owners], values)
            for one, each in zip(passes, found, strict=True)
        ]

    def _passes(
        self, requests: Sequence[Scored], known: Mapping[int, LogLikelihood]
    ) -> Iterator[tuple[list[int], AnyPass]]:
        """Yield the passes of requests, the longest first: they need the most memory."""
        contexts: dict[tuple[int, ...], list[int]] = {}
        for number, request in enumerate(requests):
            contexts.setdefault(request.context, []).append(number)
        alone: list[int] = []
        groups = []
        # Known ones are counted: a request is computed in the same way after a stop.
        for held in contexts.values():
            left = [number for number in held if number not in known]
            own = [requests[number] for number in held]
            if self._cache is None or len(held) < 2 or not self.shapes.may_share(own):
                alone += left
            elif left:
                groups.append((left, [requests[number] for number in left]))

        def order(number: int) -> tuple[int, tuple[int, ...]]:
            return -requests[number].length, requests[number].inputs

        pending: Pending[int] = Pending(self.shapes)
        for number in sorted(alone, key=order):
            yield from pending.add(number, requests[number])
        yield from pending.flush()
        yield from self.shapes.shared(groups)

    def _alone(self, one: Pass) -> list[_Found]:
        """Return the log-probabilities of requests of a pass, each with its context."""
        hidden_BSH = self._model(self._padded([each.inputs for each in one.requests], one))
        rows: list[int] = []
        places: list[int] = []
        targets: list[int] = []
        for row, request in enumerate(one.requests):
            first = len(request.context) - 1
            rows += [row] * len(request.targets)
            places += range(first, first + len(request.targets))
            targets += request.targets
        return [self._scored(hidden_BSH[rows, places], range(len(rows)), targets, rows)]

    def _after_contexts(self, one: SharedPass) -> list[_Found]:
        """Return the log-probabilities of answers to some contexts."""
        contexts: list[tuple[int, ...]] = []
        slots: list[int] = []
        for request in one.requests:
            if not contexts or contexts[-1] != request.context:
                contexts.append(request.context)
            slots.append(len(contexts) - 1)
        cache = self._cache
        assert cache is not None
        if (cache.num_slots, cache.capacity) != (one.rows, one.width):
            cache.release()
            cache.reserve(one.rows, one.width)
        view = cache.first_tokens(list(range(one.rows)), one.width)
        hidden_BSH = self._model(self._padded(contexts, one), view)
        last_BH = hidden_BSH[list(range(len(contexts))), [len(each) - 1 for each in contexts]]
        owners = list(range(len(one.requests)))
        first = [request.targets[0] for request in one.requests]
        found = [self._scored(last_BH, slots, first, owners)]
        by_width: dict[int, list[int]] = {}
        for owner, request in enumerate(one.requests):
            if width := self.shapes.answer_width(len(request.targets) - 1):
                by_width.setdefault(width, []).append(owner)
        for width, longer in by_width.items():
            rows = self.shapes.answer_rows(one.width, width)
            for start in range(0, len(longer), rows):
                some = longer[start : start + rows]
                answers = Pass(tuple(one.requests[owner] for owner in some), width, rows + 2)
                found.append(self._answers(answers, some, [slots[owner] for owner in some], one))
        return found

    def _answers(
        self, one: Pass, owners: Sequence[int], slots: Sequence[int], contexts: SharedPass
    ) -> _Found:
        """Return the log-probabilities of all tokens but the first of answers to contexts.

        Two rows are filled up at least: one with all keys of the slots, one with a single key.
        So the keys are as many in each pass, and always masked.
        """
        cache = self._cache
        assert cache is not None
        missing = one.rows - len(owners)
        lengths = [len(request.context) for request in one.requests]
        lengths += [contexts.width, *([1] * (missing - 1))]
        view = cache.branches([*slots, *([0] * missing)], lengths, one.width)
        inputs = [request.targets[:-1] for request in one.requests]
        hidden_BSH = self._model(self._padded(inputs, one), view)
        rows = [row for row, each in enumerate(inputs) for _ in each]
        places = [place for each in inputs for place in range(len(each))]
        targets = [token for request in one.requests for token in request.targets[1:]]
        belongs = [owners[row] for row in rows]
        return self._scored(hidden_BSH[rows, places], range(len(rows)), targets, belongs)

    def _padded(self, inputs: Sequence[Sequence[int]], shape: AnyPass) -> Tensor:
        """Return token ids of sequences, padded at the end, to which no other token attends."""
        padded = [[*one, *([0] * (shape.width - len(one)))] for one in inputs]
        padded += [[0] * shape.width] * (shape.rows - len(inputs))
        return torch.tensor(padded, device=self._model.device)

    def _scored(
        self,
        hidden_NH: Tensor,
        rows: Sequence[int],
        targets: Sequence[int],
        owners: Sequence[int],
    ) -> _Found:
        """Return the log-probability of each target, and whether it is the most probable token.

        Args:
            hidden_NH: Hidden states.
            rows: Hidden state before each target, ascending.
            targets: Token ids.
            owners: See `_Found`.
        """
        device = hidden_NH.device
        row_M = torch.tensor(list(rows), device=device)
        target_M = torch.tensor(targets, device=device)
        logprobs, greedy, begin = [], [], 0
        for start in range(0, len(hidden_NH), _LOGIT_ROWS):
            part_NH = hidden_NH[start : start + _LOGIT_ROWS]
            missing = _LOGIT_ROWS - len(part_NH)
            if missing:
                filled = part_NH.new_zeros(missing, part_NH.shape[-1])
                part_NH = torch.cat([part_NH, filled])
            logits_NV = self._model.logits(part_NH)
            logprobs_NV = logits_NV[:, : self._vocab_size].float().log_softmax(dim=-1)
            end = begin
            while end < len(rows) and rows[end] < start + _LOGIT_ROWS:
                end += 1
            own_M, token_M = row_M[begin:end] - start, target_M[begin:end]
            logprobs.append(logprobs_NV[own_M, token_M])
            greedy.append(logprobs_NV.argmax(dim=-1)[own_M] == token_M)
            begin = end
        return _Found(owners, torch.cat(logprobs), torch.cat(greedy))


def _joined(
    requests: Sequence[Scored], owners: Sequence[int], values: Iterator[tuple[float, bool]]
) -> list[LogLikelihood]:
    """Return the log-likelihood of each request from its tokens', in the order of *owners*."""
    logprobs, greedy = [0.0] * len(requests), [True] * len(requests)
    for owner in owners:
        logprob, best = next(values)
        logprobs[owner] += logprob
        greedy[owner] = greedy[owner] and best
    return [
        LogLikelihood(logprob, best, len(request.targets))
        for request, logprob, best in zip(requests, logprobs, greedy, strict=True)
    ]
