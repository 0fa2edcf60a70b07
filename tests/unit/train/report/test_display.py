"""Text of the display: the training line, plain lines, times."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from lmcore.train.report.announcement import header_lines
from lmcore.train.report.display import (
    PlainDisplay,
    RunProgress,
    duration,
    evaluation_detail,
    training_line,
)
from lmcore.train.report.display_choice import open_display
from lmcore.train.report.live_display import LiveDisplay
from lmcore.train.step_record import StepRecord
from lmcore.train.validation import Validation

ROW = StepRecord(
    step=26,
    consumed_samples=52,
    consumed_tokens=106_496,
    global_batch_size=2,
    loss=9.5,
    learning_rate=6e-5 * 52 / 183_105,
    grad_norm=12.3456,
    loss_scale=1.0,
    skipped_iterations=0,
    tokens_per_second=4000.4,
    step_time_ms=1000.0,
    data_wait_ms=1.0,
    mfu=0.41,
)


def progress(**changes: Any) -> RunProgress:
    numbers: dict[str, Any] = {
        "train_iters": 500_000,
        "seconds_left": 3723.4,
        "skipped_iterations": 0,
        "nan_iterations": 0,
        "mean_loss": 10.412345678,
        "mean_step_ms": 1023.96,
        "mean_tokens_per_second": 4000.4,
        "mean_mfu": 0.4123,
        "ends_line": True,
    }
    return RunProgress(**(numbers | changes))


MEGATRON = (
    " iteration       26/  500000 | consumed samples:           52 | "
    "elapsed time per iteration (ms): 1024.0 | learning rate: 1.704E-08 | "
    "global batch size:     2 | lm loss: 1.041235E+01 | loss scale: 1.0 | grad norm: 12.346 | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def test_training_line() -> None:
    """The line begins as Megatron's, digit for digit, and ends with speed and time left."""
    line = training_line(ROW, progress())
    assert line == MEGATRON + " tokens/s: 4000 | MFU: 41.2% | ETA: 1:02:03 |"
    assert training_line(ROW, progress(mean_mfu=None)) == (
        MEGATRON + " tokens/s: 4000 | ETA: 1:02:03 |"
    )


def test_line_with_numbers_that_are_wanted() -> None:
    """Zeros in gradients and the norm of the parameters follow the gradient norm."""
    row = dataclasses.replace(ROW, num_zeros_in_grad=1834, params_norm=2731.4021)
    wanted = "grad norm: "
    before, after = MEGATRON.split(wanted)
    norm, rest = after.split(" | ", maxsplit=1)
    numbers = "num zeros: 1834.0 | params norm: 2731.402"
    line = training_line(row, progress(mean_mfu=None))
    assert line == f"{before}{wanted}{norm} | {numbers} | {rest} tokens/s: 4000 | ETA: 1:02:03 |"


def test_lines_of_steps_that_compile() -> None:
    """They are counted, and left out of the figures unless there were no other steps."""
    line = training_line(ROW, progress(mean_mfu=None, compiling_steps=2))
    speed = " tokens/s: 4000 | steps with compilation: 2 (excluded) | ETA: 1:02:03 |"
    assert line == MEGATRON + speed
    numbers = {"mean_tokens_per_second": None, "mean_mfu": None, "seconds_left": None}
    line = training_line(ROW, progress(**numbers, compiling_steps=1))
    assert line == MEGATRON + " steps with compilation: 1 (included) |"


def test_header_fits_a_narrow_terminal() -> None:
    """A header line is broken between words and indented below its text."""
    line = (
        "model     GPT, 11,504 parameters: 2 layers, hidden 64, 4 heads in 2 groups, vocabulary 257"
    )
    for width in (40, 60):
        rows = header_lines(line, width).splitlines()
        assert len(rows) > 1
        assert max(map(len, rows)) <= width
        assert " ".join(rows).split() == line.split()
        assert all(row.startswith(" " * len("model     ")) for row in rows[1:])


def test_lines_of_skipped_steps() -> None:
    """Without an update there is no norm, and without a loss no loss, as in Megatron's line."""
    row = dataclasses.replace(ROW, grad_norm=None, loss_scale=2.0**32, loss=None)
    line = training_line(row, progress(skipped_iterations=2, nan_iterations=1))
    assert (
        "| lm loss: 1.041235E+01 | loss scale: 4294967296.0 | number of skipped iterations:   2 | "
        "number of nan iterations:   1 |" in line
    )
    line = training_line(row, progress(mean_loss=None, skipped_iterations=1))
    assert "| global batch size:     2 | loss scale: 4294967296.0 | number of skipped" in line


def test_training_line_parses() -> None:
    """A script that splits at bars and colons gets every number."""
    fields = [part.strip() for part in training_line(ROW, progress()).strip(" |").split("|")]
    assert re.fullmatch(r"iteration\s+26/\s+500000", fields[0])
    named = dict(re.split(r":\s*", field, maxsplit=1) for field in fields[1:])
    assert float(named["lm loss"]) == pytest.approx(10.412345678, rel=1e-6)
    assert int(named["consumed samples"]) == 52


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0:00"),
        (-3, "0:00"),
        (9.4, "0:09"),
        (59.6, "1:00"),
        (125, "2:05"),
        (3599.5, "1:00:00"),
        (3723, "1:02:03"),
        (360_000, "100:00:00"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    """Times are written as on a clock, rounded to seconds."""
    assert duration(seconds) == text


@pytest.mark.parametrize(
    "losses, words",
    [
        ({"lm_loss": 1.0}, ", perplexity 2.72"),
        (
            {"lm_loss": 1.0, "sop_loss": 0.5},
            " (lm loss 1.0000, sop loss 0.5000), lm perplexity 2.72",
        ),
        ({"classification_loss": 1.0}, ""),
        ({"mask_loss": 1.0, "order_loss": 0.5}, " (mask loss 1.0000, order loss 0.5000)"),
    ],
)
def test_the_perplexity_belongs_to_the_loss_of_tokens(losses: dict[str, float], words: str) -> None:
    """It is of `lm_loss` alone, and beside other losses each one is named."""
    found = Validation(losses, 4, {"lm_accuracy": 0.5})
    shown = evaluation_detail(found.losses, found.perplexity, found.accuracies)
    assert shown == f"{words}, lm accuracy 50.0%"


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Training lines come when due, validations always; all on stderr."""
    display = PlainDisplay()
    display.say("hello [bold]")
    display.step(ROW, progress(ends_line=False))
    display.step(ROW, progress())
    display.validation(30, Validation({"lm_loss": 2.5}, 4))
    display.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "hello [bold]",
        training_line(ROW, progress()),
        " validation at iteration 30 | lm loss value: 2.500000E+00 | lm loss PPL: 1.218249E+01 |",
    ]


def test_choice(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`auto` is live on a terminal and plain elsewhere; `none` shows nothing."""
    assert type(open_display("auto")) is PlainDisplay
    assert type(open_display("plain")) is PlainDisplay
    assert type(open_display("live")) is LiveDisplay
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert type(open_display("auto")) is LiveDisplay
    assert type(open_display("plain")) is PlainDisplay
    silent = open_display("none")
    silent.say("x")
    silent.step(ROW, progress())
    silent.validation(1, Validation({"lm_loss": 2.0}, 4))
    assert capsys.readouterr().err == ""
