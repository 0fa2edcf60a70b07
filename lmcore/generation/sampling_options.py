"""How the next token is chosen; torch-free: a command line is checked before torch loads."""

from __future__ import annotations

from dataclasses import dataclass

from lmcore.errors import ConfigError, LmcoreError

__all__ = ["MAX_TEMPERATURE", "MAX_TOP_K", "SamplingOptions"]

MAX_TEMPERATURE = 100.0
MAX_TOP_K = 1000


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen; every problem is reported when it is made.

    Attributes:
        temperature: Divides the scores; below 1 sharpens, above 1 flattens.
        top_k: Only the k highest scores can be drawn (those equal to the k-th as well); 0: all.
        top_p: Only the fewest ids that together have this probability can be drawn; 0: all.
        greedy: The highest score always wins; top_k=1 means the same.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    greedy: bool = False

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values out of range and for those that exclude each other."""
        problems: list[LmcoreError] = []
        if not 0.0 < self.temperature <= MAX_TEMPERATURE:
            problems.append(
                ConfigError(
                    f"`--temperature {self.temperature:g}` is out of range",
                    why=f"it divides the scores: above 0, at most {MAX_TEMPERATURE:g}",
                    hint="use `--greedy` for the most probable token",
                )
            )
        if not 0 <= self.top_k <= MAX_TOP_K:
            problems.append(
                ConfigError(
                    f"`--top-k {self.top_k}` is out of range",
                    why=f"it is a number of tokens from 0 (all) to {MAX_TOP_K}",
                )
            )
        if not 0.0 <= self.top_p <= 1.0:
            problems.append(
                ConfigError(
                    f"`--top-p {self.top_p:g}` is out of range",
                    why="it is a probability from 0 (all tokens) to 1",
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
        """Whether the highest score wins, without a draw."""
        return self.greedy or self.top_k == 1
