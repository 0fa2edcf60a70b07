"""`Request`: a prompt and how to continue it; `Continuation`: its generated tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from lmcore.generation.sampling.options import SamplingOptions

if TYPE_CHECKING:
    import torch

__all__ = ["Constraint", "Continuation", "FinishReason", "Request", "TokenProbability"]

FinishReason = Literal["stop", "length", "cancelled"]
"""Reason of the end: a stop token, text or constraint; the length; or the caller."""


class Constraint(Protocol):
    """Rule for the tokens of one continuation, such as a grammar."""

    def allowed(self, size: int) -> torch.Tensor:
        """Return the tokens that may come next, bool [size] on the CPU; at least one is True."""
        ...

    def accept(self, token: int) -> bool:
        """Take the next token; return True if the text is complete."""
        ...


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it.

    Attributes:
        prompt: Token ids, at least one.
        max_tokens: Largest number of tokens to generate.
        options: Options of the choice of each token.
        seed: Seed of the random numbers, which no other request shares.
        stop_tokens: Tokens that end the text; they are not part of it.
        ends: Called with all generated tokens after each; True ends the text after that token.
        top_logprobs: Number of most probable tokens to report at each place besides the chosen
            one; None: no probabilities.
        prompt_logprobs: True to report the probabilities of the prompt's tokens, too.
        constraint: Rule for the tokens; None: all are allowed.
        source: Token ids of the encoder's input; empty for a model without an encoder.
    """

    prompt: Sequence[int]
    max_tokens: int
    options: SamplingOptions = field(default_factory=SamplingOptions)
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()
    ends: Callable[[Sequence[int]], bool] | None = None
    top_logprobs: int | None = None
    prompt_logprobs: bool = False
    constraint: Constraint | None = None
    source: Sequence[int] = ()

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens that the text follows: of the source, or without one of the prompt."""
        return len(self.source) or len(self.prompt)


@dataclass(frozen=True)
class TokenProbability:
    """Log-probability of a token by the model alone, before sampling options.

    Attributes:
        token: Token id.
        logprob: Natural logarithm of its probability.
        top: Most probable tokens at its place with their log-probabilities, in descending order.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class Continuation:
    """Generated tokens of a request; `ContinuousBatch` adds to them.

    Attributes:
        request: The request.
        generator: Random numbers of the request.
        tokens: Generated tokens, without the stop token.
        logprobs: Probability of each generated token, if the request wants them.
        stop_token: Stop token that ended it; None: none did.
        stop_logprob: Probability of the stop token, if the request wants it.
        prompt_logprobs: Probability of each token of the prompt but the first, if wanted.
        finish_reason: Why it ended; None: it has not.
        error: Error that ended it; None: there was none.
    """

    request: Request
    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenProbability] = field(default_factory=list)
    stop_token: int | None = None
    stop_logprob: TokenProbability | None = None
    prompt_logprobs: list[TokenProbability] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None

    @property
    def ended(self) -> bool:
        """True if no token follows."""
        return self.finish_reason is not None or self.error is not None
