"""Evaluation of texts as they are read: in memory are the requests that wait, not the files.

Requests are divided into chunks of some tokens, by which a stopped evaluation continues.  Results
come in the order of the passes; the record of an example is complete with its last window.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcore.base.errors import DataError
from lmcore.evaluation.exact_sum import ExactSum
from lmcore.evaluation.journal import Journal, requests_key
from lmcore.evaluation.passes import HELD_TOKENS, AnyPass, Pending, Scored
from lmcore.evaluation.score import LogLikelihood, Score, TextSize
from lmcore.evaluation.task import Example, Stream, Streamed, Text, TextFile, Tokens

if TYPE_CHECKING:
    from lmcore.evaluation.likelihood import Likelihoods
    from lmcore.evaluation.requests import RequestMaker

__all__ = ["TextScores", "score_texts"]

_CHUNK = 1 << 16
"""Tokens of the requests of a chunk."""
_SHOWN = 1000
"""Characters of a text in its record."""


class _Place(NamedTuple):
    """Place of a request: its example, its window, and its number in a chunk."""

    example: int
    window: int
    key: str
    number: int


@dataclass
class _Open:
    """Example whose results are not complete.

    Attributes:
        example: The example.
        size: Size of its text.
        windows: Number of its requests so far.
        missing: Number of them without a result.
        read: True if all of it is read.
        found: Result of each window, if records are written.
    """

    example: Streamed
    size: TextSize = field(default_factory=TextSize)
    windows: int = 0
    missing: int = 0
    read: bool = False
    found: dict[int, LogLikelihood] = field(default_factory=dict)

    def record(self, number: int) -> dict[str, Any]:
        """Return the record of the example of a number, from 0."""
        one = self.example
        about = {"text": one.text[:_SHOWN]} if isinstance(one, Text | Stream) else {}
        if isinstance(one, Text):
            about["original"] = one.original[:_SHOWN]
        elif isinstance(one, TextFile):
            about["file"] = str(one.path)
        elif isinstance(one, Tokens):
            about["document"] = one.place
        found = [self.found[window] for window in range(self.windows)]
        return {
            "example": number,
            **about,
            "words": self.size.words,
            "bytes": self.size.bytes,
            "logprobs": [each.logprob for each in found],
            "greedy": [each.greedy for each in found],
            "tokens": [each.tokens for each in found],
        }


@dataclass(frozen=True)
class TextScores:
    """Sums over all texts.

    Attributes:
        score: Score of all texts, as of one.
        count: Number of texts.
        seconds: Time of reading and of the passes.
    """

    score: Score
    count: int
    seconds: float


class _Texts:
    """Examples that are read, and the sums so far."""

    def __init__(
        self,
        examples: Iterable[Example],
        maker: RequestMaker,
        record: Callable[[dict[str, Any]], object] | None,
    ) -> None:
        self._examples, self._maker, self._record = examples, maker, record
        self._open: dict[int, _Open] = {}
        self._next = self.count = 0
        self._total, self._tokens, self._greedy = ExactSum(), 0, True
        self._size = TextSize()

    def requests(self) -> Iterator[tuple[int, int, Scored]]:
        """Yield the number of the example, of the window, and the request."""
        for number, example in enumerate(self._examples):
            if not isinstance(example, Streamed):
                raise DataError(
                    f"example {number + 1} is a `{type(example).__name__}` after texts",
                    hint="make two tasks",
                )
            self._open[number] = one = _Open(example)
            self.count += 1
            read = _counted(example, one.size)
            for window, request in enumerate(self._maker.windows_of(read)):
                one.windows += 1
                one.missing += 1
                yield number, window, request
            if isinstance(example, Text):
                one.size.add(example.original)
            elif isinstance(example, Stream):
                one.size.words = example.words
            one.read = True
            self._size.words += one.size.words
            self._size.bytes += one.size.bytes
            self._finish()

    def take(self, example: int, window: int, found: LogLikelihood) -> None:
        """Take the result of a request."""
        one = self._open[example]
        one.missing -= 1
        self._total.add(found.logprob)
        self._tokens += found.tokens
        self._greedy = self._greedy and found.greedy
        if self._record is not None:
            one.found[window] = found
        self._finish()

    def score(self) -> Score:
        """Return the score of all texts."""
        total = LogLikelihood(self._total.value, self._greedy, self._tokens)
        return Score((total,), words=self._size.words, bytes=self._size.bytes)

    def _finish(self) -> None:
        """Write the records of complete examples, in order."""
        while (one := self._open.get(self._next)) is not None and one.read and not one.missing:
            if self._record is not None:
                self._record(one.record(self._next))
            del self._open[self._next]
            self._next += 1


def _counted(example: Streamed, size: TextSize) -> Streamed:
    """Return an example whose file is counted while it is read."""
    if not isinstance(example, TextFile):
        return example

    def pieces() -> Iterator[str]:
        for piece in example.pieces():
            size.add(piece)
            yield piece

    return TextFile(example.path, pieces)


def score_texts(
    model: Likelihoods,
    examples: Iterable[Example],
    maker: RequestMaker,
    *,
    identity: str = "",
    journal: Journal | None = None,
    progress: Callable[[int, float], None] = lambda _done, _seconds: None,
    record: Callable[[dict[str, Any]], object] | None = None,
    held_tokens: int = HELD_TOKENS,
) -> TextScores:
    """Return the sums of the scores of texts.

    Args:
        model: The model.
        examples: The texts, taken as they are needed.
        maker: Makes the requests.
        identity: Text that differs for different models, for *journal*.
        journal: File of an earlier evaluation that was stopped, which is continued; None: there is
            none.
        progress: Called after some passes with the number of windows so far and the seconds.
        record: Called with the record of each text, in order; None: no records are made.
        held_tokens: Tokens of requests that may wait; no result depends on it.

    Raises:
        DataError: An example is no text, or its file cannot be read.
        RunError: The model's logits are not finite.
    """
    begin, done = time.perf_counter(), 0
    texts = _Texts(examples, maker, record)
    pending: Pending[_Place] = Pending(model.shapes, held_tokens)

    def passes() -> Iterator[tuple[list[_Place], AnyPass]]:
        for chunk in _chunks(texts.requests()):
            requests = [request for _, _, request in chunk]
            key = "" if journal is None else requests_key(identity, requests)
            known = {} if journal is None else journal.known(key)
            for number, (example, window, request) in enumerate(chunk):
                if number in known:
                    texts.take(example, window, known[number])
                else:
                    yield from pending.add(_Place(example, window, key, number), request)
        yield from pending.flush()

    with model.ready():
        for found in model.run(passes()):
            by_key: dict[str, dict[int, LogLikelihood]] = {}
            for place, one in found.items():
                texts.take(place.example, place.window, one)
                by_key.setdefault(place.key, {})[place.number] = one
            if journal is not None:
                for key, results in by_key.items():
                    journal.add(key, results)
            done += len(found)
            progress(done, time.perf_counter() - begin)
    return TextScores(texts.score(), texts.count, time.perf_counter() - begin)


def _chunks(
    requests: Iterable[tuple[int, int, Scored]],
) -> Iterator[list[tuple[int, int, Scored]]]:
    held: list[tuple[int, int, Scored]] = []
    tokens = 0
    for one in requests:
        held.append(one)
        tokens += one[2].length
        if tokens >= _CHUNK:
            yield held
            held, tokens = [], 0
    if held:
        yield held
