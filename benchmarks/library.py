"""lmcore in a loop of the user's own: its cost beside the bare loop, Fabric and Accelerate.

The same model, data, clipping and optimizer in each loop: plain torch, `lmcore.start`, Lightning
Fabric and Hugging Face Accelerate, in one process on the CPU in float32.  Blocks of steps are taken
in turns, and the cost is the median of the differences to the bare loop's block beside it: of a
small model, whose step takes a fraction of a millisecond, in microseconds, and of one with a step
of about 20 ms in percent.  Losses are compared bit for bit.

Starts are whole processes that import everything, take one step and end, in turns, all with cached
bytecode; wall time and processor time.  A peer that is not installed is left out and named.  The
last part measures the device's kernels in models of `transformers` (`model_kernels.py`).

    pip install -c constraints.txt lightning-fabric accelerate transformers
    python benchmarks/library.py
    python benchmarks/library.py --parts kernels
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from installed import check, parse, shared_flags
from model_kernels import CASES, VARIANTS, compare, take_steps

PEERS = {"fabric": "lightning_fabric", "accelerate": "accelerate"}
NAMES = ("bare", "lmcore", *PEERS)
SIZES = {"small": (16, 32, 1), "20 ms": (64, 1024, 4)}
"""Batch size, width and number of hidden layers of each model."""
BATCHES = 8
PARTS = ("starts", "cost", "kernels")


def make(size: str) -> tuple[Any, Any, Any]:
    """Return model, optimizer and DataLoader, equal for all loops."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    batch, width, layers = SIZES[size]
    torch.manual_seed(1)
    hidden = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())]
    model = nn.Sequential(nn.Linear(width, width), *hidden, nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(batch * BATCHES, width)
    return model, optimizer, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch)


def bare(size: str) -> Iterator[Any]:
    """Yield the loss of each step of the loop in plain torch."""
    import torch

    model, optimizer, data = make(size)
    while True:
        for x, y in data:
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield loss


def lmcore(size: str) -> Iterator[Any]:
    """Yield the loss of each step of the loop with lmcore."""
    import torch

    from lmcore import Session, start

    rt = Session.current() or start(device="cpu", precision="fp32")
    model, optimizer, data = make(size)
    model, optimizer = rt.prepare(model, optimizer)
    loader = rt.loader(data)
    while True:
        for x, y in loader:
            with rt.autocast():
                loss = torch.nn.functional.mse_loss(model(x), y)
            rt.backward(loss)
            rt.step(optimizer, clip=1.0)
            yield loss


def fabric(size: str) -> Iterator[Any]:
    """Yield the loss of each step of the loop with Fabric."""
    import torch
    from lightning_fabric import Fabric

    runner = Fabric(accelerator="cpu", devices=1, precision="32-true")
    runner.launch()
    model, optimizer, data = make(size)
    model, optimizer = runner.setup(model, optimizer)
    loader = runner.setup_dataloaders(data)
    while True:
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y)
            runner.backward(loss)
            runner.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            yield loss


def accelerate(size: str) -> Iterator[Any]:
    """Yield the loss of each step of the loop with Accelerate."""
    import torch
    from accelerate import Accelerator

    runner = Accelerator(cpu=True, mixed_precision="no")
    model, optimizer, data = make(size)
    model, optimizer, data = runner.prepare(model, optimizer, data)
    while True:
        for x, y in data:
            with runner.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x), y)
                runner.backward(loss)
                runner.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            yield loss


LOOPS: dict[str, Callable[[str], Iterator[Any]]] = {
    "bare": bare,
    "lmcore": lmcore,
    "fabric": fabric,
    "accelerate": accelerate,
}


def installed() -> list[str]:
    """Return the names of the loops; peers that are missing are printed."""
    missing = [name for name, package in PEERS.items() if not importlib.util.find_spec(package)]
    for name in missing:
        print(f"{name}: left out, not installed")
    return [name for name in NAMES if name not in missing]


def cost(size: str, names: list[str], turns: int, steps: int) -> None:
    """Print the cost of a step of each loop beside the bare one's."""
    import torch

    loops = {name: LOOPS[name](size) for name in names}
    losses = {name: [float(next(loop)) for _ in range(BATCHES)] for name, loop in loops.items()}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns):
        for name in names if turn % 2 else names[::-1]:
            loop = loops[name]
            begin = time.perf_counter()
            for _ in range(steps):
                next(loop)
            seconds[name].append((time.perf_counter() - begin) / steps)
    base = seconds["bare"]
    print(f"\n{size} model, {torch.get_num_threads()} threads: microseconds a step")
    for name in names:
        over = statistics.median(b - a for a, b in zip(base, seconds[name], strict=True))
        share = over / statistics.median(base)
        equal = "equal losses" if losses[name] == losses["bare"] else "OTHER losses"
        step = statistics.median(seconds[name]) * 1e6
        print(f"{name:<12}{step:>10.1f}{over * 1e6:>+9.1f} {share:>+8.2%}  {equal}")


def starts(names: list[str], turns: int, flags: tuple[str, ...]) -> None:
    """Print the wall time and the processor time of whole processes that take one step."""
    script = str(Path(__file__).resolve())
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(turns + 1):
        for name in names if turn % 2 else names[::-1]:
            command = [sys.executable, script, "--one-step", name, *flags]
            begin, used = time.perf_counter(), _processor_seconds()
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
            if done.returncode:
                raise SystemExit(f"{name} failed:\n{done.stderr}")
            if turn:  # the first one warms the page cache, and writes bytecode
                wall = time.perf_counter() - begin
                seconds[name].append((wall, _processor_seconds() - used))
    print("\nstart: seconds of a process that takes one step")
    for column, kind in enumerate(("wall", "processor")):
        base = [each[column] for each in seconds["bare"]]
        for name in names:
            own = [each[column] for each in seconds[name]]
            over = statistics.median(b - a for a, b in zip(base, own, strict=True))
            print(f"{name:<12}{kind:<10}{statistics.median(own):>8.3f}{over:>+9.3f}")


def _processor_seconds() -> float:
    """Return the processor time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=41, help="blocks of steps of each loop")
    parser.add_argument("--starts", type=int, default=7, help="processes of each loop")
    parser.add_argument("--one-step", choices=NAMES, help="take one step in this loop, and end")
    parser.add_argument("--model-turns", type=int, default=7, help="steps of each large model")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--model-steps", choices=VARIANTS, help="take steps of a large model")
    parser.add_argument("--case", type=int, choices=range(len(CASES)), default=0, help="the model")
    parser.add_argument("--threads", type=int, default=1, help="threads of its process")
    asked = parse(parser, turns=3, starts=1, model_turns=2)
    if asked.one_step:
        next(LOOPS[asked.one_step]("small"))
        return
    if asked.model_steps:
        take_steps(asked.model_steps, asked.case, threads=asked.threads, toy=asked.toy)
        return
    check(asked)
    names = installed() if {"starts", "cost"} & set(asked.parts) else []
    if "starts" in asked.parts:
        starts(names, asked.starts, shared_flags(asked))
    if "cost" in asked.parts:
        cost("small", names, asked.turns, steps=100)
        cost("20 ms", names, max(3, asked.turns // 2), steps=5)
    if "kernels" in asked.parts:
        compare(Path(__file__).resolve(), asked.model_turns, shared_flags(asked))


if __name__ == "__main__":
    main()
