"""Requests for log-likelihoods that the examples of a task make, by the model's tokenizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError, DataError
from lmcore.data.tokenizer import special_ids
from lmcore.data.tokenizer.file_tokenizer import added_around
from lmcore.evaluation.encode_pieces import encoded_pieces
from lmcore.evaluation.passes import Scored
from lmcore.evaluation.task import (
    Choices,
    Continued,
    Example,
    Stream,
    Streamed,
    Text,
    TextFile,
    Tokens,
)

if TYPE_CHECKING:
    from lmcore.data.tokenizer import Tokenizer

__all__ = ["RequestMaker", "positions_read", "windows"]

_READ = 1 << 16
"""Tokens of a document that are read at once."""


def windows(
    tokens: Iterable[int], length: int, stride: int, *, even: bool = False
) -> Iterator[Scored]:
    """Yield the windows by which every token but the first is predicted once.

    The first window has up to *length* inputs.  Each further one moves on by *stride* tokens, which
    it predicts, and has the *length* tokens before the last of them as inputs.

    Args:
        tokens: Token ids, taken as they are needed; the first one is read and not predicted.
        length: Most tokens that the model reads.
        stride: Tokens that each further window predicts, at most *length*.
        even: True if each window begins a stride after the one before, so that the last one has
            fewer inputs.
    """
    left = iter(tokens)
    held = list(itertools.islice(left, length + 1))
    if len(held) > 1:
        yield Scored(tuple(held[:1]), tuple(held[1:]))
    while new := list(itertools.islice(left, stride)):
        most = length + 1 - (stride - len(new) if even else 0)
        held = [*held, *new][-most:]
        first = len(held) - len(new)
        yield Scored(tuple(held[:first]), tuple(held[first:]))


def _checked(example: Tokens, vocab_size: int) -> Iterator[int]:
    """Yield the ids of a document, all of the vocabulary."""
    for start in range(0, len(example.tokens), _READ):
        for token in map(int, example.tokens[start : start + _READ]):
            if not 0 <= token < vocab_size:
                raise DataError(
                    f"{example.place} has the token {token}",
                    why=f"the model's tokenizer has {vocab_size} tokens",
                    hint="give the tokenizer of the data, or data of the model's tokenizer",
                )
            yield token


def positions_read(positions: int, length: int | None, stride: int | None) -> int:
    """Return the most tokens that a model reads at once.

    Args:
        positions: Number of the model's positions.
        length: Most tokens that it shall read; None: as many as it has positions.
        stride: Tokens that each further window of a text predicts; None: as many as it reads.

    Raises:
        ConfigError: The length or the stride is larger.
    """
    if length is not None and length > positions:
        raise ConfigError(
            f"`--seq-length {length}` is more than the model's {positions} positions",
            hint=f"use `--seq-length {positions}` or less, or leave it out",
        )
    positions = length or positions
    if stride is not None and stride > positions:
        raise ConfigError(
            f"`--stride {stride}` is more than the model's {positions} positions",
            why="tokens between two windows would not be predicted",
            hint=f"use `--stride {positions}` or less",
        )
    return positions


@dataclass
class RequestMaker:
    """Requests of examples.

    Attributes:
        tokenizer: The model's.
        positions: Most tokens that the model reads.
        stride: Tokens that a further window of a text predicts.
        cut: Number of examples so far whose context was too long, and was cut at its beginning.
        encoder: Function that encodes a text in place of the tokenizer's; None: the tokenizer's.
        stream_stride: Tokens that a further window of a stream predicts; None: the stream's.
    """

    tokenizer: Tokenizer
    positions: int
    stride: int
    cut: int = 0
    encoder: Callable[[str], list[int]] | None = None
    stream_stride: int | None = None

    def of(self, example: Example) -> list[Scored]:
        """Return the requests of an example, in order.

        Args:
            example: The example.

        Raises:
            DataError: It has nothing to predict, or an answer is longer than the model's positions.
        """
        if isinstance(example, Streamed):
            return list(self.windows_of(example))
        if isinstance(example, Continued):
            return [self._of_end(example)]
        assert isinstance(example, Choices)
        contexts = example.contexts
        if len(contexts) == 1:
            contexts *= len(example.choices)
        pairs = zip(contexts, example.choices, strict=True)
        return [self.of_pair(*pair) for pair in pairs]

    def of_text(self, text: str) -> list[Scored]:
        """Return the windows by which all tokens of a text are predicted, in order.

        Args:
            text: The text.

        Raises:
            DataError: The tokenizer has no token to begin a text with.
        """
        return list(self.windows_of(Text(text, text)))

    def of_pair(self, context: str, continuation: str) -> Scored:
        """Return the request for the tokens of a text after a context.

        Args:
            context: Text before; the end of one that is too long is kept.
            continuation: The text that is predicted.

        Raises:
            DataError: See `of`.
        """
        return self._fitted(*self._divided(context, continuation))

    def windows_of(self, example: Streamed) -> Iterator[Scored]:
        """Yield the requests of a text, in order, as it is read.

        Args:
            example: The text.

        Raises:
            DataError: Its file cannot be read, an id is not one of the tokenizer's, or this has no
                token to begin a text with.
        """
        if isinstance(example, Tokens):
            tokens = _checked(example, self.tokenizer.vocab_size)
            first = next(tokens, None)
            begin = [self.first] if first in {None, self.first} else [self.first, first]
            return windows(itertools.chain(begin, tokens), self.positions, self.stride)
        pieces = example.pieces() if isinstance(example, TextFile) else [example.text]
        encoded = encoded_pieces(self._encode, pieces)
        if isinstance(example, Stream):
            stride = min(self.stream_stride or example.stride, self.positions)
            return windows(encoded, self.positions, stride, even=True)
        first = next(encoded, None)
        begin = [self.first] if first is None else [self.first, first]
        if self.encoder is None and first == self.first:  # lm-eval-harness predicts it
            begin = [self.first]
        return windows(itertools.chain(begin, encoded), self.positions, self.stride)

    def _of_end(self, example: Continued) -> Scored:
        if example.whole:
            return self.of_pair(example.context, example.continuation)
        tokens = self._encode(example.context + example.continuation)
        return self._fitted(tokens[:-1], tokens[-1:])

    def _divided(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a context and of what follows, encoded together.

        Spaces at the end of the context belong to what follows, as most tokenizers join a space
        with the word after it.  A continuation whose tokens all join the context is encoded alone.
        """
        before = self._encode(context.rstrip())  # of an empty one, what begins every text
        both = self._encode(context + continuation)
        if len(both) > len(before):
            return before, both[len(before) :]
        begin = self._encode("")
        alone = self._encode(context[len(context.rstrip()) :] + continuation)
        return before, alone[len(begin) if alone[: len(begin)] == begin else 0 :]

    def _fitted(self, context: Sequence[int], targets: Sequence[int]) -> Scored:
        """Return a request with the end of a context that the model has positions for."""
        if not targets:
            raise DataError("an answer has no tokens", why="it is empty")
        if len(targets) > self.positions:
            raise DataError(
                f"an answer has {len(targets)} tokens",
                why=f"the model has {self.positions} positions",
                hint="leave the task out, or use a model with more positions",
            )
        context = list(context) or [self.first]
        most = self.positions - len(targets) + 1
        if len(context) > most:
            self.cut += 1
            context = context[-most:]
        return Scored(tuple(context), tuple(targets))

    def _encode(self, text: str) -> list[int]:
        if self.encoder is not None:
            return self.encoder(text)
        ids = self.tokenizer.encode(text)
        return ids[: len(ids) - self._num_after]

    @cached_property
    def _num_after(self) -> int:
        """Number of ids that the tokenizer puts after every text: what follows continues it."""
        return len(added_around(self.tokenizer)[1])

    @property
    def first(self) -> int:
        """Token before a text without a context: the one that begins or ends documents.

        Raises:
            DataError: The tokenizer has none.
        """
        special = special_ids(self.tokenizer)
        for token in (special.bos, self.tokenizer.eod, special.eos):
            if token is not None:
                return token
        raise DataError(
            f"the tokenizer `{self.tokenizer.name}` has no token to begin a text with",
            why="it has no token that begins or ends a document",
        )
