"""Loss scale: factor of the loss that keeps small float16 gradients from underflow.

Gradients are larger by the same factor, and the step divides them by it again.  If some of them
overflow float16 the step is skipped and the scale is updated.

Source: Micikevicius et al., "Mixed Precision Training" (2018); dynamics of the Megatron family's
gradient scaler.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from lmcore.base.errors import CheckpointError

if TYPE_CHECKING:
    from lmcore.config.section import AcceleratorSection
    from lmcore.contract.precision.policy import PrecisionPolicy

__all__ = ["DynamicLossScale", "FixedLossScale", "LossScale", "loss_scale_of"]

_MOST_SKIPPED = 50
"""Consecutive steps that a fixed scale may skip; a dynamic scale falls from 2^32 to 1 in fewer."""


class LossScale(Protocol):
    """Factor of the loss."""

    @property
    def value(self) -> float:
        """The scale of the next step."""

    @property
    def limit(self) -> str:
        """Reason why no further step can be skipped; empty if steps are never skipped."""

    def update(self, *, overflow: bool) -> bool:
        """Update the scale after a step; return False after an overflow that no scale avoids.

        Args:
            overflow: True if the loss or gradients were not finite on any rank.
        """

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state from a checkpoint.

        Raises:
            CheckpointError: The state is invalid.
        """


@dataclass
class FixedLossScale:
    """A fixed scale; 1 in precisions without loss scaling.

    Attributes:
        value: The scale.
        patience: Number of consecutive overflows that are skipped.
        skipped: Number of consecutive overflows so far.
    """

    value: float = 1.0
    patience: int = 0
    skipped: int = 0

    @property
    def limit(self) -> str:
        """Reason why no further step can be skipped; empty if steps are never skipped."""
        if not self.patience:
            return ""
        return f"the {self.patience} steps before were skipped at `--loss-scale {self.value:g}`"

    def update(self, *, overflow: bool) -> bool:
        """Count consecutive overflows."""
        self.skipped = self.skipped + 1 if overflow else 0
        return self.skipped <= self.patience

    def state(self) -> dict[str, Any]:
        """Return the number of consecutive overflows; the scale is an option of the run."""
        return {"skipped": self.skipped} if self.patience else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the count of a fixed scale, if there is one."""
        if self.patience and "skipped" in state:
            self.skipped = _count(state, "skipped")


@dataclass
class DynamicLossScale:
    """A scale that is doubled after *window* steps without an overflow, and halved by overflows.

    The first *hysteresis* - 1 overflows since the scale was last doubled leave it unchanged, each
    further one halves it: at a hysteresis of 2 three overflows give 2^32, 2^31, 2^30.

    Attributes:
        value: Scale of the next step.
        minimum: Smallest scale.
        window: Number of steps without an overflow after which the scale is doubled.
        hysteresis: Number of overflows after a doubling until the first halving.
        good_steps: Number of steps since the last overflow or doubling.
        tolerance: Overflows left until a halving; at 0 or less the next one halves.
    """

    value: float = 2.0**32
    minimum: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    good_steps: int = field(default=0, init=False)
    tolerance: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.tolerance = self.hysteresis

    @property
    def limit(self) -> str:
        """Reason why no further step can be skipped."""
        return f"the loss scale is at its lowest, {self.minimum:g} (`--min-loss-scale`)"

    def update(self, *, overflow: bool) -> bool:
        """Double or halve the scale; return False after an overflow at the smallest scale."""
        if not overflow:
            self.good_steps += 1
            if self.good_steps == self.window:
                self.good_steps, self.tolerance = 0, self.hysteresis
                self.value *= 2.0
            return True
        self.good_steps = 0
        self.tolerance -= 1
        if self.tolerance > 0:
            return True
        lowest = self.value <= self.minimum
        self.value = max(self.value / 2.0, self.minimum)
        return not lowest

    def state(self) -> dict[str, Any]:
        """Return the scale and both counts."""
        return {"value": self.value, "good_steps": self.good_steps, "tolerance": self.tolerance}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore scale and counts, if the checkpoint has them."""
        if "value" not in state:
            return
        value = state["value"]
        if not isinstance(value, (int, float)) or not 0.0 < value < math.inf:
            raise _damaged("value", value)
        # Counts are limited to a window and hysteresis that are shorter now.
        self.value = max(float(value), self.minimum)
        self.good_steps = min(_count(state, "good_steps"), self.window - 1)
        self.tolerance = min(_count(state, "tolerance", negative=True), self.hysteresis)


def loss_scale_of(asked: AcceleratorSection, precision: PrecisionPolicy) -> LossScale:
    """Return the initial loss scale of a run.

    Args:
        asked: Options of the run.
        precision: Precision policy of the run.
    """
    if not precision.loss_scaling:
        return FixedLossScale()
    if asked.loss_scale:
        return FixedLossScale(asked.loss_scale, patience=_MOST_SKIPPED)
    return DynamicLossScale(
        asked.initial_loss_scale,
        minimum=asked.min_loss_scale,
        window=asked.loss_scale_window,
        hysteresis=asked.hysteresis,
    )


def _count(state: Mapping[str, Any], name: str, *, negative: bool = False) -> int:
    value = state.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or (value < 0 and not negative):
        raise _damaged(name, value)
    return value


def _damaged(name: str, value: object) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint's loss scale has `{name}: {value}`", why="its manifest is damaged"
    )
