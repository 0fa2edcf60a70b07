"""Sampling options; torch-free, so that they are checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.errors import ConfigError, LmcoreError

__all__ = ["MAX_TEMPERATURE", "MAX_TOP_K", "SamplingOptions"]

MAX_TEMPERATURE = 100.0
MAX_TOP_K = 1000


@dataclass(frozen=True)
class SamplingOptions:
    """Options of the choice of the next token, checked at construction.

    Attributes:
        temperature: Divisor of the logits; below 1 sharpens, above 1 flattens the distribution.
        top_k: Number of highest logits to sample from, ties included; 0: all.
        top_p: Probability of the smallest set of tokens to sample from; 0: all.
        greedy: True: the most probable token is taken; the same as *top_k* 1.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
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
        problems += self._conflicts()
        if problems:
            raise ConfigError.collect(problems)

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
