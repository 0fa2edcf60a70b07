"""Each optimizer's step beside AdamW's, beside the library's own where there is one, and its state.

The parameters have the shapes of a GPT's; gradients are random.  The optimizers
take turns; a figure is the median over the turns.  Shampoo's roots and Sophia's second backward
are not in a step's time: the former is shown for itself.

    python benchmarks/optimizers.py
    python benchmarks/optimizers.py --hidden-size 768 --turns 20
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parent))
from installed import check, parse

if TYPE_CHECKING:
    from torch import nn

    from lmcore.optim.optimizer import Optimizer

_RATE = 1e-4


def parameters(hidden: int, layers: int, vocabulary: int) -> dict[str, nn.Parameter]:
    """Return parameters of a GPT's shapes, with gradients."""
    import torch
    from torch import nn

    shapes = {"token_embedding.weight": (vocabulary, hidden)}
    for layer in range(layers):
        shapes |= {
            f"blocks.{layer}.qkv.weight": (3 * hidden, hidden),
            f"blocks.{layer}.output.weight": (hidden, hidden),
            f"blocks.{layer}.up.weight": (4 * hidden, hidden),
            f"blocks.{layer}.down.weight": (hidden, 4 * hidden),
        }
    made = {name: nn.Parameter(torch.randn(shape) * 0.02) for name, shape in shapes.items()}
    for parameter in made.values():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    return made


def create(name: str, named: dict[str, nn.Parameter], *, shampoo_every: int) -> Optimizer:
    """Return an optimizer of ours on the CPU's kernel, with Shampoo's roots so rarely."""
    from lmcore.config.section.optimizer import OptimizerSection
    from lmcore.contract.op.records import load_target
    from lmcore.optim.create import create_optimizer
    from lmcore_cpu.kernels import KERNELS

    adamw = load_target(next(one.load for one in KERNELS if one.op == "adamw"))
    section = dataclasses.replace(
        OptimizerSection(), optimizer=name, shampoo_precondition_frequency=shampoo_every
    )
    return create_optimizer(section, named.items(), bind=lambda op: adamw)


def own(name: str, sizes: tuple[int, int, int]) -> tuple[Callable[[], None], float]:
    """Return a step of ours, and its bytes of state per parameter."""
    named = parameters(*sizes)
    optimizer = create(name, named, shampoo_every=10**9)
    optimizer.eval_mode()
    state = optimizer.state_tensors().values()
    count = sum(parameter.numel() for parameter in named.values())
    bytes_each = sum(one.numel() * one.element_size() for one in state) / count
    optimizer.train_mode()
    return lambda: optimizer.step(_RATE), bytes_each


@contextlib.contextmanager
def named_if_missing(name: str) -> Iterator[None]:
    """Say that an optimizer's library is not installed, if it is not."""
    try:
        yield
    except ImportError as missing:
        print(f"{name} (library): left out, {missing}", file=sys.stderr)


def library(name: str, sizes: tuple[int, int, int]) -> Callable[[], None] | None:
    """Return a step of torch's or another library's class; None: there is none, or not here.

    One that is not installed is named.
    """
    import torch

    weights = list(parameters(*sizes).values())
    made: Any = None
    around: Callable[[], Any] = contextlib.nullcontext
    if name == "adam":
        made = torch.optim.AdamW(weights, lr=_RATE, fused=True)
    elif name == "sgd":
        made = torch.optim.SGD(weights, lr=_RATE, momentum=0.9, weight_decay=0.01, foreach=True)
    elif name == "schedulefree":
        with named_if_missing(name):
            import schedulefree

            made = schedulefree.AdamWScheduleFree(weights, lr=_RATE, weight_decay=0.01)
            made.train()
    elif name == "adam8bit":
        with named_if_missing(name):
            from torchao.optim import AdamW8bit

            made = AdamW8bit(weights, lr=_RATE)
            around = lambda: torch.compiler.set_stance("force_eager")  # noqa: E731
    if made is None:
        return None

    def step() -> None:
        with around():
            made.step()

    return step


def roots(sizes: tuple[int, int, int]) -> float:
    """Return the seconds that Shampoo's roots add to a step without them."""
    optimizer = create("shampoo", parameters(*sizes), shampoo_every=2)
    times = []
    for _ in range(2):
        began = time.perf_counter()
        optimizer.step(_RATE)
        times.append(time.perf_counter() - began)
    return times[1] - times[0]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--turns", type=int, default=9)
    asked = parse(parser, hidden_size=32, num_layers=1, vocab_size=64, turns=1)
    check(asked)
    from lmcore.config.optimizers import OPTIMIZERS

    sizes = (asked.hidden_size, asked.num_layers, asked.vocab_size)
    steps: dict[str, Callable[[], None]] = {}
    states: dict[str, float] = {}
    for name in OPTIMIZERS:
        steps[name], states[name] = own(name, sizes)
        theirs = library(name, sizes)
        if theirs is not None:
            steps[f"{name} (library)"] = theirs
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(asked.turns + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if turn:
                times[name].append(time.perf_counter() - began)
    base = statistics.median(times["adam"])
    print(f"{'optimizer':<24} {'ms':>8} {'of adam':>8} {'bytes of state per parameter':>30}")
    for name, found in times.items():
        middle = statistics.median(found)
        state = f"{states[name]:.2f}" if name in states else ""
        print(f"{name:<24} {middle * 1e3:8.2f} {middle / base:8.2f} {state:>30}")
    print(f"shampoo's roots: {roots(sizes) / base:.0f} times a step of adam")


if __name__ == "__main__":
    main()
