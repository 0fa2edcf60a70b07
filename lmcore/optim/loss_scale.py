"""The factor that keeps small float16 gradients from vanishing, and how it follows overflows.

Gradients of a loss that is multiplied by the scale are larger by the same factor; the step divides
them by it again.  Where some of them leave the range of float16 the step is skipped and the scale
is told.  Dynamics of the Megatron family's gradient scaler; after Micikevicius et al. (2018).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from lmcore.errors import CheckpointError

if TYPE_CHECKING:
    from lmcore.accelerator.precision import PrecisionPolicy
    from lmcore.config.section import AcceleratorSection

__all__ = ["DynamicLossScale", "FixedLossScale", "LossScale", "loss_scale_of"]

_MOST_SKIPPED = 50
"""Steps in a row that a fixed scale may skip; a dynamic one goes from 2^32 to 1 in fewer."""


class LossScale(Protocol):
    """What the loss is multiplied by."""

    @property
    def value(self) -> float:
        """The scale of the next step."""

    @property
    def limit(self) -> str:
        """Why a step cannot be skipped any more; empty where none ever is."""

    def update(self, *, overflow: bool) -> bool:
        """Hear how a step ended; return False where it overflowed and no scale helps.

        Args:
            overflow: Whether its loss or gradients were not finite, in any process.
        """

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where *state* was taken.

        Raises:
            CheckpointError: It cannot be one.
        """


@dataclass
class FixedLossScale:
    """A scale that stays; 1 in precisions that need none.

    Attributes:
        value: The scale.
        patience: Overflows in a row that are skipped; the next one cannot be.
        skipped: Overflows in a row so far.
    """

    value: float = 1.0
    patience: int = 0
    skipped: int = 0

    @property
    def limit(self) -> str:
        """Why a step cannot be skipped any more; empty where none ever is."""
        if not self.patience:
            return ""
        return f"the {self.patience} steps before were skipped at `--loss-scale {self.value:g}`"

    def update(self, *, overflow: bool) -> bool:
        """Count overflows in a row."""
        self.skipped = self.skipped + 1 if overflow else 0
        return self.skipped <= self.patience

    def state(self) -> dict[str, Any]:
        """Return the overflows in a row; the scale itself is the run's own."""
        return {"skipped": self.skipped} if self.patience else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the count, where a fixed scale left one."""
        if self.patience and "skipped" in state:
            self.skipped = _count(state, "skipped")


@dataclass
class DynamicLossScale:
    """Doubled after *window* steps without an overflow, halved by overflows.

    Of the overflows since the scale grew last the first *hysteresis* - 1 leave it as it is, and
    every further one halves it: at a hysteresis of 2 three in a row leave 2^32, 2^31, 2^30.

    Attributes:
        value: The scale of the next step.
        minimum: It is never less.
        window: Steps without an overflow after which it grows.
        hysteresis: Overflows from one growth on until the first halving.
        good_steps: Steps since the last overflow or growth.
        tolerance: Overflows left of the hysteresis; 0 or less: the next one halves.
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
        """Why a step cannot be skipped any more."""
        return f"the loss scale is at its lowest, {self.minimum:g} (`--min-loss-scale`)"

    def update(self, *, overflow: bool) -> bool:
        """Grow or shrink; return False where an overflow finds the scale at its lowest."""
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
        """Take scale and counts from a checkpoint of a run that had them; else begin anew."""
        if "value" not in state:
            return
        value = state["value"]
        if not isinstance(value, (int, float)) or not 0.0 < value < math.inf:
            raise _damaged("value", value)
        # A window or hysteresis that is shorter now counts from its own end.
        self.value = max(float(value), self.minimum)
        self.good_steps = min(_count(state, "good_steps"), self.window - 1)
        self.tolerance = min(_count(state, "tolerance", negative=True), self.hysteresis)


def loss_scale_of(asked: AcceleratorSection, precision: PrecisionPolicy) -> LossScale:
    """Return the scale that a run begins with.

    Args:
        asked: Its options.
        precision: Says whether gradients need one.
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
