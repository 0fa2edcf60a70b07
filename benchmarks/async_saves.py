"""Cost of saves for the steps of `lmcore train`, with and without `--async-save`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["report_saves"]

AFTER = 20
"""Number of steps after a save that are looked at one by one."""
BEFORE = 10
"""Number of steps before a save whose median is a step without a save."""
INTERVAL = 53
"""Steps between saves: a background save beside steps of two processors takes about 20 of them.
Not 50, since the garbage is collected every 100 steps."""

PROGRAM = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from async_saves import train
print(json.dumps(train(sys.argv[1:])))
"""


class Save(NamedTuple):
    """A save; times in seconds of the same clock as the ends of steps.

    Attributes:
        begin: Time of the call.
        call: Seconds of the call.
        complete: Time when the checkpoint was complete.
    """

    begin: float
    call: float
    complete: float


def report_saves(folder: Path, megabytes: int, repeats: int, num_threads: int) -> None:
    """Print what a save costs the steps of a run, with and without `--async-save`.

    What a step loses is the time from the end of the update before the save to the end of the next
    one, less a step without a save: the median of the steps before it.  A machine is disturbed by
    others, too, so the longest step is looked for among the medians, over the saves, of the steps
    at the same place after a save.

    Args:
        folder: Folder for the run, created and removed.
        megabytes: Size of weights and moments together, in 10^6 bytes.
        repeats: Number of saves of each kind; one more comes first.
        num_threads: Threads of a step; with fewer than the processors the writer has one.
    """
    flags = [*model_flags(megabytes), "--num-threads", str(num_threads), "--save", str(folder)]
    found: dict[str, list[Observed]] = {}
    for name in ("synchronous", "asynchronous"):
        more = ["--async-save"] if name == "asynchronous" else []
        steps = INTERVAL * (repeats + 1) + AFTER + 5
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *flags, *more, "--train-iters", str(steps)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        shutil.rmtree(folder)
        times = json.loads(done.stdout.splitlines()[-1])
        saves = [Save(*one) for one in times["saves"]]
        found[name] = [observed(times["ends"], save) for save in saves[: repeats + 1]]
    usual = statistics.median(one.usual for one in found["asynchronous"])
    print(
        f"{megabytes} MB of weights and moments; a step of {num_threads} threads on "
        f"{os.cpu_count()} processors takes {usual:.3f} s; the longest of {BEFORE} steps without a "
        f"save takes {statistics.median(one.longest_before for one in found['asynchronous']):.2f}x"
    )
    base = statistics.median(one.loss for one in found["synchronous"][1:])
    for name, (first, *others) in found.items():
        cost = functools.partial(middle, others)
        places = zip(*(one.later for one in others), strict=True)
        print(
            f"{name} save: the step loses {cost('loss'):.3f} s, {cost('loss') / base:.1%} of a "
            f"synchronous save ({', '.join(f'{one.loss / base:.1%}' for one in others)}; the first "
            f"save of the run {first.loss / base:.1%}), of that the call {cost('call'):.3f} s; of "
            f"the {AFTER} steps after it the median takes "
            f"{statistics.median(ratio for one in others for ratio in one.later):.2f}x, the "
            f"longest {max(map(statistics.median, places)):.2f}x at its place and "
            f"{statistics.median(max(one.later) for one in others):.2f}x after a single save; all "
            f"together lose {cost('total'):.3f} s; it is complete after {cost('complete'):.1f} s"
        )


class Observed(NamedTuple):
    """Steps around a save.

    Attributes:
        usual: Seconds of a step without a save.
        longest_before: The longest of the steps before, in steps without a save.
        call: Seconds of the call.
        loss: Seconds that the step with the save takes longer.
        later: Steps after it, in steps without a save.
        total: Seconds that all steps lose until the save is complete.
        complete: Seconds from the call until then.
    """

    usual: float
    longest_before: float
    call: float
    loss: float
    later: list[float]
    total: float
    complete: float


def observed(ends: Sequence[float], save: Save) -> Observed:
    """Return the steps around a save, by the ends of all steps."""
    first = next(number for number, end in enumerate(ends) if end > save.begin)
    steps = [end - begin for begin, end in itertools.pairwise(ends)]
    before = steps[max(0, first - 1 - BEFORE) : first - 1]
    usual = statistics.median(before)
    last = next((number for number, end in enumerate(ends) if end > save.complete), len(ends) - 1)
    meanwhile = steps[first - 1 : max(first, last)]
    return Observed(
        usual,
        max(before) / usual,
        save.call,
        steps[first - 1] - usual,
        [step / usual for step in steps[first : first + AFTER]],
        sum(meanwhile) - len(meanwhile) * usual,
        save.complete - save.begin,
    )


def middle(seen: Sequence[Observed], name: str) -> float:
    """Return the median of one of the numbers."""
    return statistics.median(getattr(one, name) for one in seen)


def model_flags(megabytes: int) -> list[str]:
    """Return the flags of a GPT with as many bytes of weights and moments, one sample a step."""
    hidden, rows = (768, 32_000) if megabytes >= 500 else (64, 320)
    layers = max(1, round((megabytes * 1e6 / 12 - rows * hidden) / (12 * hidden * hidden)))
    shape = {
        "num-layers": layers,
        "hidden-size": hidden,
        "num-attention-heads": hidden // 64,
        "seq-length": 128,
        "max-position-embeddings": 128,
        "micro-batch-size": 1,
        "global-batch-size": 1,
        "make-vocab-size-divisible-by": rows,
        "save-interval": INTERVAL,
        "keep-last": 1,
        "eval-iters": 0,
        "log-interval": 10,
    }
    return [word for name, value in shape.items() for word in (f"--{name}", str(value))]


def train(flags: Sequence[str]) -> dict[str, Any]:
    """Train with *flags*; return the ends of steps, and the saves."""
    from lmcore.cli.main import main
    from lmcore.optim.optimizer import Optimizer
    from lmcore.train.resume.save import Saver, Snapshot

    ends: list[float] = []
    begins: list[float] = []
    calls: list[float] = []
    completes: list[float] = []

    def noted(function: Callable[..., Any], *, before: Any = (), after: Any) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            for times in before:
                times.append(begin)
            result = function(*arguments, **options)
            after(begin)
            return result

        return call

    clock = time.perf_counter
    Optimizer.step = noted(Optimizer.step, after=lambda _: ends.append(clock()))  # type: ignore[method-assign]
    Snapshot.write = noted(Snapshot.write, after=lambda _: completes.append(clock()))  # type: ignore[method-assign]
    Saver.save = noted(  # type: ignore[method-assign]
        Saver.save, before=[begins], after=lambda begin: calls.append(clock() - begin)
    )
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        status = main(["train", *flags])
    if status:
        raise SystemExit(status)
    return {"ends": ends, "saves": list(zip(begins, calls, completes, strict=True))}
