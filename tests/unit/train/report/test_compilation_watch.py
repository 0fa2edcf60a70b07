"""Notices of compilations, and the steps that they mark."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmcore.contract import Compilations
from lmcore.train.report import compilation_watch
from lmcore.train.report.compilation_watch import CompilationWatch
from lmcore.train.step_record import StepRecord


class Chip:
    """A device that compiles on demand."""

    def __init__(self) -> None:
        self.compiled: Compilations | None = Compilations(7, 3.0)
        self.facts: dict[str, Any] = {}

    def compile(self, count: int, seconds: float) -> None:
        """Compile so many programs in so many seconds."""
        assert self.compiled is not None
        self.compiled = Compilations(self.compiled.count + count, self.compiled.seconds + seconds)

    def compiled_so_far(self) -> Compilations | None:
        """Return them."""
        return self.compiled


@pytest.fixture
def chip() -> Chip:
    """A device that compiles."""
    return Chip()


@pytest.fixture
def lines() -> list[str]:
    """Lines that are shown."""
    return []


def watch_of(chip: Any, lines: list[str], *, compiled_blocks: bool = False) -> CompilationWatch:
    training = SimpleNamespace(compile=compiled_blocks)
    plan: Any = SimpleNamespace(config=SimpleNamespace(training=training))
    return CompilationWatch(plan, chip, lines.append)


def row(step: int, milliseconds: float = 100.0) -> StepRecord:
    return StepRecord(
        step=step,
        consumed_samples=step,
        consumed_tokens=16 * step,
        global_batch_size=1,
        learning_rate=1e-3,
        step_time_ms=milliseconds,
    )


def test_a_step_that_compiles(chip: Chip, lines: list[str]) -> None:
    """Its record and a line have number and time; the programs of the start are in neither."""
    watch = watch_of(chip, lines)
    for step, count, seconds in ((1, 12, 44.3), (2, 0, 0.0), (3, 1, 0.25)):
        watch.begin_step(step)
        if count:
            chip.compile(count, seconds)
        record = row(step)
        watch.complete(record, watch.take(), watch.take())
        watch.show(record, with_line=False)
        assert record.compiles is (True if count else None)
        assert record.compilations == (count or None)
    assert lines == [
        "compile   step 1: the device compiled 12 programs in 44 s",
        "compile   step 3: the device compiled 1 program in 0.2 s",
    ]
    assert watch.total == Compilations(13, pytest.approx(44.55))


def test_compiling_between_steps(chip: Chip, lines: list[str]) -> None:
    """Programs of a validation belong to no step."""
    watch = watch_of(chip, lines)
    chip.compile(2, 1.0)
    watch.begin_step(1)
    record = row(1)
    watch.complete(record, watch.take())
    assert record.compiles is None
    assert lines == ["compile   before step 1: the device compiled 2 programs in 1.0 s"]


def test_steps_that_compile_again_and_again(chip: Chip, lines: list[str]) -> None:
    """Five lines come at once, and further ones with the training lines."""
    watch = watch_of(chip, lines)
    for step in range(1, 23):
        watch.begin_step(step)
        chip.compile(2, 10.0)
        record = row(step)
        watch.complete(record, watch.take())
        watch.show(record, with_line=step % 10 == 0)
    watch.show_pending()
    assert [line.split(": ")[0] for line in lines] == [
        *(f"compile   step {step}" for step in range(1, 6)),
        "compile   steps 6 to 10",
        "compile   steps 11 to 20",
        "compile   steps 21 to 22",
    ]
    assert lines[6].endswith("the device compiled 20 programs in 100 s")


def test_compiled_blocks(chip: Chip, lines: list[str]) -> None:
    """Without a count of the device, the first step of a session compiles, and no other."""
    chip.compiled = None
    watch = watch_of(chip, lines, compiled_blocks=True)
    found = []
    for step in (41, 42):
        watch.begin_step(step)
        found.append(row(step))
        watch.complete(found[-1], watch.take())
        watch.show(found[-1], with_line=True)
    assert [record.compiles for record in found] == [True, None]
    assert (found[0].compilations, watch.total, lines) == (None, None, [])


def test_without_compilation(chip: Chip, lines: list[str]) -> None:
    """On any other device there is neither a thread nor a mark."""
    chip.compiled = None
    watch = watch_of(chip, lines)
    assert not watch.active
    watch.begin_step(1)
    record = row(1, 60e3)
    watch.complete(record, watch.take())
    assert record.compiles is None
    with watch.announcing():
        import threading

        assert not [one for one in threading.enumerate() if one.name == "lmcore-compiling"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds."""
    now = [1000.0]
    monkeypatch.setattr(compilation_watch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_step_that_takes_long(chip: Chip, lines: list[str], clock: list[float]) -> None:
    """It is announced after 10 s, 20 s, 40 s and so on; a later one by the steps before it."""
    watch = watch_of(chip, lines)
    watch.begin_step(1)
    for _ in range(50):
        watch._look()
        clock[0] += 1.0
    chip.compile(1, 50.0)
    record = row(1, 50e3)
    watch.complete(record, watch.take())
    watch.end_step()
    watch._look()
    assert lines == [
        f"compile   step 1 has been running for {seconds} s: the device is probably compiling"
        for seconds in (10, 20, 40)
    ]
    lines.clear()
    for step, seconds in ((2, 9), (3, 25), (4, 28)):
        watch.begin_step(step)
        for _ in range(seconds):
            clock[0] += 1.0
            watch._look()
        watch.complete(row(step, seconds * 1e3), watch.take())
        watch.end_step()
    assert lines == []
    watch.begin_step(5)
    clock[0] += 84.0
    watch._look()
    assert lines == ["compile   step 5 has been running for 84 s: the device is possibly compiling"]


def test_later_steps_of_compiled_blocks(chip: Chip, lines: list[str], clock: list[float]) -> None:
    """Only the first step compiles the blocks: a later one that hangs does not compile."""
    chip.compiled = None
    watch = watch_of(chip, lines, compiled_blocks=True)
    for step in (1, 2):
        watch.begin_step(step)
        clock[0] += 15.0
        watch._look()
        watch.complete(row(step, 100.0), watch.take())
    assert lines == ["compile   step 1 has been running for 15 s: the device is probably compiling"]
