"""The live view: what it shows, what scrolls above it, and that it lets go of the terminal."""

from __future__ import annotations

import dataclasses
import io
import logging
from collections.abc import Iterator

import pytest
from rich.console import Console

from lmcore.base import log
from lmcore.train.report.display import RunProgress
from lmcore.train.report.live_display import LiveDisplay, sparkline
from lmcore.train.step_record import StepRecord
from lmcore.train.validation import Validation

ROW = StepRecord(
    step=3,
    consumed_samples=24,
    consumed_tokens=384,
    global_batch_size=8,
    loss=4.25,
    learning_rate=1e-3,
    grad_norm=0.75,
    tokens_per_second=5000.0,
    step_time_ms=80.0,
    data_wait_ms=0.1,
)
PROGRESS = RunProgress(12, 61.0, 0, 0, 4.5, 81.0, 4900.0, 0.31, ends_line=False)
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


@pytest.fixture
def terminal() -> io.StringIO:
    """Output to the terminal."""
    return io.StringIO()


@pytest.fixture
def display(terminal: io.StringIO) -> Iterator[LiveDisplay]:
    """A live view on that terminal, closed in the end."""
    console = Console(file=terminal, force_terminal=True, width=100, color_system=None)
    display = LiveDisplay(console)
    yield display
    display.close()


def drawn(display: LiveDisplay) -> str:
    console = Console(width=100, color_system=None, record=True, file=io.StringIO())
    console.print(display._render())
    return console.export_text()


def test_view(display: LiveDisplay) -> None:
    """RunProgress, time left, loss with its curve, validation, speed, rate and norm are there."""
    for step, loss in enumerate((6.0, 5.0, 4.25), start=1):
        display.step(dataclasses.replace(ROW, step=step, loss=loss), PROGRESS)
    display.validation(2, Validation({"lm_loss": 5.125}, 4))
    text = drawn(display)
    for part in (
        *("step 3/12", "25%", "1:01 left", "4.2500", "█", "5.1250", "after step 2"),
        *("4,900", "81 ms a step, 31% MFU", "learning rate 1.00e-03", "gradient norm 0.75"),
    ):
        assert part in text, part


def test_view_of_several_losses(display: LiveDisplay) -> None:
    """Each one is named, and the perplexity is of the loss of tokens."""
    display.step(ROW, PROGRESS)
    display.validation(3, Validation({"lm_loss": 1.0, "sop_loss": 0.5}, 4, {"lm_accuracy": 0.25}))
    assert "after step 3 (lm loss 1.0000, sop loss 0.5000), lm perplexity 2.72" in drawn(display)


def test_view_while_all_steps_compile(display: LiveDisplay) -> None:
    """Neither speed nor the time left is known."""
    unknown = {"mean_tokens_per_second": None, "mean_mfu": None, "seconds_left": None}
    display.step(ROW, dataclasses.replace(PROGRESS, **unknown, compiling_steps=1))
    text = drawn(display)
    assert "81 ms a step, compilation included" in text
    assert "tokens/s" not in text
    assert "left" not in text


@pytest.mark.parametrize("columns", [40, 60, 100])
def test_curve_of_a_long_run_fits(columns: int) -> None:
    """The loss curve is as wide as the terminal leaves room for, at most 48 columns."""
    console = Console(file=io.StringIO(), width=columns)
    display = LiveDisplay(console)
    for _ in range(100):
        display.losses.append(len(display.losses) % 7)
    display._last = (ROW, PROGRESS)
    console.print(display._render())
    (line,) = [line for line in console.file.getvalue().splitlines() if line.startswith("loss")]
    assert "\N{HORIZONTAL ELLIPSIS}" not in line
    assert len(line.split()[-1]) == min(48, columns - 15)


def test_skipped_steps(display: LiveDisplay) -> None:
    """A step that was skipped has no norm; how many there were and the scale are shown."""
    skipped = dataclasses.replace(
        ROW, loss=None, grad_norm=None, skipped_iterations=2, loss_scale=65536.0
    )
    display.step(skipped, dataclasses.replace(PROGRESS, mean_loss=None))
    text = drawn(display)
    for part in ("not finite", "step skipped", "loss scale 65536, 2 steps skipped so far"):
        assert part in text, part


def test_no_mfu(display: LiveDisplay) -> None:
    """MFU is left out if the device's peak is unknown."""
    display.step(ROW, dataclasses.replace(PROGRESS, mean_mfu=None))
    assert "MFU" not in drawn(display)


def test_terminal_is_given_back(display: LiveDisplay, terminal: io.StringIO) -> None:
    """The cursor is hidden while the view is up and shown again by `close`, also a second one."""
    display.say("before")
    assert HIDE not in terminal.getvalue()
    display.step(ROW, PROGRESS)
    assert terminal.getvalue().count(HIDE) == 1
    display.close()
    display.close()
    assert terminal.getvalue().rstrip().endswith(SHOW)
    assert terminal.getvalue().count(SHOW) == 1
    assert "step 3/12" in terminal.getvalue()
    display.say("after")
    assert terminal.getvalue().endswith("after\n")


def test_log_records_scroll_by(
    display: LiveDisplay, terminal: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    """Log records go above the view while it is up, and to stderr again after it."""
    log.configure()
    root = logging.getLogger("lmcore")
    try:
        handlers = list(root.handlers)
        display.step(ROW, PROGRESS)
        logging.getLogger("lmcore.train.x").warning("[red] disk is [nearly] full")
        assert "warning: [red] disk is [nearly] full" in terminal.getvalue()
        assert capsys.readouterr().err == ""
        display.close()
        assert root.handlers == handlers
        logging.getLogger("lmcore.train.x").warning("after")
        assert "after" not in terminal.getvalue()
        assert "warning: after" in capsys.readouterr().err
    finally:
        for handler in list(root.handlers):
            root.removeHandler(handler)
        root.propagate = True
        root.setLevel(logging.NOTSET)


@pytest.mark.parametrize(
    "values, width, curve",
    [
        ([], 5, ""),
        ([1.0], 5, "▁"),
        ([2.0, 2.0, 2.0], 5, "▁▁▁"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([7, 0], 8, "█▁"),
        ([0, 0, 7, 7], 2, "▁█"),
        ([1, 3, 5, 7, 9], 2, "▁█"),
    ],
)
def test_sparkline(values: list[float], width: int, curve: str) -> None:
    """Values are averaged into the width and scaled between their extremes."""
    assert sparkline(values, width) == curve


def test_sparkline_in_ascii() -> None:
    """A terminal whose encoding lacks the blocks gets other characters, one for each."""
    values = [0.0, 1, 2, 3, 4, 5, 6, 7]
    assert sparkline(values, 8, "_.-~=+*#") == "_.-~=+*#"


def test_sparkline_is_never_too_wide() -> None:
    """Any number of values fits."""
    for count in (47, 48, 49, 97, 4096):
        assert len(sparkline([float(i % 13) for i in range(count)], 48)) == min(48, count)
