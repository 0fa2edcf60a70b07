"""Checkpoints by time: every ten minutes by default; the newest two are kept."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from lmcore.train import exit_conditions

DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1 --eval-interval 4 --eval-iters 1"
FLAGS = f"--train-iters 9 --split 80,20,0 {DROPOUT}"


@pytest.fixture
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two minutes pass with each look at the clock."""
    ticks = itertools.count(step=120)
    real = exit_conditions.ExitConditions.__init__

    def start(self: Any, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options, clock=lambda: float(next(ticks)))

    monkeypatch.setattr(exit_conditions.ExitConditions, "__init__", start)


def saved_in(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").glob("iter_*"))


def test_announcement(train: Any) -> None:
    """The start says when the run saves; both intervals act, given or by default."""
    lines = {
        "": "every 10 minutes and at the end; two are kept, each 43.25 KiB plus optimizer state\n",
        "--no-save-optim": "every 10 minutes and at the end; two are kept, each 43.25 KiB\n",
        "--keep-last 3": "saving    every 10 minutes and at the end\n",
        "--save-interval 2": "every 2 steps, every 10 minutes and at the end; those by steps and ",
        "--save-interval-mins 0": "saving    only at the end",
        "--save-interval 2 --save-interval-mins 0": "saving    every 2 steps and at the end",
    }
    for number, (flags, line) in enumerate(lines.items()):
        assert line in train(str(number), f"--train-iters 1 {flags}").err


@pytest.mark.usefixtures("slow_clock")
def test_the_newest_two_are_kept(train: Any, assert_same: Any, monkeypatch: Any) -> None:
    """It saves on the way, and keeps the last checkpoint and the one before."""
    saves: list[str] = []
    whole = train("whole", f"{FLAGS} --save-interval-mins 0")
    assert saved_in(whole.directory) == ["iter_0000009"]
    assert " saved " not in whole.err.split("iter_0000009")[0]
    part = train("part", f"{FLAGS} --lr-decay-iters 9")
    assert part.status == 0, part.err
    saves = [line for line in part.err.splitlines() if "saved " in line]
    assert 3 <= len(saves) <= 6, part.err
    assert saved_in(part.directory) == [line.rsplit("/", 1)[1] for line in saves[-2:]]
    assert part.curve() == whole.curve()
    assert_same(part.saved(), whole.saved())


@pytest.mark.usefixtures("slow_clock")
def test_resume_from_it(train: Any, assert_same: Any, monkeypatch: Any) -> None:
    """A run that died after two checkpoints by time, the newer damaged, is the unbroken run."""
    whole = train("whole", f"{FLAGS} --save-interval-mins 0")
    real = exit_conditions.ExitConditions.saved
    count = itertools.count(1)

    def die(self: Any) -> None:
        real(self)
        if next(count) == 2:
            raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(exit_conditions.ExitConditions, "saved", die)
        with pytest.raises(RuntimeError, match="killed"):
            train("part", FLAGS)
    directory = whole.directory.parent / "part"
    older, newer = saved_in(directory)
    (damaged,) = (directory / "checkpoints" / newer).glob("*.distcp")
    content = damaged.read_bytes()
    damaged.write_bytes(content[:99] + bytes([content[99] ^ 1]) + content[100:])
    part = train("part", f"{FLAGS} --load {directory}")
    assert part.status == 0, part.err
    assert f"of {directory}/checkpoints/{older}" in part.err
    assert part.curve() == whole.curve()
    assert_same(part.saved(), whole.saved())


@pytest.mark.usefixtures("slow_clock")
def test_what_the_user_asked_for_is_kept(train: Any) -> None:
    """Checkpoints of `--save-interval` stay; with `--keep-last` those by time count like others."""
    both = train("both", f"{FLAGS} --save-interval 4 --save-interval-mins 4")
    *wanted, before, last = saved_in(both.directory)
    assert {"iter_0000004", "iter_0000008"} <= {*wanted, before}
    assert len(wanted) <= 2, "the newest two, and those of `--save-interval`"
    assert last == "iter_0000009"
    last = train("last", f"{FLAGS} --save-interval-mins 4 --keep-last 3")
    assert len(saved_in(last.directory)) == 3


def test_all_ranks_save_at_the_same_step(start: Any, finish: Any) -> None:
    """With several processes, whose clocks differ, each save is of one step."""
    flags = "--train-iters 30 --micro-batch-size 2 --nproc-per-node 2 --save-interval-mins 0.0005"
    run = finish(start("run", flags), "run")
    assert run.status == 0, run.err
    assert run.err.count("saved ") > 1
    assert len(saved_in(run.directory)) == 2
    assert saved_in(run.directory)[1] == "iter_0000030"
