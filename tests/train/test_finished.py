"""A run that is finished, submitted again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

FLAGS = "--train-iters 4 --sample-tokens 5 --eval-iters 1 --split 80,20,0"


def files_of(directory: Path) -> dict[Path, tuple[int, bytes]]:
    """Return time and content of each file in *directory*."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


@pytest.mark.parametrize(
    "more",
    [
        "",
        "--log-interval 2 --keep-last 3",
        # Named in a warning, and so seen only when the checkpoint is loaded.
        "--weight-decay 0.02",
    ],
)
def test_it_changes_nothing(train: Any, train_once: Any, copy_of: Any, more: str) -> None:
    """One line, exit status 0, no sample, and every file as it was."""
    first = copy_of(train_once(FLAGS), "run")
    before = files_of(first.directory)
    again = train("run", f"{FLAGS} --load {first.directory} {more}")
    assert again.status == 0, again.err
    assert again.out == (
        f"nothing is left to train: `{first.directory}` is complete at step 4; nothing changed; "
        f"`lmcore train --continue {first.directory} --train-iters N` trains longer\n"
    )
    assert "\ndevice " not in f"\n{again.err}", "the header is of a run that trains and writes"
    assert files_of(first.directory) == before
    assert again.summary["loss"] == first.rows[-1]["loss"]


@pytest.mark.parametrize("more", ["", "--weight-decay 0.02"])
def test_another_directory_gets_the_checkpoint(
    train: Any, train_once: Any, copy_of: Any, more: str
) -> None:
    """The announced checkpoint exists: the directory of `--save` has the weights."""
    first = copy_of(train_once(FLAGS), "run")
    before = files_of(first.directory)
    second = train("other", f"{FLAGS} --load {first.directory} {more}")
    assert second.status == 0, second.err
    assert "no step is left to train" in second.err
    assert f"lmcore generate --load {second.directory} " in second.out
    (saved,) = (second.directory / "checkpoints").glob("iter_*")
    assert f"checkpoint      {saved}\n" in second.out
    again = train("other", f"{FLAGS} --load {second.directory} {more}")
    assert again.out.startswith(f"nothing is left to train: `{second.directory}`")
    assert files_of(first.directory) == before


def test_several_processes(start: Any, finish: Any, train: Any, tmp_path: Any) -> None:
    """The same with a process for each rank: none is started, and the line is printed once."""
    flags = "--train-iters 2 --micro-batch-size 2 --nproc-per-node 2"
    first = finish(start("run", f"{flags} --load {tmp_path / 'run'}"), "run")
    assert first.status == 0, first.err
    assert first.err.count("starting from initial weights") == 1
    before = files_of(first.directory)
    again = train("run", f"{flags} --load {first.directory}")
    assert again.status == 0, again.err
    assert again.out.startswith("nothing is left to train")
    assert again.out.count("\n") == 1
    changed = finish(start("run", f"{flags} --load {first.directory} --weight-decay 0.02"), "run")
    assert changed.status == 0, changed.err
    assert changed.out == again.out
    assert files_of(first.directory) == before


def test_without_save(train: Any, train_once: Any, tmp_path: Any, monkeypatch: Any) -> None:
    """No directory is made for a run that has nothing to do."""
    monkeypatch.chdir(tmp_path)
    first = train_once(FLAGS)
    again = train("new", f"{FLAGS} --load {first.directory} --save none")
    assert again.status == 0, again.err
    assert "nothing is left to train" in again.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("summary", [None, "{", '{"status": "received SIGTERM", "iteration": 4}'])
def test_an_end_without_summary(
    train: Any, train_once: Any, copy_of: Any, summary: str | None
) -> None:
    """A run that was killed after its last save gets its summary, with the numbers of its rows."""
    first = copy_of(train_once(FLAGS), "run")
    path = first.directory / "summary.json"
    wanted = json.loads(path.read_text())
    path.unlink()
    if summary is not None:
        path.write_text(summary)
    again = train("run", f"{FLAGS} --load {first.directory}")
    assert again.status == 0, again.err
    assert "nothing is left to train: the checkpoint is of step 4" in again.err
    assert again.curve() == first.curve()
    for name in ("status", "iteration", "loss", "valid_loss", "valid_step", "valid_perplexity"):
        assert again.summary[name] == wanted[name]


def test_another_run_is_not_taken_for_it(train: Any, train_once: Any, copy_of: Any) -> None:
    """A setting that must agree is still compared, and a longer run is trained."""
    first = copy_of(train_once("--train-iters 4 --lr-decay-iters 8"), "run")
    refused = train("run", f"--train-iters 4 --lr-decay-iters 8 --seed 3 --load {first.directory}")
    assert refused.status == 2
    longer = train("run", f"--train-iters 8 --lr-decay-iters 8 --load {first.directory}")
    assert longer.status == 0, longer.err
    assert [row["step"] for row in longer.rows] == list(range(1, 9))


def test_no_summary_of_an_earlier_start(
    train: Any, train_once: Any, copy_of: Any, monkeypatch: Any
) -> None:
    """A run that continues and is then killed does not keep the status of its earlier end."""
    first = copy_of(train_once("--train-iters 4 --lr-decay-iters 8"), "run")
    path, found = first.directory / "summary.json", []
    assert path.exists()
    monkeypatch.setattr(
        "lmcore.train.report.run_report.run_start", lambda *_: found.append(path.exists())
    )
    flags = f"--train-iters 5 --lr-decay-iters 8 --load {first.directory}"
    assert train("run", flags).status == 0
    assert found == [False]
    assert path.exists()
