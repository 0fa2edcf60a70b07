"""What a person sees of a run: Megatron's training lines, or a live view on a terminal.

Everything here goes to stderr; stdout is left to results.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lmcore.train.step_record import StepRecord

__all__ = ["Display", "PlainDisplay", "Progress", "duration", "open_display", "training_line"]


@dataclass(frozen=True)
class Progress:
    """Where a run stands, beside the numbers of its last step.

    Attributes:
        train_iters: Steps of the whole run.
        seconds_left: Estimate for the rest of the run.
        skipped_iterations: Steps since the last line that overflowed and updated nothing.
        nan_iterations: Steps since the last line whose loss was not finite.
        mean_loss: Mean loss over the other steps since the last line; None where there are none.
        mean_step_ms: Mean step time over the same steps.
        mean_tokens_per_second: Their mean speed.
        mean_mfu: Their mean model-FLOPs utilisation, None where the peak is unknown.
        ends_line: Whether a training line is due.
    """

    train_iters: int
    seconds_left: float
    skipped_iterations: int
    nan_iterations: int
    mean_loss: float | None
    mean_step_ms: float
    mean_tokens_per_second: float
    mean_mfu: float | None
    ends_line: bool


class Display(Protocol):
    """How a run is shown."""

    def say(self, text: str) -> None:
        """Show a line of prose."""

    def step(self, row: StepRecord, progress: Progress) -> None:
        """Show a step."""

    def validation(self, step: int, loss: float, perplexity: float) -> None:
        """Show a validation."""

    def close(self) -> None:
        """End the display; lines shown before stay."""


def duration(seconds: float) -> str:
    """Return a time as people write it: `1:02:03`, `2:05`, `0:09`."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    clock = f"{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
    return f"{hours}:{clock}" if hours else clock


def training_line(row: StepRecord, progress: Progress) -> str:
    """Return Megatron's log line, with tokens/s, MFU and the time left at its end.

    As there, the loss is left out where all steps since the last line were skipped, and the norm
    where the last one was.
    """
    parts = [
        f" iteration {row.step:8d}/{progress.train_iters:8d}",
        f"consumed samples: {row.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {progress.mean_step_ms:.1f}",
        f"learning rate: {row.learning_rate:.3E}",
        f"global batch size: {row.global_batch_size:5d}",
    ]
    if progress.mean_loss is not None:
        parts.append(f"lm loss: {progress.mean_loss:.6E}")
    parts.append(f"loss scale: {row.loss_scale:.1f}")
    if row.grad_norm is not None:
        parts.append(f"grad norm: {row.grad_norm:.3f}")
    parts += [
        f"number of skipped iterations: {progress.skipped_iterations:3d}",
        f"number of nan iterations: {progress.nan_iterations:3d}",
        f"tokens/s: {progress.mean_tokens_per_second:.0f}",
    ]
    if progress.mean_mfu is not None:
        parts.append(f"MFU: {100 * progress.mean_mfu:.1f}%")
    parts.append(f"ETA: {duration(progress.seconds_left)}")
    return " | ".join(parts) + " |"


class PlainDisplay:
    """Lines, for files and logs."""

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - the display's own stream

    def step(self, row: StepRecord, progress: Progress) -> None:
        """Print a training line when one is due."""
        if progress.ends_line:
            self.say(training_line(row, progress))

    def validation(self, step: int, loss: float, perplexity: float) -> None:
        """Print a validation line."""
        self.say(
            f" validation at iteration {step} | lm loss value: {loss:.6E} | "
            f"lm loss PPL: {perplexity:.6E} |"
        )

    def close(self) -> None:
        """Nothing is open."""


class _NoDisplay(PlainDisplay):
    def say(self, text: str) -> None:
        pass


def open_display(kind: str) -> Display:
    """Return the display that `--progress` names; `auto` is live on a terminal.

    Args:
        kind: "auto", "live", "plain" or "none".
    """
    if kind == "none":
        return _NoDisplay()
    if kind == "plain" or (kind == "auto" and not sys.stderr.isatty()):
        return PlainDisplay()
    from lmcore.train.report.live_display import LiveDisplay

    return LiveDisplay()
