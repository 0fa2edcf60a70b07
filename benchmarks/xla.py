"""A training step on a PJRT device: lmcore beside the same model in plain torch_xla.

Both train the same shape on random token ids with AdamW and clipping at 1.0, each in its process,
and take turns, a few steps each, so that a change of the machine's speed falls on both.  In one
process each would find its memory given back to the system by the other one's turn, which costs a
step of several programs more than a step of one.  The steps before the first turn compile; what is
measured are steps that compile nothing, which is checked.

    PJRT_DEVICE=CPU python benchmarks/xla.py           # in the environment of `tox -e xla`

`plain` is a loop as torch_xla's documentation has it: forward, backward, clipping and AdamW of
torch, one `torch_xla.sync()` a step, and the loss read at its end.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from installed import check, parse
from subjects import Parts, lmcore_step
from train_step import Shape

SHAPES = {"small": Shape(4, 256, 8, 256, 8), "toy": Shape(2, 32, 2, 32, 1, vocab_size=512)}
_WARM_UP = 4
_STEPS = 3


def plain_step(shape: Shape) -> Callable[[], float]:
    """Return a step of torch and torch_xla alone on the same model, its batch made ahead."""
    parts = Parts(shape, compiled=False, threads=1, device="xla")
    import torch
    import torch_xla

    from lmcore.train.token_mean import mean_loss

    model = parts.state.model
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    batch, device = next(parts.batches()), parts.runtime.device.torch_device

    def take() -> float:
        optimizer.zero_grad()
        loss = mean_loss(model.loss, batch, model.family, device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        torch_xla.sync()
        return float(loss.item())

    return take


def contender(name: str, shape: Shape, pipe: Connection) -> None:
    """Take steps in turns: for each message, send the seconds of a step as the mean of some.

    The first answer follows the steps that compile; an answer of None means that a step of a turn
    has compiled a program.
    """
    make = {"lmcore": lambda: lmcore_step(shape, compiled=False, threads=1, device="xla")}
    step = make.get(name, lambda: plain_step(shape))()
    for _ in range(_WARM_UP):
        step()
    pipe.send(0.0)
    before = compiled()
    while pipe.recv():
        started = time.perf_counter()
        for _ in range(_STEPS):
            step()
        took = (time.perf_counter() - started) / _STEPS
        pipe.send(took if compiled() == before else None)


def compiled() -> int:
    """Return how many programs XLA has compiled in this process."""
    from torch_xla.debug import metrics

    return int((metrics.metric_data("CompileTime") or (0,))[0])


def main() -> None:
    """Measure both and print a line for each, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--turns", type=int, default=7)
    arguments = parse(parser, shape="toy", turns=1)
    check(arguments)
    if importlib.util.find_spec("torch_xla") is None:
        sys.exit("torch_xla is not installed here; `tox -e xla` has it")
    shape = SHAPES[arguments.shape]
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name in ("lmcore", "plain torch_xla"):
        pipes[name], other = spawn.Pipe()
        processes.append(spawn.Process(target=contender, args=(name, shape, other), daemon=True))
        processes[-1].start()
        other.close()
        pipes[name].recv()
    turns = [{name: turn(pipe) for name, pipe in pipes.items()} for _ in range(arguments.turns)]
    for name, pipe in pipes.items():
        pipe.send("")
        times = [turn[name] for turn in turns]
        print(f"{name:<16} {statistics.median(times) * 1e3:9.1f} ms a step, median of {len(turns)}")
    for process in processes:
        process.join()
    ratios = [turn["lmcore"] / turn["plain torch_xla"] for turn in turns]
    low, high = min(ratios), max(ratios)
    print(f"ratio            {statistics.median(ratios):9.3f}, from {low:.3f} to {high:.3f}")


def turn(pipe: Connection) -> float:
    """Return the seconds of a step in one turn of a contender."""
    pipe.send("turn")
    took = pipe.recv()
    if took is None:
        sys.exit("error: a measured step has compiled a program")
    return float(took)


if __name__ == "__main__":
    main()
