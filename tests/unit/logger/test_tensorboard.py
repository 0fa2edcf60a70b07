"""TensorBoard's events, with lmcore's names and Megatron-LM's, written and read back."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from step_rows import row
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from lmcore.config.section import Config, LoggingSection
from lmcore.logger.run_loggers import RunLoggers
from lmcore.logger.tensorboard import TensorBoard
from lmcore.model.run_logger import LoggedRun
from lmcore.train.report.step_metrics import step_metrics
from lmcore.train.step_record import StepRecord


def write(board: TensorBoard, one: StepRecord, names: str = "lmcore") -> None:
    board.log(step_metrics(one, names))


def events(folder: Path) -> Iterator[Event]:
    """Read every event of every file, checking lengths and checksums (the record format)."""
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        at = 0
        while at < len(data):
            header = data[at : at + 8]
            (size,) = struct.unpack("<Q", header)
            assert struct.unpack("<I", data[at + 8 : at + 12])[0] == masked_crc32c(header)
            body = data[at + 12 : at + 12 + size]
            crc = data[at + 12 + size : at + 16 + size]
            assert struct.unpack("<I", crc)[0] == masked_crc32c(body)
            yield Event.FromString(body)
            at += 16 + size


def scalars(folder: Path) -> dict[tuple[int, str], float]:
    return {
        (event.step, value.tag): value.simple_value
        for event in events(folder)
        for value in event.summary.value
    }


def test_tensorboard_events(tmp_path: Path) -> None:
    """Every number of every row is an event under its tag, with its step."""
    board = TensorBoard(tmp_path / "tb", 1000)
    for step in (1, 2):
        write(board, row(step, mfu=0.5))
    write(board, row(3, valid_loss=2.5, valid_perplexity=12.25))
    board.close("completed")
    found = scalars(tmp_path / "tb")
    assert found[2, "train/loss"] == 2.5
    assert found[1, "train/learning_rate"] == pytest.approx(1e-3)
    assert found[1, "train/global_batch_size"] == 8
    assert found[1, "speed/mfu"] == 0.5
    assert (3, "speed/mfu") not in found
    assert found[3, "valid/loss"] == 2.5
    assert found[3, "valid/perplexity"] == 12.25
    assert {tag for _, tag in found} == {
        *("train/loss", "train/grad_norm", "train/learning_rate", "train/loss_scale"),
        *("speed/tokens_per_second", "speed/step_time_ms", "speed/data_wait_ms", "speed/mfu"),
        *("valid/loss", "valid/perplexity"),
        *("train/global_batch_size", "train/skipped_iterations"),
    }


def test_tensorboard_with_megatrons_tags(tmp_path: Path) -> None:
    """Megatron-LM's names, by step and by consumed samples; the time of a step is in seconds."""
    board = TensorBoard(tmp_path / "tb", 1000)
    write(board, row(2, mfu=0.5), "megatron")
    write(board, row(3, valid_loss=2.5, valid_perplexity=12.25), "megatron")
    board.close("completed")
    found, samples = scalars(tmp_path / "tb"), row(3).consumed_samples
    assert found[2, "lm loss"] == 2.5
    assert found[2, "iteration-time"] == pytest.approx(row(2).step_time_ms / 1e3)
    assert found[3, "lm loss validation"] == found[samples, "lm loss validation vs samples"] == 2.5
    assert found[samples, "learning-rate vs samples"] == found[3, "learning-rate"]
    both = ("lm loss", "grad-norm", "learning-rate", "loss-scale", "batch-size")
    both += ("lm loss validation", "lm loss validation ppl")
    assert {tag for _, tag in found} == {
        *both,
        *(f"{tag} vs samples" for tag in both),
        *("speed/tokens_per_second", "speed/step_time_ms", "speed/data_wait_ms", "speed/mfu"),
        *("iteration-time", "train/skipped_iterations"),
    }


OBSERVED = {
    "params_norm": 12.5,
    "num_zeros_in_grad": 7,
    "memory_allocated_bytes": 1024,
    "memory_max_allocated_bytes": 2048,
    "memory_reserved_bytes": 4096,
}
TAGS = {
    "lmcore": {
        "train/params_norm": 12.5,
        "train/num_zeros_in_grad": 7,
        "memory/allocated_bytes": 1024,
        "memory/max_allocated_bytes": 2048,
        "memory/reserved_bytes": 4096,
    },
    "megatron": {
        "params-norm": 12.5,
        "num-zeros": 7,
        "mem-allocated-bytes": 1024,
        "mem-max-allocated-bytes": 2048,
        "mem-reserved-bytes": 4096,
    },
}


@pytest.mark.parametrize("names", TAGS)
def test_numbers_that_are_wanted(tmp_path: Path, names: str) -> None:
    """Norm, zeros and memory each have a tag; Megatron's first two also by samples."""
    boards = [TensorBoard(tmp_path / name, 1000) for name in ("without", "with")]
    for board, numbers in zip(boards, ({}, OBSERVED), strict=True):
        write(board, row(3, **numbers), names)
        board.close("completed")
    without, found = scalars(tmp_path / "without"), scalars(tmp_path / "with")
    wanted: dict[tuple[int, str], float] = {(3, tag): one for tag, one in TAGS[names].items()}
    if names == "megatron":
        wanted |= {(24, "params-norm vs samples"): 12.5, (24, "num-zeros vs samples"): 7}
    assert {key: one for key, one in found.items() if key not in without} == wanted


def test_tensorboard_is_current(tmp_path: Path) -> None:
    """The first event, and a full queue, are on disk while the run continues."""
    board = TensorBoard(tmp_path / "tb", 3)
    write(board, row(1))
    assert len(scalars(tmp_path / "tb")) > 0
    for step in (2, 3, 4):
        write(board, row(step))
    assert (4, "train/loss") in scalars(tmp_path / "tb")
    board.close("completed")


def test_tensorboard_keeps_the_first_file(tmp_path: Path) -> None:
    """A run resumed within a second adds a file and overwrites none."""
    for step in (1, 2):
        board = TensorBoard(tmp_path / "tb", 1000)
        write(board, row(step))
        board.close("completed")
    assert {step for step, _ in scalars(tmp_path / "tb")} == {1, 2}


def test_tensorboard_without_rows(tmp_path: Path) -> None:
    """No row, no directory."""
    TensorBoard(tmp_path / "tb", 1000).close("completed")
    assert not (tmp_path / "tb").exists()


def test_a_full_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events that cannot be written end with one warning; the run continues."""
    config = Config(logging=LoggingSection(tensorboard_queue_size=1))
    loggers = RunLoggers(LoggedRun(tmp_path, "run", config))

    def full(_writer: Any) -> None:
        raise OSError(28, "No space left on device")

    loggers.log(step_metrics(row(1), "lmcore"))
    monkeypatch.setattr("tensorboardX.RecordWriter.flush", full)
    for step in range(2, 9):
        loggers.log(step_metrics(row(step), "lmcore"))
    assert loggers.close("completed") == {}
    (record,) = caplog.records
    assert record.message == "nothing more is logged to TensorBoard: No space left on device"


def test_a_directory_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is warned about once, by its name."""
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file/tb")
    config = Config(logging=LoggingSection(tensorboard_dir=folder))
    loggers = RunLoggers(LoggedRun(tmp_path, "run", config))
    for step in (1, 2):
        loggers.log(step_metrics(row(step), "lmcore"))
    loggers.close("completed")
    (record,) = caplog.records
    assert f"{folder}: Not a directory" in record.message


def test_a_text(tmp_path: Path) -> None:
    """A text is an event of the page of texts, with its step."""
    board = TensorBoard(tmp_path / "tb", 1000)
    board.text("sample", "ROMEO: ay", 7)
    board.close("completed")
    (event,) = [one for one in events(tmp_path / "tb") if one.summary.value]
    (value,) = event.summary.value
    assert event.step == 7
    assert value.tag.startswith("sample")
    assert value.tensor.string_val == [b"ROMEO: ay"]
