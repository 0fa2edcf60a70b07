"""Runs that go wrong: numbers, disks, places; each says so and loses nothing it had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def test_diverged(train: Any) -> None:
    """A rate far too high stops the run: where and which weights; good checkpoints stay."""
    good = train("run", "--train-iters 4 --lr-decay-iters 9")
    before = good.saved()
    flags = "--train-iters 9 --lr 1e30 --clip-grad 0 --save-interval 1 --keep-last 1"
    bad = train("run", f"{flags} --override-opt-param-scheduler --load {good.directory}")
    assert bad.status == 1
    assert "Traceback" not in bad.err
    assert "error: " in bad.err
    assert "hint: lower `--lr`" in bad.err
    assert any(word in bad.err for word in ("at step", "after step", "validation sample"))
    summary = bad.summary
    assert summary["status"].startswith("failed: ")
    assert summary["iteration"] >= 4
    assert all("NaN" not in json.dumps(row) for row in bad.rows)
    for path in (bad.directory / "checkpoints").glob("iter_*"):
        step = int(path.name[5:])
        for name, tensor in bad.saved(step).items():
            assert name.startswith("rng") or bool(tensor.isfinite().all()), (step, name)
    assert (bad.directory / "checkpoints").exists()
    assert before.keys() == bad.saved().keys()
    last = bad.err.splitlines()[-1]
    assert last.startswith("to continue from step ")
    assert last.endswith(f": `lmcore train --continue {bad.directory}`")


def test_diverged_at_the_last_step(train: Any) -> None:
    """An update that ruins the weights is noticed before they are saved, without a further step."""
    run = train("run", "--train-iters 1 --lr 1e300 --lr-decay-style constant --clip-grad 0")
    assert run.status == 1
    assert "not finite after step 1" in run.err
    assert run.summary["status"].startswith("failed: weights are not finite")
    assert not list((run.directory / "checkpoints").glob("iter_*"))
    assert "to continue" not in run.err, "there is nothing to continue from"


def limit(size: int) -> str:
    """Return code that makes writes beyond so many bytes of a file fail, as a full disk does."""
    return f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))
"""


def test_disk_full_for_metrics(start: Any, finish: Any, train: Any) -> None:
    """A row that cannot be written ends the run with a message; the file has whole rows."""
    # Builds the data's index without the limit.
    train("first", "--train-iters 400 --exit-interval 1")
    process = start("run", "--train-iters 400 --no-tensorboard", before=limit(20_000))
    run = finish(process, "run")
    assert run.status == 1
    assert "metrics.jsonl` cannot be written\nwhy: File too large" in run.err
    assert "Traceback" not in run.err
    steps = [row["step"] for row in run.rows]
    assert steps == list(range(1, len(steps) + 1))
    assert (run.directory / "metrics.jsonl").stat().st_size <= 20_000
    assert "cannot be written" in run.summary["status"]


def test_no_place_for_events(train: Any) -> None:
    """Events that cannot be written end with a warning; the run completes."""
    run = train("run", "--train-iters 9 --tensorboard-dir /dev/full/board")
    assert run.status == 0, run.err
    assert run.err.count("is logged to TensorBoard: /dev/full/board: Not a directory") == 1
    assert len(run.rows) == 9


def test_disk_full_for_a_checkpoint(start: Any, finish: Any, train: Any) -> None:
    """A checkpoint that does not fit fails with what it needs; the one before is still loaded."""
    flags = "--train-iters 8 --lr-decay-iters 8 --no-tensorboard"
    first = train("run", f"{flags} --exit-interval 4")
    tensors = first.saved()
    size = max(p.stat().st_size for p in (first.directory / "checkpoints").rglob("*.distcp"))
    process = start("run", f"{flags} --load {first.directory}", before=limit(size // 2))
    run = finish(process, "run")
    assert run.status == 1
    assert "could not save the checkpoint of iteration 8" in run.err
    assert "earlier checkpoints are intact" in run.err
    assert "Traceback" not in run.err
    assert len(run.rows) == 8
    kept = run.saved()
    assert all(bool((kept[name] == tensor).all()) for name, tensor in tensors.items())
    again = train("run", f"{flags} --load {first.directory}")
    assert again.status == 0, again.err
    assert [row["step"] for row in again.rows] == list(range(1, 9))


@pytest.mark.parametrize("damage", ["truncated", "altered", "no manifest"])
def test_damaged_checkpoint(train: Any, train_once: Any, copy_of: Any, damage: str) -> None:
    """A damaged checkpoint is refused by name, and the run directory stays as it is."""
    first = copy_of(train_once("--train-iters 4"), "run")
    folder = first.directory / "checkpoints/iter_0000004"
    (path,) = folder.glob("*.distcp")
    data = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(data[:-100])
    elif damage == "altered":
        path.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
    else:
        (folder / "manifest.json").unlink()
    before = (first.directory / "metrics.jsonl").read_bytes()
    again = train("run", f"--train-iters 4 --load {first.directory}")
    assert again.status == 1
    assert "error: " in again.err
    assert "Traceback" not in again.err
    assert "iter_0000004" in again.err
    assert (first.directory / "metrics.jsonl").read_bytes() == before


def test_nothing_is_left_of_a_run_that_never_began(train: Any, tmp_path: Path) -> None:
    """A wrong setting found late leaves no empty run directory."""
    run = train("run", "--train-iters 2 --precision fp61")
    assert run.status == 2
    assert not run.directory.exists()
    run = train("other", f"--train-iters 2 --load {tmp_path / 'absent'}")
    assert run.status == 2
    assert not run.directory.exists()


def test_sampling_interrupted(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is complete if its sample at the end is interrupted."""

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lmcore.train.report.run_report.take_sample", interrupted)
    run = train("run", "--train-iters 3 --sample-tokens 5")
    assert run.status == 130
    assert run.summary["status"] == "completed"
    assert run.summary["checkpoint"]
