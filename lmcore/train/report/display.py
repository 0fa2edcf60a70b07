"""Display of a run: Megatron's training lines, for files and logs.

All output goes to stderr; stdout is for results.  The live view is in `live_display`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lmcore.train.step_record import StepRecord
    from lmcore.train.task_scores import TaskScores
    from lmcore.train.validation import Validation

from lmcore.base.errors import printable

__all__ = [
    "Display",
    "PlainDisplay",
    "RunProgress",
    "SilentDisplay",
    "duration",
    "training_line",
]


@dataclass(frozen=True)
class RunProgress:
    """RunProgress of a run and means over the steps since the last training line.

    Attributes:
        train_iters: Number of steps of the whole run.
        seconds_left: Estimate of the time for the rest of the run; None if all steps compiled.
        skipped_iterations: Number of skipped steps since the last line.
        nan_iterations: Number of steps since the last line with a loss that is not finite.
        mean_loss: Mean loss of the other steps since the last line; None if there are none.
        mean_losses: Means of the losses that it is the sum of, by `Loss.key`, if there are several.
        loss_name: Name of the loss, if it is one.
        mean_step_ms: Mean step time since the last line, in milliseconds, without the steps that
            compiled if there were others.
        mean_tokens_per_second: Mean speed since the last line, without the steps that compiled;
            None if there were no others.
        mean_mfu: Mean model-FLOPs utilisation of the same steps; None if the peak is unknown, too.
        ends_line: True if a training line is due.
        compiling_steps: Number of steps since the last line in which something was compiled.
    """

    train_iters: int
    seconds_left: float | None
    skipped_iterations: int
    nan_iterations: int
    mean_loss: float | None
    mean_step_ms: float
    mean_tokens_per_second: float | None
    mean_mfu: float | None
    ends_line: bool
    compiling_steps: int = 0
    mean_losses: Mapping[str, float] = field(default_factory=dict)
    loss_name: str = "lm loss"


class Display(Protocol):
    """The display of a run."""

    @property
    def width(self) -> int | None:
        """Number of columns of the terminal; None if the lines go to a file."""

    def say(self, text: str) -> None:
        """Show a line of text."""

    def step(self, row: StepRecord, progress: RunProgress) -> None:
        """Show a step; see `StepRecord` and `RunProgress`."""

    def last_step(self, row: StepRecord, progress: RunProgress) -> None:
        """Show once more the last step of a run that ended between two training lines."""

    def validation(self, step: int, validation: Validation) -> None:
        """Show a validation."""

    def test(self, step: int, result: Validation) -> None:
        """Show the evaluation of the test set."""

    def tasks(self, step: int, scores: TaskScores) -> None:
        """Show scores of tasks."""

    def close(self) -> None:
        """Close the display; the lines remain."""


def duration(seconds: float) -> str:
    """Return a time in seconds as hours, minutes and seconds: `1:02:03`, `2:05`, `0:09`."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole // 60 % 60
    clock = f"{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
    return f"{hours}:{clock}" if hours else clock


def training_line(row: StepRecord, progress: RunProgress) -> str:
    """Return Megatron's log line, followed by tokens/s, MFU and the time left.

    Steps in which something was compiled are left out of the times, and counted; if there were no
    others, the line has their time, and no speed.

    As in Megatron, the loss is left out if all steps since the last line were skipped, and the
    gradient norm if the last step was.
    """
    parts = [
        f" iteration {row.step:8d}/{progress.train_iters:8d}",
        f"consumed samples: {row.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {progress.mean_step_ms:.1f}",
        f"learning rate: {row.learning_rate:.3E}",
        f"global batch size: {row.global_batch_size:5d}",
    ]
    if progress.mean_losses:
        for key, loss in progress.mean_losses.items():
            parts.append(f"{key.replace('_', ' ')}: {loss:.6E}")
    elif progress.mean_loss is not None:
        parts.append(f"{progress.loss_name}: {progress.mean_loss:.6E}")
    parts.append(f"loss scale: {row.loss_scale:.1f}")
    norms = {
        "grad norm": (row.grad_norm, ".3f"),
        "num zeros": (row.num_zeros_in_grad, ".1f"),
        "params norm": (row.params_norm, ".3f"),
    }
    parts += [f"{name}: {one:{form}}" for name, (one, form) in norms.items() if one is not None]
    parts += [
        f"number of skipped iterations: {progress.skipped_iterations:3d}",
        f"number of nan iterations: {progress.nan_iterations:3d}",
    ]
    if progress.mean_tokens_per_second is not None:
        parts.append(f"tokens/s: {progress.mean_tokens_per_second:.0f}")
    if progress.mean_mfu is not None:
        parts.append(f"MFU: {100 * progress.mean_mfu:.1f}%")
    if progress.compiling_steps:
        where = "included" if progress.mean_tokens_per_second is None else "excluded"
        parts.append(f"steps with compilation: {progress.compiling_steps} ({where})")
    if progress.seconds_left is not None:
        parts.append(f"ETA: {duration(progress.seconds_left)}")
    return " | ".join(parts) + " |"


def evaluation_line(name: str, step: int, result: Validation) -> str:
    """Return Megatron's line of an evaluation, followed by accuracies.

    Args:
        name: The evaluation: "validation" or "test".
        step: Number of the step after which it was done.
        result: Losses and accuracies.
    """
    parts = [f" {name} at iteration {step}"]
    for key, loss in result.losses.items():
        words = key.replace("_", " ")
        parts.append(f"{words} value: {loss:.6E}")
        if key == "lm_loss" and result.perplexity is not None:
            parts.append(f"{words} PPL: {result.perplexity:.6E}")
    parts += [f"{key.replace('_', ' ')}: {share:.4f}" for key, share in result.accuracies.items()]
    return " | ".join(parts) + " |"


def tasks_line(step: int, scores: TaskScores) -> str:
    """Return the line of scores of tasks, in the form of the line of an evaluation.

    Args:
        step: Number of the step after which they were taken.
        scores: The scores.
    """
    parts = [f" tasks at iteration {step}"]
    for task, values in scores.values.items():
        for name, value in values.items():
            if name != "examples" and not name.endswith("_error"):
                parts.append(f"{task} {name}: {'not finite' if value is None else f'{value:.4f}'}")
    parts.append(f"seconds: {scores.seconds:.1f}")
    return " | ".join(parts) + " |"


def evaluation_detail(
    losses: Mapping[str, float], perplexity: float | None, accuracies: Mapping[str, float]
) -> str:
    """Return what follows the loss of an evaluation for a reader.

    The perplexity is of the loss of tokens; where the loss is a sum with others, it says so.

    Args:
        losses: Each loss by name.
        perplexity: Perplexity of the loss of tokens; None without one.
        accuracies: Share of right predictions by name.
    """
    words, sum_of_losses = "", len(losses) > 1
    if sum_of_losses:
        named = (f"{key.replace('_', ' ')} {value:.4f}" for key, value in losses.items())
        words = f" ({', '.join(named)})"
    if perplexity is not None:
        words += f", {'lm ' * sum_of_losses}perplexity {perplexity:.2f}"
    return words + "".join(
        f", {key.replace('_', ' ')} {one:.1%}" for key, one in accuracies.items()
    )


class PlainDisplay:
    """Lines on stderr, for files and logs."""

    @property
    def width(self) -> int | None:
        """Number of columns of the terminal; None if stderr is none."""
        return shutil.get_terminal_size().columns if sys.stderr.isatty() else None

    def say(self, text: str) -> None:
        """Print a line."""
        print(printable(text), file=sys.stderr, flush=True)  # noqa: T201 - the display's own stream

    def step(self, row: StepRecord, progress: RunProgress) -> None:
        """Print a training line when one is due."""
        if progress.ends_line:
            self.say(training_line(row, progress))

    def last_step(self, row: StepRecord, progress: RunProgress) -> None:
        """Print a training line."""
        self.say(training_line(row, progress))

    def validation(self, step: int, validation: Validation) -> None:
        """Print a validation line."""
        self.say(evaluation_line("validation", step, validation))
        for name, one in validation.sets.items():
            self.say(evaluation_line(f"validation on {name}", step, one))

    def test(self, step: int, result: Validation) -> None:
        """Print the line of the test set."""
        self.say(evaluation_line("test", step, result))

    def tasks(self, step: int, scores: TaskScores) -> None:
        """Print the line of scores of tasks."""
        self.say(tasks_line(step, scores))

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class SilentDisplay(PlainDisplay):
    """A display that shows nothing."""

    def say(self, text: str) -> None:
        """Show nothing."""
