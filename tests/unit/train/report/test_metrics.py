"""`metrics.jsonl`, written, cut short and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from step_rows import row

from lmcore.base.errors import RunError
from lmcore.train.report.metrics import MetricsFile


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_keys() -> None:
    """A row has the documented keys; keys that do not apply are left out."""
    always = {
        *("step", "consumed_samples", "consumed_tokens", "loss", "learning_rate", "grad_norm"),
        *("loss_scale", "tokens_per_second", "step_time_ms", "data_wait_ms"),
        *("global_batch_size", "skipped_iterations"),
    }
    assert set(row(1).to_dict()) == always
    full = row(1, mfu=0.4, valid_loss=1.0, valid_perplexity=2.7)
    assert set(full.to_dict()) == always | {"mfu", "valid_loss", "valid_perplexity"}
    skipped = row(2, loss=None, grad_norm=None)
    assert (skipped.skipped, row(1).skipped) == (True, False)
    assert set(skipped.to_dict()) == always - {"loss", "grad_norm"}


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_refused(tmp_path: Path, *, exists: bool) -> None:
    """The file that a symbolic link leads to keeps its content, and is not created."""
    target, link = tmp_path / "mine", tmp_path / "metrics.jsonl"
    if exists:
        target.write_text("precious\n")
    link.symlink_to(target)
    with pytest.raises(RunError, match="is a symbolic link"):
        MetricsFile(link)
    assert target.exists() == exists
    assert not exists or target.read_text() == "precious\n"


def test_rows_are_there_at_once(tmp_path: Path) -> None:
    """Each row can be read as soon as it is written, as exact numbers."""
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        for step in (1, 2, 3):
            metrics.write(row(step, loss=1 / 3))
            assert steps_in(path) == list(range(1, step + 1))
    assert json.loads(path.read_text().splitlines()[-1])["loss"] == 1 / 3


@pytest.mark.parametrize(
    "end",
    [
        "",
        '{"step": 6, "loss": 1.2',
        '{"step": 6, "loss": 1.2}',
        '{"loss": 1}\n',
        "\n\n",
        "null\n",
        "\udcff\udcfe",
    ],
    ids=["clean", "torn", "no line end", "no step", "empty lines", "null", "not UTF-8"],
)
def test_resume_drops_what_comes_again(tmp_path: Path, end: str) -> None:
    """Rows beyond the step resumed from go, and so does a torn last line, wherever it was torn."""
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        for step in range(1, 6):
            metrics.write(row(step))
    path.write_bytes(path.read_bytes() + end.encode("utf-8", "surrogateescape"))
    with MetricsFile(path, after_step=3) as metrics:
        metrics.write(row(4, loss=0.125))
    assert steps_in(path) == [1, 2, 3, 4]
    assert json.loads(path.read_text().splitlines()[-1])["loss"] == 0.125
    assert list(tmp_path.iterdir()) == [path]


def test_last_row_without_its_line_end(tmp_path: Path) -> None:
    """A last row that lost only its line end is kept, and the next row begins a new line."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    with MetricsFile(path, after_step=2) as metrics:
        metrics.write(row(3))
    assert steps_in(path) == [1, 2, 3]


def test_long_file_is_read_from_its_end(tmp_path: Path) -> None:
    """Resuming reads the rows to drop and little more, whatever comes before them."""
    path = tmp_path / "metrics.jsonl"
    rows = [f'{{"step": {step}, "loss": {step / 7}}}\n' for step in range(1, 200_001)]
    path.write_text("".join(rows) + '{"step": 200001, "lo')
    before = _bytes_read()
    with MetricsFile(path, after_step=199_000) as metrics:
        assert _bytes_read() - before < len("".join(rows[199_000:])) + 2**18
        metrics.write(row(199_001))
    assert path.stat().st_size > len("".join(rows[:199_000]))
    assert steps_in(path) == list(range(1, 199_002))


def _bytes_read() -> int:
    """Return the number of bytes that this process has read."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@pytest.mark.parametrize("size", [1, 2**16 - 1, 2**16, 2**16 + 1, 3 * 2**20])
def test_garbage_at_the_end(tmp_path: Path, size: int) -> None:
    """A tail of zeros, as file systems leave after a power cut, is dropped, however long."""
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        for step in (1, 2, 3):
            metrics.write(row(step))
    with path.open("ab") as file:
        file.write(bytes(size))
    with MetricsFile(path, after_step=2) as metrics:
        metrics.write(row(3))
    assert steps_in(path) == [1, 2, 3]


def test_rows_of_earlier_blocks(tmp_path: Path) -> None:
    """Each step can be resumed from, also where a row begins in one block and ends in the next."""
    path = tmp_path / "metrics.jsonl"
    rows = [
        f'{{"step": {step}, "pad": "{"x" * (997 * step % 30_000)}"}}\n' for step in range(1, 30)
    ]
    for after in range(30):
        path.write_text("".join(rows))
        with MetricsFile(path, after_step=after):
            pass
        assert path.read_text() == "".join(rows[:after])


def test_new_run_replaces_the_file(tmp_path: Path) -> None:
    """Rows of a run that never saved are dropped by the run that starts in its directory."""
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        with MetricsFile(path) as metrics:
            metrics.write(row(1))
    assert steps_in(path) == [1]


class _FullDisk:
    """A file that takes some bytes of a row and then no more."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: memoryview) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        taken: int = self.file.write(data[: self.room])
        self.room -= taken
        return taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 1, 100])
def test_full_disk(tmp_path: Path, room: int) -> None:
    """On a full disk the run stops with a message, and the file ends with the last whole row."""
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        metrics.write(row(1))
        metrics._file = _FullDisk(metrics._file, room)  # type: ignore[assignment]
        with pytest.raises(RunError, match="cannot be written") as caught:
            metrics.write(row(2))
    assert caught.value.why == "No space left on device"
    assert "--load" in str(caught.value.hint)
    assert steps_in(path) == [1]


def test_short_writes(tmp_path: Path) -> None:
    """A row that the system takes in pieces is written in full."""
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        real = metrics._file.write
        metrics._file = _FullDisk(metrics._file, 10**6)  # type: ignore[assignment]
        metrics._file.write = lambda data: real(data[:7])  # type: ignore[method-assign]
        metrics.write(row(1))
    assert steps_in(path) == [1]


def test_unwritable(tmp_path: Path) -> None:
    """A file that cannot be opened is named."""
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(RunError, match=r"metrics.jsonl` cannot be written"):
        MetricsFile(tmp_path / "metrics.jsonl")
