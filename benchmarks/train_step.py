"""A training step on the CPU: lmcore beside the peers that install from the package registry.

Every contender trains the same shape on the same token ids with AdamW and clipping at 1.0.  They
take turns, a few steps each, so that a change of the machine's speed falls on all of them; the
figures are medians over the turns and their ratios.  A peer that is not installed is left out
and named.

    python benchmarks/train_step.py                     # small model, eager
    python benchmarks/train_step.py --shape 124m --compile

Contenders: `lmcore` is what `lmcore train` runs (loader, metrics and all); `lmcore-bare` is the
same model and kernels in a hand-written loop, for the cost of the framework.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from peers import megatron_step, transformers_step
from subjects import bare_step, lmcore_step


@dataclass(frozen=True)
class Shape:
    """A model and a micro-batch."""

    num_layers: int
    hidden_size: int
    num_heads: int
    seq_length: int
    micro_batch_size: int
    vocab_size: int = 50304

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.seq_length * self.micro_batch_size


SHAPES = {
    "small": Shape(4, 256, 8, 256, 8),
    "124m": Shape(12, 768, 12, 512, 1),
}

Step = Callable[[], float]
"""Takes one step and returns its loss."""

CONTENDERS: dict[str, Callable[..., Step]] = {
    "lmcore": lmcore_step,
    "lmcore-bare": bare_step,
    "transformers": transformers_step,
    "megatron-core": megatron_step,
}


def start(names: list[str], shape: Shape, *, compiled: bool) -> dict[str, Step]:
    """Return the contenders that can run here, each warmed up by two steps."""
    steps: dict[str, Step] = {}
    for name in names:
        base, _, mode = name.partition("+")
        began = time.perf_counter()
        try:
            step = CONTENDERS[base](shape, compiled=compiled or mode == "compile")
            losses = [step(), step()]
        except ImportError as missing:
            print(f"{name}: left out, {missing}", file=sys.stderr)
            continue
        took = time.perf_counter() - began
        print(f"{name}: ready in {took:.1f} s, loss {losses[-1]:.3f}", file=sys.stderr)
        steps[name] = step
    return steps


def measure(steps: dict[str, Step], *, turns: int, per_turn: int) -> dict[str, list[float]]:
    """Return seconds per step of each contender, one value a turn."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(turns):
        for name, step in steps.items():
            began = time.perf_counter()
            for _ in range(per_turn):
                step()
            seconds[name].append((time.perf_counter() - began) / per_turn)
    return seconds


def main() -> None:
    """Measure and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--compile", action="store_true", help="compile every contender")
    parser.add_argument("--contenders", nargs="*", default=list(CONTENDERS))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--per-turn", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(asked.threads)
    shape = SHAPES[asked.shape]
    steps = start(asked.contenders, shape, compiled=asked.compile)
    seconds = measure(steps, turns=asked.turns, per_turn=asked.per_turn)
    rows = {
        name: {
            "median_ms": statistics.median(values) * 1e3,
            "best_ms": min(values) * 1e3,
            "tokens_per_second": shape.tokens / statistics.median(values),
            "ratio_of_lmcore": statistics.median(
                theirs / ours for theirs, ours in zip(values, seconds["lmcore"], strict=True)
            )
            if "lmcore" in seconds
            else None,
        }
        for name, values in seconds.items()
    }
    if asked.json:
        print(json.dumps({"shape": asked.shape, "compile": asked.compile, "rows": rows}, indent=2))
        return
    print(f"{asked.shape}, {asked.threads} threads, torch {torch.__version__}")
    print(f"{'':<24}{'ms a step':>10}{'best':>8}{'tokens/s':>10}   time / lmcore's")
    for name, row in rows.items():
        ratio = f"{row['ratio_of_lmcore']:.2f}" if row["ratio_of_lmcore"] else ""
        print(
            f"{name:<24}{row['median_ms']:>10.0f}{row['best_ms']:>8.0f}"
            f"{row['tokens_per_second']:>10.0f}   {ratio:>8}"
        )


if __name__ == "__main__":
    main()
