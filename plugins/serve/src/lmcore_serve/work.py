"""`Work`: a text to generate for a client; `Update`: what is new of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lmcore.generation.beam import Beam
from lmcore.generation.request import Request, TokenProbability
from lmcore.generation.text.completion import Completion

__all__ = ["BeamRequest", "EndReason", "OnUpdate", "Update", "Work"]

EndReason = Literal["stop", "length", "cancelled", "timeout", "error"]
"""Reason of the end: a stop token, text or rule; the length; the client; the deadline; an error."""


@dataclass(frozen=True)
class BeamRequest:
    """A prompt and how beam search continues it; for the attributes see `beam_search`."""

    prompt: Sequence[int]
    max_tokens: int
    width: int
    stop_tokens: frozenset[int] = frozenset()
    length_penalty: float = 1.0

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.prompt)


@dataclass(frozen=True)
class Update:
    """New part of a text, in the order of generation.

    Attributes:
        text: New text; it may be empty within a character.
        tokens: New tokens.
        logprobs: Probabilities of the new tokens, if the request wants them.
        prompt_logprobs: Probabilities of the prompt's tokens, in the first update that has any.
        end: Reason of the end; None: more follows.
        error: Error that ended it.
        stopped_by: Stop text that ended it.
        stop_token: Stop token that ended it; None: none did.
        stop_logprob: Probability of the stop token, if the request wants it.
        beams: Texts of beam search, the best one first.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenProbability, ...] = ()
    prompt_logprobs: tuple[TokenProbability, ...] = ()
    end: EndReason | None = None
    error: Exception | None = None
    stopped_by: str | None = None
    stop_token: int | None = None
    stop_logprob: TokenProbability | None = None
    beams: tuple[Beam, ...] = ()


OnUpdate = Callable[[Update], None]
"""Function that takes updates, called by the thread of the service; it must not block."""


@dataclass(eq=False)
class Work:
    """A text to generate.

    Attributes:
        request: Prompt and options.
        on_update: Function that takes the updates; the last one has `end`.
        completion: Text of the tokens, which is the request's `ends`; None for beam search.
        streams: True: an update after each token; False: one at the end.
        deadline: Time of `time.monotonic` at which it ends; None: none.
    """

    request: Request | BeamRequest
    on_update: OnUpdate
    completion: Completion | None = None
    streams: bool = False
    deadline: float | None = None
