"""The live view of a run on a terminal: progress, loss with its curve, speed and time left."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lmcore.base.errors import counted, printable
from lmcore.train.report.display import (
    duration,
    evaluation_detail,
    evaluation_line,
    tasks_line,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from lmcore.train.report.display import RunProgress
    from lmcore.train.step_record import StepRecord
    from lmcore.train.task_scores import TaskScores
    from lmcore.train.validation import Validation

__all__ = ["LiveDisplay", "sparkline"]

_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
_CURVE_WIDTH = 48
_REFRESHES = 6
"""Number of times that the view is redrawn in a second."""


def sparkline(values: Sequence[float], width: int, bars: str = _BARS) -> str:
    """Return *values* as a curve of at most *width* characters of *bars*, each a mean of values."""
    if not values:
        return ""
    count = min(width, len(values))
    means = []
    for index in range(count):
        part = values[index * len(values) // count : (index + 1) * len(values) // count]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((mean - low) * scale)] for mean in means)


class _AboveLive(logging.Handler):
    def __init__(self, display: LiveDisplay) -> None:
        super().__init__()
        self.display = display

    def emit(self, record: logging.LogRecord) -> None:
        self.display.say(self.format(record))


class LiveDisplay:
    """A view that is redrawn in place; other lines and log records scroll by above it."""

    def __init__(self, console: Console | None = None) -> None:
        """Show nothing before the first step.

        Args:
            console: Console to draw on; None for stderr.
        """
        self.console = console or Console(stderr=True)
        self.losses: deque[float] = deque(maxlen=4096)
        self.validations: list[tuple[int, Validation]] = []
        self._last: tuple[StepRecord, RunProgress] | None = None
        self._live: Live | None = None
        self._drawn = 0.0
        self._handlers: list[tuple[logging.Handler, logging.Handler]] = []

    @property
    def width(self) -> int:
        """Number of columns of the terminal."""
        return self.console.width

    def say(self, text: str) -> None:
        """Print a line above the view."""
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def step(self, row: StepRecord, progress: RunProgress) -> None:
        """Show a step; the view is redrawn a few times a second."""
        if row.loss is not None:
            self.losses.append(row.loss)
        self._last = (row, progress)
        if self._live is None:
            self._live = self._started_live()
            self._redirect_logging()
        elif not self._live.auto_refresh and time.monotonic() - self._drawn > 1 / _REFRESHES:
            self._drawn = time.monotonic()
            self._live.refresh()

    def last_step(self, row: StepRecord, progress: RunProgress) -> None:
        """Do nothing: the last view remains, and has this step."""

    def validation(self, step: int, validation: Validation) -> None:
        """Show a validation."""
        self.validations.append((step, validation))

    def test(self, step: int, result: Validation) -> None:
        """Print the line of the test set."""
        self.say(evaluation_line("test", step, result))

    def tasks(self, step: int, scores: TaskScores) -> None:
        """Print the line of scores of tasks above the view."""
        self.say(tasks_line(step, scores))

    def close(self) -> None:
        """Stop redrawing; the last view remains."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        root = logging.getLogger("lmcore")
        for ours, theirs in self._handlers:
            root.removeHandler(ours)
            root.addHandler(theirs)
        self._handlers.clear()

    def _started_live(self) -> Live:
        """Start to redraw in a thread, or with the steps if the system gives no more threads."""
        live = Live(
            console=self.console,
            get_renderable=self._render,
            refresh_per_second=_REFRESHES,
        )
        try:
            live.start()
        except RuntimeError:
            live.stop()
            live = Live(console=self.console, get_renderable=self._render, auto_refresh=False)
            live.start()
        return live

    def _redirect_logging(self) -> None:
        root = logging.getLogger("lmcore")
        for handler in list(root.handlers):
            ours = _AboveLive(self)
            ours.setFormatter(handler.formatter)
            for each in handler.filters:
                ours.addFilter(each)
            root.removeHandler(handler)
            root.addHandler(ours)
            self._handlers.append((ours, handler))

    def _render(self) -> RenderableType:
        if self._last is None:
            return Text("")
        row, progress = self._last
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(f"step {row.step}/{progress.train_iters}", style="bold"),
            ProgressBar(total=progress.train_iters, completed=row.step, width=30),
            f"{100 * row.step // progress.train_iters}%",
            "" if progress.seconds_left is None else f"{duration(progress.seconds_left)} left",
        )
        body = Table.grid(padding=(0, 2))
        shown = "not finite" if row.loss is None else f"{row.loss:.4f}"
        rate = progress.mean_tokens_per_second
        speed = "-" if rate is None else f"{rate:,.0f}"
        # Columns of labels and values, each followed by two spaces.
        beside = len("speed") + 2 + max(len(shown), len(speed)) + 2
        bars = _BARS if self.console.encoding.startswith("utf") else _ASCII_BARS
        curve = sparkline(list(self.losses), max(1, min(_CURVE_WIDTH, self.width - beside)), bars)
        body.add_row("loss", Text(shown, style="bold cyan"), Text(curve, style="cyan"))
        if self.validations:
            step, found = self.validations[-1]
            detail = evaluation_detail(found.losses, found.perplexity, found.accuracies)
            detail = f"after step {step}{detail}"
            body.add_row(
                "valid",
                Text(f"{found.loss:.4f}", style="bold green"),
                Text(detail, style="dim"),
            )
            for name, one in found.sets.items():
                detail = f"on {name}"
                detail += evaluation_detail(one.losses, one.perplexity, one.accuracies)
                body.add_row("", Text(f"{one.loss:.4f}", style="green"), Text(detail, style="dim"))
        mfu = "" if progress.mean_mfu is None else f", {100 * progress.mean_mfu:.0f}% MFU"
        detail = f"tokens/s, {progress.mean_step_ms:.0f} ms a step{mfu}"
        if rate is None:
            detail = f"{progress.mean_step_ms:.0f} ms a step, compilation included"
        body.add_row("speed", Text(speed, style="bold"), Text(detail, style="dim"))
        norm = "step skipped" if row.grad_norm is None else f"gradient norm {row.grad_norm:.2f}"
        update = f"learning rate {row.learning_rate:.2e}, {norm}"
        body.add_row("", "", Text(update, style="dim"))
        if row.skipped_iterations:
            skipped = counted(row.skipped_iterations, "step")
            scale = f"loss scale {row.loss_scale:g}, {skipped} skipped so far"
            body.add_row("", "", Text(scale, style="dim"))
        return Group(head, body)
