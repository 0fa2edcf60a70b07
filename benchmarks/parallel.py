"""Several processes: `lmcore train`'s step beside a hand-written loop, layout by layout.

Both train the same model on the same kernels in the same processes, and take turns of a few steps,
so that a change of the machine's speed falls on both.  `hand_written.py` has the other loops.

    python benchmarks/parallel.py               # data parallel and ZeRO, 2 processes of 1 thread
    python benchmarks/parallel.py --overhead    # what the framework adds to a step, every layout
    python benchmarks/parallel.py --checks      # cost of replica checks and rank times
    python benchmarks/parallel.py --start       # a cold start with 2 processes beside 1

What the framework adds does not depend on the width of a model, and is too little to be seen beside
a wide one: `--overhead` measures it on a narrow model of as many layers as GPT-2 124M, one step of
each in turns, as processor time of the main thread, which other work on the machine hardly changes
and which leaves out waiting for the other process.

`--checks` measures the timer of the ranks in the same way, ten steps with it and ten without in
turns, as its exchange is every ten steps, and apart from that the timer's own calls, as the
difference is less than its noise on a busy machine; and a replica check, which comes once in 200
steps, on both models.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))
from installed import check, parse
from subjects import Parts
from train_step import SHAPES, Shape

if TYPE_CHECKING:
    from lmcore.train.step_record import StepRecord

Step = Callable[[], float]

LAYOUTS = {
    "ddp": [],
    "zero1": ["--zero-stage", "1"],
    "zero2": ["--zero-stage", "2"],
    "zero3": ["--zero-stage", "3"],
    "tp": ["--tensor-model-parallel-size", "2"],
    "tp+sp": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
    "pp": ["--pipeline-model-parallel-size", "2", "--global-batch-size", "2"],
    "cp": ["--context-parallel-size", "2"],
}
_SPEED = ["ddp", "zero1", "zero2", "zero3"]
_NARROW = Shape(12, 64, 2, 32, 1, vocab_size=256)
_WIDE = "124m"
_RESULT = "BENCHMARK_RESULT"


def framework(parts: Parts) -> Step:
    """Return a step as `lmcore train` takes it, metrics included."""
    from lmcore.config.section import TrainingSection
    from lmcore.train.exit_conditions import ExitConditions
    from lmcore.train.step import TrainStep
    from lmcore.train.step_queue import StepQueue

    batches = parts.batches()
    report = parts.report()
    exits = ExitConditions(TrainingSection()) if parts.runtime.processes else None
    queue = StepQueue(TrainStep(parts.state, parts.plan, parts.runtime), batches, exits)

    def take() -> float:
        queue.submit(parts.state.iteration + 1)
        (record,) = queue.completed(wait=True)
        report.step(record)
        return record.loss

    return take


def in_turns(
    steps: dict[str, Step], turns: int, per_turn: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return seconds a step of each contender, by turn."""
    for step in steps.values():
        for _ in range(3):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for _ in range(turns):
        for name in order:
            began = clock()
            for _ in range(per_turn):
                steps[name]()
            seconds[name].append((clock() - began) / per_turn)
        order.reverse()
    return seconds


def speed(parts: Parts, asked: argparse.Namespace) -> dict[str, float]:
    """Compare the loops on one layout; called in each process, as are the next functions."""
    from hand_written import by_hand

    steps = {"lmcore": framework(parts), "by hand": by_hand(parts)}
    found = in_turns(steps, asked.turns, asked.per_turn, time.perf_counter)
    pairs = zip(found["by hand"], found["lmcore"], strict=True)
    return {
        **{name: statistics.median(found[name]) for name in steps},
        "speed": statistics.median(hand / one for hand, one in pairs),
    }


def narrow(parts: Parts, asked: argparse.Namespace) -> dict[str, float]:
    """Measure what the framework adds to a step of a narrow model."""
    from hand_written import by_hand

    steps = {"lmcore": framework(parts), "by hand": by_hand(parts)}
    found = in_turns(steps, asked.turns if asked.toy else 30 * asked.turns, 1, time.thread_time)
    pairs = zip(found["lmcore"], found["by hand"], strict=True)
    return {
        "lmcore": statistics.median(found["lmcore"]),
        "added": statistics.median(one - hand for one, hand in pairs),
    }


def wide(parts: Parts, _asked: argparse.Namespace) -> dict[str, float]:
    """Measure a step of a model of the usual width."""
    found = in_turns({"lmcore": framework(parts)}, 3, 1, time.perf_counter)
    return {"lmcore": statistics.median(found["lmcore"])}


def checks(parts: Parts, asked: argparse.Namespace) -> dict[str, float]:
    """Measure what timing the ranks adds to a step, and how long a check of the replicas takes."""
    from lmcore.config.section import TrainingSection
    from lmcore.train.diagnose.replica_drift import ReplicaCheck
    from lmcore.train.exit_conditions import ExitConditions
    from lmcore.train.rank_times import RankTimer
    from lmcore.train.step import TrainStep
    from lmcore.train.step_queue import StepQueue

    batches, exits = parts.batches(), ExitConditions(TrainingSection())
    step = TrainStep(parts.state, parts.plan, parts.runtime)

    def taking(timer: RankTimer | None) -> Step:
        queue = StepQueue(step, batches, exits, timer)

        def take() -> float:
            queue.submit(parts.state.iteration + 1)
            (record,) = queue.completed(wait=True)
            return record.loss

        return take

    class CountedTimer(RankTimer):
        """A timer that counts the processor time of its calls."""

        seconds, steps = 0.0, 0

        def start(self) -> None:
            began = time.thread_time()
            super().start()
            self.seconds += time.thread_time() - began

        def stop(self) -> None:
            began = time.thread_time()
            super().stop()
            self.seconds += time.thread_time() - began

        def complete(self, record: StepRecord) -> None:
            began = time.thread_time()
            super().complete(record)
            self.seconds, self.steps = self.seconds + time.thread_time() - began, self.steps + 1

    timer = CountedTimer(parts.state.parallel.mesh, parts.runtime, interval=10)
    steps = {"timed": taking(timer), "plain": taking(None)}
    found: dict[str, list[float]] = {"timed": [0.0], "plain": [0.0]}
    if asked.work == "checks-narrow":
        turns, per_turn = (1, 1) if asked.toy else (6 * asked.turns, 10)
        found = in_turns(steps, turns, per_turn, time.thread_time)
    replicas = ReplicaCheck(parts.state, parts.runtime, interval=1)
    taken: dict[str, list[float]] = {"step": [], "check": []}
    for _ in range(1 if asked.toy else 3):
        for name, work in (("step", steps["plain"]), ("check", replicas.check)):
            began = time.thread_time()
            work()
            taken[name].append(time.thread_time() - began)
    pairs = zip(found["timed"], found["plain"], strict=True)
    return {
        "calls": timer.seconds / max(timer.steps, 1),
        "added": statistics.median(timed - plain for timed, plain in pairs),
        **{name: statistics.median(seconds) for name, seconds in taken.items()},
    }


WORK = {
    "speed": speed,
    "narrow": narrow,
    "wide": wide,
    "checks-narrow": checks,
    "checks-wide": checks,
}


def measured(work: str, layout: str, asked: argparse.Namespace) -> dict[str, float]:
    """Start the processes of a measurement and return what the first one found."""
    from lmcore.runtime.launch.launcher import launch

    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        env = {**os.environ, "OMP_NUM_THREADS": str(asked.threads), _RESULT: str(result)}
        own = ["--work", work, "--layouts", layout]
        status = launch([sys.executable, "-W", "ignore", *sys.argv, *own], asked.processes, env)
        if status:
            raise SystemExit(status)
        found: dict[str, float] = json.loads(result.read_text())
        return found


def work_of_process(asked: argparse.Namespace) -> None:
    """Do the work of one of several processes."""
    wide = "toy" if asked.toy else _WIDE
    shapes = {"narrow": _NARROW, "wide": SHAPES[wide], "speed": SHAPES[asked.shape]}
    shape = shapes[asked.work.removeprefix("checks-")]
    flags = LAYOUTS[asked.layouts[0]]
    with Parts(shape, compiled=False, threads=asked.threads, flags=flags) as parts:
        found = WORK[asked.work](parts, asked)
        if not parts.runtime.rank.rank:
            Path(os.environ[_RESULT]).write_text(json.dumps(found))


def speeds(asked: argparse.Namespace) -> None:
    """Print the speed of both loops, by layout."""
    print(f"{'':<8}{'lmcore ms':>12}{'by hand ms':>12}{'speed':>10}")
    for layout in asked.layouts or _SPEED:
        one = measured("speed", layout, asked)
        times = f"{one['lmcore'] * 1e3:>12.0f}{one['by hand'] * 1e3:>12.0f}"
        print(f"{layout:<8}{times}{one['speed']:>10.3f}", flush=True)


def overheads(asked: argparse.Namespace) -> None:
    """Print what the framework adds to a step, by layout, and its share of a usual step."""
    wide = "toy" if asked.toy else _WIDE
    print(f"{'':<8}{'narrow ms':>12}{'added ms':>12}{wide + ' ms':>12}{'share':>10}")
    for layout in asked.layouts or LAYOUTS:
        one = measured("narrow", layout, asked)
        usual = measured("wide", layout, asked)["lmcore"]
        times = f"{one['lmcore'] * 1e3:>12.2f}{one['added'] * 1e3:>12.2f}{usual * 1e3:>12.0f}"
        print(f"{layout:<8}{times}{one['added'] / usual:>10.2%}", flush=True)


def costs(asked: argparse.Namespace) -> None:
    """Print the cost of replica checks and rank times by layout, and its share of a step."""
    every = 200
    heads = ("timer ms", "paired ms", "check ms", "step ms", "share")
    print(f"{'':<8}{'model':>8}" + "".join(f"{head:>11}" for head in heads))
    for layout in asked.layouts or LAYOUTS:
        timer = paired = 0.0
        for size in ("narrow", "wide"):
            one = measured(f"checks-{size}", layout, asked)
            timer, paired = timer or one["calls"], paired or one["added"]  # of the narrow model
            share = (timer + one["check"] / every) / one["step"]
            times = f"{timer * 1e3:>11.3f}{paired * 1e3:>11.3f}{one['check'] * 1e3:>11.2f}"
            print(
                f"{layout:<8}{size:>8}{times}{one['step'] * 1e3:>11.1f}{share:>11.3%}", flush=True
            )


def starts(turns: int, threads: int) -> None:
    """Compare cold starts of `lmcore train` up to the end of its first step."""
    flags = [
        *("--train-iters", "1", "--eval-iters", "0", "--sample-tokens", "0"),
        *("--progress", "none", "--device", "cpu", "--num-threads", str(threads)),
    ]
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(turns):
        for size, found in seconds.items():
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-m", "lmcore.cli.main", "train", *flags]
                more = ["--nproc-per-node", str(size), "--save", f"{folder}/run"]
                process = subprocess.Popen([*command, *more], stdout=subprocess.DEVNULL)
                began = time.perf_counter()
                metrics = Path(folder) / "run/metrics.jsonl"
                while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
                    time.sleep(0.002)
                found.append(time.perf_counter() - began)
                process.wait()
    for size, found in seconds.items():
        print(f"{size} processes: {statistics.median(found):.2f} s to the end of the first step")
    pairs = zip(seconds[2], seconds[1], strict=True)
    print(f"ratio: {statistics.median(two / one for two, one in pairs):.2f}")


def main() -> int:
    """Measure, or be one of the processes of a measurement."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--per-turn", type=int, default=3)
    parser.add_argument("--overhead", action="store_true", help="what the framework adds instead")
    parser.add_argument("--checks", action="store_true", help="cost of checks and rank times")
    parser.add_argument("--start", action="store_true", help="compare cold starts instead")
    parser.add_argument("--work", choices=WORK, help=argparse.SUPPRESS)
    asked = parse(parser, shape="toy", turns=1, per_turn=1)
    if asked.work:
        work_of_process(asked)
        return 0
    check(asked)
    if asked.start:
        starts(asked.turns, asked.threads)
        return 0
    print(f"{asked.processes} processes of {asked.threads} threads")
    (costs if asked.checks else overheads if asked.overhead else speeds)(asked)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
