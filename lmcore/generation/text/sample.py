"""`Sample`: a prompt with its continuation; `Output`: where samples go.  Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["DEFAULT_TOKENS", "Output", "Sample"]

DEFAULT_TOKENS = 200
"""Tokens of a sample whose length was not given."""


@dataclass(frozen=True)
class Sample:
    """A prompt and its continuation.

    Attributes:
        prompt: Text of the prompt.
        text: Text of the continuation.
        tokens: Token ids of the continuation.
        num_prompt_tokens: Number of tokens of the prompt.
        finished: True if the model ended the document.
        seed: Seed that reproduces this sample alone; None: it has none, being from beam search.
        logprobs: Log-probability of each token, as JSON values; None: not asked for.
        score: Score of beam search; None: the sample is not from one.
        answers: True if the text answers the prompt, and does not continue it.
    """

    prompt: str
    text: str
    tokens: tuple[int, ...]
    num_prompt_tokens: int
    finished: bool
    seed: int | None
    logprobs: list[dict[str, Any]] | None = None
    score: float | None = None
    answers: bool = False

    @property
    def whole(self) -> str:
        """Text with the prompt that it continues."""
        return self.shown_prompt + self.text

    @property
    def shown_prompt(self) -> str:
        """Prompt that the text continues; empty before an answer."""
        return "" if self.answers else self.prompt


class Output(Protocol):
    """Output of samples; `begin` and `piece` are called before `end` if `streams` is True."""

    streams: bool

    def begin(self, prompt: str) -> None:
        """Begin a sample with its prompt."""

    def piece(self, text: str) -> None:
        """Add text to the sample."""

    def end(self, sample: Sample) -> None:
        """End the sample, which is given whole."""
