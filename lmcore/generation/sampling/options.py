"""Sampling options; torch-free, so that they are checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.base.errors import ConfigError, LmcoreError

__all__ = [
    "MAX_PENALTY",
    "MAX_REPETITION_PENALTY",
    "MAX_TEMPERATURE",
    "MAX_TOP_K",
    "MIN_REPETITION_PENALTY",
    "SamplingOptions",
]

MAX_TEMPERATURE = 100.0
MAX_TOP_K = 1000
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY = 0.01  # a smaller divisor could make a logit infinite
MAX_REPETITION_PENALTY = 10.0

_LEAST_TOP_P = 1e-30  # 0 would be all tokens, also in float32


@dataclass(frozen=True)
class SamplingOptions:
    """Options of the choice of the next token, checked at construction.

    Attributes:
        temperature: Divisor of the logits; below 1 sharpens, above 1 flattens the distribution.
        top_k: Number of highest logits to sample from, ties included; 0: all.
        top_p: Probability of the smallest set of tokens to sample from; 0: all.
        top_p_decay: Factor of *top_p* after each generated token; 0: it stays.
        top_p_bound: Lowest value of a decaying *top_p*; 0: none.
        min_p: Lowest probability of a token, as a share of the highest one; 0: all.
        repetition_penalty: Divisor of positive logits, and factor of negative ones, of tokens that
            the prompt or the text so far has; 1: none.
        frequency_penalty: Subtracted from the logit of a token for each time it was generated.
        presence_penalty: Subtracted from the logit of a token that was generated.
        greedy: True: the most probable token is taken; the same as *top_k* 1.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    top_p_decay: float = 0.0
    top_p_bound: float = 0.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    greedy: bool = False

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values out of range or in conflict."""
        problems: list[LmcoreError] = []
        if not 0.0 < self.temperature <= MAX_TEMPERATURE:
            problems.append(
                ConfigError(
                    f"`--temperature {self.temperature:g}` is out of range",
                    why=f"it must be above 0 and at most {MAX_TEMPERATURE:g}",
                    hint="use `--greedy` for the most probable token",
                )
            )
        if not 0 <= self.top_k <= MAX_TOP_K:
            problems.append(
                ConfigError(
                    f"`--top-k {self.top_k}` is out of range",
                    why=f"it is a number of tokens, from 0 (all) to {MAX_TOP_K}",
                )
            )
        if not 0.0 <= self.top_p <= 1.0:
            problems.append(
                ConfigError(
                    f"`--top-p {self.top_p:g}` is out of range",
                    why="it is a probability, from 0 (all tokens) to 1",
                )
            )
        problems += self._further() + self._conflicts()
        if problems:
            raise ConfigError.collect(problems)

    def _further(self) -> list[LmcoreError]:
        ranges = {
            "--top-p-decay": (self.top_p_decay, 0.0, 1.0),
            "--min-p": (self.min_p, 0.0, 1.0),
            "--frequency-penalty": (self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY),
            "--presence-penalty": (self.presence_penalty, -MAX_PENALTY, MAX_PENALTY),
            "--repetition-penalty": (
                self.repetition_penalty,
                MIN_REPETITION_PENALTY,
                MAX_REPETITION_PENALTY,
            ),
        }
        problems: list[LmcoreError] = [
            ConfigError(
                f"`{flag} {value:g}` is out of range", why=f"it is from {low:g} to {high:g}"
            )
            for flag, (value, low, high) in ranges.items()
            if not low <= value <= high
        ]
        if not 0.0 <= self.top_p_bound <= self.top_p:
            problems.append(
                ConfigError(
                    f"`--top-p-bound {self.top_p_bound:g}` is out of range",
                    why=f"it is the lowest value of `--top-p`, which is {self.top_p:g}",
                )
            )
        return problems

    def _conflicts(self) -> list[LmcoreError]:
        given = [
            (f"--top-k {self.top_k}", self.top_k > 0),
            (f"--top-p {self.top_p:g}", self.top_p > 0),
            ("--greedy", self.greedy and self.top_k != 1),
        ]
        flags = [f"`{flag}`" for flag, there in given if there]
        if len(flags) < 2:
            return []
        return [ConfigError(f"{' and '.join(flags)} exclude each other", hint="keep one of them")]

    @property
    def always_highest(self) -> bool:
        """True if the most probable token is taken, without random numbers."""
        return self.greedy or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """True if the logits depend on the tokens so far."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1.0, 0.0, 0.0)

    def top_p_after(self, num_generated: int) -> float:
        """Return *top_p* after a number of generated tokens, lowered by its decay."""
        if not self.top_p_decay:
            return self.top_p
        lowered = max(self.top_p * self.top_p_decay**num_generated, self.top_p_bound)
        return max(lowered, _LEAST_TOP_P) if self.top_p else 0.0
