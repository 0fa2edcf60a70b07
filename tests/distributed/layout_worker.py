"""One rank of runs in several layouts: CASES (JSON: name -> flags), then where to write results.

Of each case: loss and gradient norm of every step, all gradients of the first, all weights after
the last, each local tensor with its place in the whole one.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmcore.config.load import load_config
from lmcore.config.plan import RunPlan
from lmcore.config.resolve import resolve
from lmcore.data.loader import BatchLoader
from lmcore.plugins import Selection, discover
from lmcore.plugins.selection import HANDED_DOWN
from lmcore.runtime.rank import rank_info
from lmcore.runtime.rendezvous import join_processes
from lmcore.runtime.runtime import Runtime, start_runtime
from lmcore.train.engine import open_engine
from lmcore.train.state import TrainState, seed_everything

VOCABULARY = 120
STEPS = 5
BASE = {
    "--num-layers": "4",
    "--hidden-size": "32",
    "--num-attention-heads": "4",
    "--seq-length": "16",
    "--precision": "fp32",
    "--make-vocab-size-divisible-by": "32",
    "--global-batch-size": "8",
    "--micro-batch-size": "2",
    "--train-iters": str(STEPS),
    "--lr": "1e-2",
    "--lr-decay-style": "constant",
    "--init-method-std": "0.2",
    "--adam-eps": "1e-3",  # Adam makes steps of gradients that are rounding errors
}
"""What a case does not say otherwise."""


class Samples:
    """Random tokens that every process draws alike."""

    def __init__(self, count: int, length: int) -> None:
        """Draw them."""
        self.tokens = np.random.default_rng(5).integers(0, VOCABULARY, (count, length + 1))

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.tokens)

    def __getitem__(self, i: int) -> Any:
        """Return tokens [S + 1]."""
        return self.tokens[i]


def plan_of(flags: str, world_size: int) -> RunPlan:
    """Return the plan of a case."""
    words = shlex.split(flags)
    rest = [word for name, value in BASE.items() if name not in words for word in (name, value)]
    loaded = load_config([*rest, *words])
    return resolve(loaded, world_size=world_size, vocab_size=VOCABULARY)


def pieces(state: TrainState, tensors: dict[str, torch.Tensor]) -> list[Any]:
    """Return (name, whole shape, offset, values) of every piece that this process has."""
    found = []
    for name, tensor in tensors.items():
        layout = state.parallel.layouts[name]
        for piece in layout.pieces:
            part = tensor
            for dim, (start, size) in enumerate(zip(piece.start, piece.size, strict=True)):
                part = part.narrow(dim, start, size)
            found.append((name, layout.shape, piece.offset, part.detach().clone()))
    return found


def run(plan: RunPlan, runtime: Runtime) -> dict[str, Any]:
    """Train and return what the tests compare."""
    seed_everything(plan.config.training.seed, runtime)
    with runtime.ops.bind_all(), open_engine(plan, runtime) as engine:
        state = engine.state
        engine.begin()
        state.model.train()
        samples = Samples(STEPS * plan.global_batch_size, plan.config.model.seq_length)
        results, gradients = [], []
        with BatchLoader(
            samples,
            micro_batch_size=plan.config.training.micro_batch_size,
            data_parallel_rank=state.parallel.mesh.data_rank,
            data_parallel_size=plan.layout.data,
        ) as batches:
            for number in range(STEPS):
                result = engine.step(state, batches)
                results.append((result.loss, result.grad_norm))
                if number == 0:
                    local = {
                        name: tensor.grad
                        for name, tensor in state.parallel.named_parameters()
                        if tensor.grad is not None
                    }
                    gradients = pieces(state, local)
        weights = pieces(state, dict(state.parallel.named_parameters()))
        count = sum(p.numel() for p in state.model.parameters())
        return {"steps": results, "grads": gradients, "weights": weights, "count": count}


def main(cases: dict[str, str], out: Path) -> None:
    """Run all cases in one set of processes."""
    place = rank_info(os.environ)
    plugins = discover()
    selection = Selection.from_json(os.environ[HANDED_DOWN])
    torch.set_num_threads(1)
    with join_processes(place, timeout=60.0) as rendezvous:
        first = plan_of(next(iter(cases.values())), place.world_size)
        with start_runtime(first.config, plugins, selection, place, rendezvous) as runtime:
            for name, flags in cases.items():
                found = run(plan_of(flags, place.world_size), runtime)
                torch.save(found, out / f"{name}.{place.rank}.pt")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
