"""`lmcore cpu-threads`: time of training's products by number of threads.

All numbers of threads take turns until the time is over, so that another busy process affects all
of them alike; the best time of each counts.  Loads torch only when it measures.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from lmcore.base.errors import counted
from lmcore.config.option import option
from lmcore.config.options.command_line import parse_section
from lmcore_cpu.host import cpu_count, cpu_name
from lmcore_cpu.settings import SPIN_COUNT

__all__ = ["Rate", "ThreadsSection", "candidates", "measure", "recommend", "run"]

_EPILOG = """\
A round is the products of one block of a GPT, forward and backward: its four projections, the
gradients of their inputs and of their weights.  Fewer threads are recommended if more gain less
than 3%.  Run nothing else meanwhile."""

_WORTH = 1.03
"""Least speed-up that justifies more threads: they take cores from other processes."""


@dataclass(frozen=True)
class ThreadsSection:
    """Measure training's products with each number of threads, and recommend one."""

    hidden_size: int = option(512, "Width of the model.", minimum=8, maximum=16384)
    rows: int = option(1024, "Tokens of a micro-batch.", minimum=1, maximum=65536)
    dtype: str = option("float32", "Type of the numbers.", choices=("float32", "bfloat16"))
    seconds: float = option(4.0, "Time for all measurements.", above=0, maximum=600)
    json: bool = option(False, "Print JSON.")


@dataclass(frozen=True)
class Rate:
    """Measurement with one number of threads.

    Attributes:
        num_threads: Value for `--num-threads`.
        gflops: Best rate of a round, in 10^9 floating-point operations a second.
        milliseconds: The time of that round.
        rounds: Number of measured rounds.
    """

    num_threads: int
    gflops: float
    milliseconds: float
    rounds: int


def run(argv: list[str]) -> int:
    """Run `lmcore cpu-threads` and return the exit status."""
    wanted = parse_section(ThreadsSection, argv, command="lmcore cpu-threads", epilog=_EPILOG)
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # as in a run; before torch is imported
    cores = cpu_count()
    block, flops = _block(wanted)
    rates = measure(block, flops, candidates(cores), seconds=wanted.seconds)
    best = recommend(rates)
    if wanted.json:
        found = {
            "cores": cores,
            "dtype": wanted.dtype,
            "hidden_size": wanted.hidden_size,
            "rows": wanted.rows,
            "rates": [asdict(rate) for rate in rates],
            "recommended": best,
        }
        text = json.dumps(found, indent=2)
    else:
        here = f"{counted(cores, 'core')} for this process"
        text = _table(rates, best, f"{cpu_name()}, {here}, {wanted.dtype}")
    sys.stdout.write(f"{text}\n")
    return 0


def candidates(cores: int) -> list[int]:
    """Return the numbers of threads to try: all up to 8, then ever sparser ones, and all cores."""
    numbers = set(range(1, min(cores, 8) + 1)) | {cores, cores // 2, 3 * cores // 4}
    power = 16
    while power < cores:
        numbers |= {power}
        power *= 2
    return sorted(number for number in numbers if number >= 1)


def measure(
    block: Callable[[], None], flops: float, numbers: Sequence[int], *, seconds: float
) -> list[Rate]:
    """Return the best rate of *block* with each number of threads.

    The process's own number of threads is restored.

    Args:
        block: Function to measure.
        flops: Its floating-point operations.
        numbers: Numbers of threads.
        seconds: Time for all of them; each is measured once at least, after one warm-up.
    """
    import torch

    before = torch.get_num_threads()
    times: dict[int, list[float]] = {number: [] for number in numbers}
    end = time.perf_counter() + seconds
    try:
        while True:
            for number, measured in times.items():
                torch.set_num_threads(number)
                block()  # the threads of another number are asleep, or not there yet
                start = time.perf_counter()
                block()
                measured.append(time.perf_counter() - start)
            if time.perf_counter() >= end:
                break
    finally:
        torch.set_num_threads(before)
    return [
        Rate(number, flops / min(measured) / 1e9, min(measured) * 1e3, len(measured))
        for number, measured in times.items()
    ]


def recommend(rates: Sequence[Rate]) -> int:
    """Return the smallest number of threads that is almost as fast as the fastest."""
    fastest = max(rate.gflops for rate in rates)
    return min(rate.num_threads for rate in rates if rate.gflops * _WORTH >= fastest)


def _block(wanted: ThreadsSection) -> tuple[Callable[[], None], float]:
    """Return a round of products and its floating-point operations; M rows, I inputs, O outputs."""
    import torch

    from lmcore_cpu.kernel.linear import linear

    dtype, width, rows = getattr(torch, wanted.dtype), wanted.hidden_size, wanted.rows
    shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    generator = torch.Generator().manual_seed(0)
    work = []
    for inputs, outputs in shapes:
        weight_OI = torch.randn(outputs, inputs, generator=generator).to(dtype)
        x_1MI = torch.randn(1, rows, inputs, generator=generator).to(dtype)
        grad_1MO = torch.randn(1, rows, outputs, generator=generator).to(dtype)
        work.append((x_1MI.requires_grad_(), weight_OI.requires_grad_(), grad_1MO))

    def block() -> None:
        for x_1MI, weight_OI, grad_1MO in work:
            out_1MO = linear(x_1MI, weight_OI, None)
            torch.autograd.grad(out_1MO, (x_1MI, weight_OI), grad_1MO)

    return block, 3 * sum(2.0 * rows * inputs * outputs for inputs, outputs in shapes)


def _table(rates: Sequence[Rate], best: int, title: str) -> str:
    lines = [title, "", "threads  GFLOP/s  ms a round  against one"]
    first = rates[0]
    for rate in rates:
        marker = "  <- recommended" if rate.num_threads == best else ""
        lines.append(
            f"{rate.num_threads:>7}  {rate.gflops:>7.1f}  {rate.milliseconds:>10.2f}  "
            f"{rate.gflops / first.gflops:>10.2f}x{marker}"
        )
    return "\n".join([*lines, "", f"recommended: --num-threads {best}"])
