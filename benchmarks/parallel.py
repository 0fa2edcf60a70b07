"""Several processes: `lmcore train`'s step beside a hand-written loop of torch's own engine.

Both train the same model on the same kernels in the same processes, and take turns of a few steps,
so that a change of the machine's speed falls on both.  The hand-written one is what torch's
documentation shows: `DistributedDataParallel`, clipping, the optimizer's step, nothing else.

    python benchmarks/parallel.py                # 2 processes of 1 thread, small model
    python benchmarks/parallel.py --start        # a cold start with 2 processes beside 1
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from subjects import Parts
from train_step import SHAPES, Shape


def framework(parts: Parts) -> Callable[[], float]:
    """Return a step as `lmcore train` takes it, metrics included."""
    from lmcore.config.section import TrainingSection
    from lmcore.train.display import open_display
    from lmcore.train.exits import ExitConditions
    from lmcore.train.loop import Reporter, timed_step
    from lmcore.train.metrics import MetricsFile
    from lmcore.train.step import TrainStep

    batches = parts.batches()
    step = TrainStep(parts.plan, parts.runtime)
    metrics = parts.stack.enter_context(MetricsFile(parts.directory / "metrics.jsonl"))
    reporter = Reporter(parts.plan, parts.runtime, open_display("none"), metrics, None)
    exits = ExitConditions(TrainingSection())

    def take() -> float:
        row = timed_step(parts.state, step, batches, parts.runtime, reporter, exits)
        reporter.report(row, None)
        return row.loss

    return take


def by_hand(parts: Parts) -> Callable[[], float]:
    """Return a step of a loop as one writes it, on a model of its own."""
    import torch
    from torch import distributed, nn
    from torch.nn.parallel import DistributedDataParallel

    from lmcore.config.layout import ParallelLayout
    from lmcore.model.build import build_model
    from lmcore.model.shape import ModelShape
    from lmcore.parallel.mesh import ParallelMesh
    from lmcore.parallel.parallel_model import ParallelModel
    from lmcore.parallel.tensor_parallel import tensor_layouts
    from lmcore.train.state import TrainState
    from lmcore.train.step import mean_loss

    class Loss(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, *arguments: object) -> torch.Tensor:
            loss: torch.Tensor = self.model.loss(*arguments)
            return loss

    model = build_model(ModelShape.from_plan(parts.plan), parts.runtime, seed=1)
    alone = ParallelMesh(ParallelLayout(), 0)
    layouts = tensor_layouts(model, alone.tensor)
    where = parts.runtime.device.torch_device
    placed = ParallelModel(model, alone, model.shape, layouts, where)
    optimizer = TrainState.create(placed, parts.plan, parts.runtime).optimizer
    parameters = list(model.parameters())
    replicas = DistributedDataParallel(Loss(model))
    batches = parts.batches()
    device = parts.runtime.device.torch_device

    def take() -> float:
        optimizer.zero_grad()
        loss = mean_loss(replicas, next(batches), device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step(1e-4)
        shown = loss.detach().clone()
        distributed.all_reduce(shown)
        return shown.item() / distributed.get_world_size()

    return take


def work(shape: Shape, *, turns: int, per_turn: int, threads: int) -> None:
    """Measure both; the body of one process of several."""
    import torch

    parts = Parts(shape, compiled=False, threads=threads)
    steps = {"lmcore": framework(parts), "by hand": by_hand(parts)}
    for step in steps.values():
        step()
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for _ in range(turns):
        for name in order:
            began = time.perf_counter()
            for _ in range(per_turn):
                steps[name]()
            seconds[name].append((time.perf_counter() - began) / per_turn)
        order.reverse()
    if parts.runtime.rank.rank:
        return
    size = parts.runtime.rank.world_size
    print(f"{size} processes of {threads} threads, torch {torch.__version__}")
    print(f"{'':<12}{'ms a step':>10}{'tokens/s':>10}")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:<12}{median * 1e3:>10.0f}{size * shape.tokens / median:>10.0f}")
    pairs = zip(seconds["by hand"], seconds["lmcore"], strict=True)
    print(f"speed of lmcore / by hand: {statistics.median(a / b for a, b in pairs):.3f}")


def starts(turns: int) -> None:
    """Compare cold starts of `lmcore train` up to the end of its first step."""
    flags = [
        "--train-iters",
        "1",
        "--eval-iters",
        "0",
        "--sample-tokens",
        "0",
        "--progress",
        "none",
        "--device",
        "cpu",
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
    """Start the processes, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--per-turn", type=int, default=3)
    parser.add_argument("--start", action="store_true", help="compare cold starts instead")
    asked = parser.parse_args()
    if asked.start:
        starts(asked.turns)
        return 0
    if os.environ.get("WORLD_SIZE"):
        shape = SHAPES[asked.shape]
        work(shape, turns=asked.turns, per_turn=asked.per_turn, threads=asked.threads)
        return 0
    from lmcore.runtime.launch import launch

    env = {**os.environ, "OMP_NUM_THREADS": str(asked.threads)}
    return launch([sys.executable, "-W", "ignore", *sys.argv], asked.processes, env)


if __name__ == "__main__":
    raise SystemExit(main())
