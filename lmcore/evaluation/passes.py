"""Passes of fixed shapes: the requests that are computed together.  Torch-free.

A kernel may add numbers in another order for another number of rows.  So the width of a sequence
follows from its own length, the number of sequences of a pass from their width, and missing ones
are filled up: the result of a request does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = [
    "ACCELERATOR_BLOCK",
    "BLOCK",
    "HELD_TOKENS",
    "AnyPass",
    "Pass",
    "Pending",
    "Scored",
    "Shapes",
    "SharedPass",
]

BLOCK = 512
"""Tokens of a pass on the CPU, where more are no faster."""
ACCELERATOR_BLOCK = 4096
"""Tokens of a pass on other devices."""
_STEP = 16
_ANSWER_WIDTHS = (4, 8)
_LEAST_ANSWERS = 8
_ANSWER_SHARE = 32
HELD_TOKENS = 1 << 17
"""Tokens of requests that wait for others of their width."""
_K = TypeVar("_K", bound=Hashable)


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

    @property
    def length(self) -> int:
        """Number of tokens that the model reads."""
        return len(self.context) + len(self.targets) - 1


@dataclass(frozen=True)
class Pass:
    """Requests that are computed together, each with its context.

    Attributes:
        requests: The requests, at most *rows*.
        width: Tokens of a sequence, with padding.
        rows: Sequences of the pass, filled ones included.
    """

    requests: tuple[Scored, ...]
    width: int
    rows: int


@dataclass(frozen=True)
class SharedPass:
    """Requests with few contexts, which are computed once.

    Attributes:
        requests: The requests, in groups with the same context.
        width: Tokens of a context, with padding.
        rows: Contexts of the pass, filled ones included.
    """

    requests: tuple[Scored, ...]
    width: int
    rows: int


AnyPass = Pass | SharedPass


@dataclass(frozen=True)
class Shapes:
    """Sizes of passes.

    Attributes:
        block: Tokens of a pass; a longer sequence is a pass alone.
        positions: Most tokens that the model reads.
    """

    block: int
    positions: int

    def width(self, length: int) -> int:
        """Return the width of a sequence: at most an eighth more than its length, from 128 on.

        Args:
            length: Number of its tokens.
        """
        step = max(_STEP, 1 << max(0, (length - 1).bit_length() - 4))
        return min(-(-length // step) * step, self.positions)

    def answer_width(self, length: int) -> int:
        """Return the width of an answer that is read after its context; 0 if it is not read."""
        if not length:
            return 0
        return next((one for one in _ANSWER_WIDTHS if length <= one), self.width(length))

    def rows(self, width: int) -> int:
        """Return the number of sequences of a pass."""
        return max(1, self.block // width)

    def answer_rows(self, context: int, width: int) -> int:
        """Return the number of answers of a pass over keys of their contexts.

        Args:
            context: Width of the contexts, whose keys are copied for each answer.
            width: Width of the answers.
        """
        # More rows would be filled up: a few contexts have few answers of a width.
        most = self.block // max(_ANSWER_SHARE, width)
        return max(_LEAST_ANSWERS, min(4 * self.block // (context + width), most))

    def may_share(self, requests: Sequence[Scored]) -> bool:
        """Return True if answers to one context can be computed after it, all padded."""
        width = self.width(len(requests[0].context))
        longest = max(len(one.targets) for one in requests) - 1
        return width + self.answer_width(longest) <= self.positions

    def shared(
        self, groups: Iterable[tuple[list[_K], Sequence[Scored]]]
    ) -> Iterator[tuple[list[_K], SharedPass]]:
        """Yield the passes of groups of requests with one context each, the longest first.

        Args:
            groups: Keys and requests of each group.
        """

        def order(group: tuple[list[_K], Sequence[Scored]]) -> tuple[int, tuple[int, ...]]:
            context = group[1][0].context
            return -self.width(len(context)), context

        keys: list[_K] = []
        held: list[Scored] = []
        width = count = 0
        for own, requests in sorted(groups, key=order):
            wide = self.width(len(requests[0].context))
            if count and (wide != width or count == self.rows(width)):
                yield keys, SharedPass(tuple(held), width, self.rows(width))
                keys, held, count = [], [], 0
            width, count = wide, count + 1
            keys += own
            held += requests
        if count:
            yield keys, SharedPass(tuple(held), width, self.rows(width))


class Pending(Generic[_K]):
    """Requests that wait until there are enough of their width for a pass."""

    def __init__(self, shapes: Shapes, tokens: int = HELD_TOKENS) -> None:
        """Hold nothing yet.

        Args:
            shapes: Sizes of passes.
            tokens: Tokens that may wait; when there are more, the width that waits longest is a
                pass, filled up.
        """
        self._shapes, self._most = shapes, tokens
        self._held: dict[int, tuple[list[_K], list[Scored]]] = {}
        self._tokens = 0

    def add(self, key: _K, request: Scored) -> Iterator[tuple[list[_K], Pass]]:
        """Yield the passes that a further request completes.

        Args:
            key: Name of the request for the caller.
            request: The request.
        """
        width = self._shapes.width(request.length)
        keys, requests = self._held.setdefault(width, ([], []))
        keys.append(key)
        requests.append(request)
        self._tokens += width
        if len(requests) == self._shapes.rows(width):
            yield self._taken(width)
        while self._tokens > self._most:
            yield self._taken(next(iter(self._held)))

    def flush(self) -> Iterator[tuple[list[_K], Pass]]:
        """Yield the passes of all requests that wait, filled up."""
        while self._held:
            yield self._taken(next(iter(self._held)))

    def _taken(self, width: int) -> tuple[list[_K], Pass]:
        keys, requests = self._held.pop(width)
        self._tokens -= width * len(requests)
        return keys, Pass(tuple(requests), width, self._shapes.rows(width))
