"""Learning-rate schedule: the rate as a function of the samples consumed, as in Megatron.

Source: reference formulas of the Megatron family; cosine after Loshchilov and Hutter (2017).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any

from lmcore.config.section import run_options
from lmcore.families.saved_shape import is_number

if TYPE_CHECKING:
    from lmcore.config.resolve import RunPlan

__all__ = ["LearningRateSchedule", "wrong_fields"]


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warm-up, then a decay.

    Attributes:
        style: "constant", "linear", "cosine", "inverse-square-root" or "constant-cooldown".
        highest: Rate at the end of the warm-up.
        lowest: Rate once the decay is over.
        warmup_samples: Samples of the warm-up.
        decay_samples: Samples, from the start, at which the decay is over, the warm-up included.
        cooldown_fraction: Share of decay_samples in which "constant-cooldown" goes down.
        start_samples: Samples of the run before the warm-up begins; above 0 after a restart.
    """

    style: str
    highest: float
    lowest: float
    warmup_samples: float
    decay_samples: int
    cooldown_fraction: float = 0.2
    start_samples: int = 0

    @classmethod
    def from_plan(cls, plan: RunPlan) -> LearningRateSchedule:
        """Return the schedule of a plan."""
        optimizer = plan.config.optimizer
        return cls(
            style=optimizer.lr_decay_style,
            highest=optimizer.lr,
            lowest=optimizer.min_lr,
            warmup_samples=plan.lr_warmup_samples,
            decay_samples=plan.lr_decay_samples,
            cooldown_fraction=optimizer.lr_cooldown_fraction,
        )

    def __call__(self, samples: int) -> float:
        """Return the rate of a step after which *samples* have been consumed."""
        samples -= self.start_samples
        if self.warmup_samples > 0 and samples <= self.warmup_samples:
            return self.highest * samples / self.warmup_samples
        if self.style == "constant":
            return self.highest
        if samples > self.decay_samples:
            return self.lowest
        if self.style == "inverse-square-root":
            start = max(self.warmup_samples, 1)
            return max(self.lowest, self.highest * math.sqrt(start / max(samples, 1)))
        if self.style == "constant-cooldown":
            return self._cool_down(samples)
        span = self.decay_samples - self.warmup_samples
        ratio = (samples - self.warmup_samples) / span if span else 1.0
        kept = 1.0 - ratio if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * ratio))
        return self.lowest + (self.highest - self.lowest) * kept

    def _cool_down(self, samples: int) -> float:
        span = self.cooldown_fraction * self.decay_samples
        start = self.decay_samples - span
        if samples <= start:
            return self.highest
        if samples == self.decay_samples:  # the quotient may be a little less than 1
            return self.lowest
        ratio = (samples - start) / span
        return self.lowest + (self.highest - self.lowest) * (1.0 - math.sqrt(ratio))


def wrong_fields(saved: Mapping[str, Any]) -> list[str]:
    """Return the fields that a schedule in a file lacks, or that no schedule has with such values.

    Args:
        saved: Fields of a `LearningRateSchedule`, of a file that may come from any program.
    """
    known = {field.name: field for field in fields(LearningRateSchedule)}
    lacking = [name for name in known if name not in saved and known[name].default is MISSING]
    return lacking + [
        name
        for name, value in saved.items()
        if name not in known
        or not (_is_style(value) if name == "style" else is_number(value) and value >= 0)
    ]


def _is_style(value: object) -> bool:
    return isinstance(value, str) and value in (run_options()["lr_decay_style"].choices or ())
