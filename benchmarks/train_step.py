"""A training step on the CPU: lmcore beside the peers that install from the package registry.

Every contender trains the same shape on random token ids with AdamW and clipping at 1.0, each in
its own process.  They take turns, a few steps each, so that a change of the machine's speed falls
on all of them; the figures are medians over the turns and their ratios, and the most memory that
each process ever held.  A peer that is not installed is left out and named.

    python benchmarks/train_step.py                     # small model, eager
    python benchmarks/train_step.py --shape 124m --contenders lmcore+compile transformers+compile
    python benchmarks/train_step.py --shape 124m --precision bf16
    python benchmarks/train_step.py --family bert --contenders lmcore transformers
    python benchmarks/train_step.py --family t5 --contenders lmcore transformers
    python benchmarks/train_step.py --family llama --contenders lmcore transformers

Contenders: `lmcore` is what `lmcore train` runs (loader, metrics and all); `lmcore-bare` is the
same model and kernels in a hand-written loop, for the cost of the framework.  With `--precision
bf16` lmcore trains by its policy of that name, the peers under torch's autocast.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from installed import check, marked, parse
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
    family: str = "gpt"
    decoder_length: int = 0
    num_groups: int = 0
    ffn_size: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of a step, of the decoder too."""
        return (self.seq_length + self.decoder_length) * self.micro_batch_size


SHAPES = {
    "small": Shape(4, 256, 8, 256, 8),
    "124m": Shape(12, 768, 12, 512, 1),
    "bert-base-128": Shape(12, 768, 12, 128, 8, vocab_size=30592, family="bert"),
    "bert-base-512": Shape(12, 768, 12, 512, 2, vocab_size=30592, family="bert"),
    "bert-toy": Shape(2, 32, 2, 32, 2, vocab_size=512, family="bert"),
    "t5-small": Shape(6, 512, 8, 512, 2, 32128, family="t5", decoder_length=128),
    "t5-toy": Shape(2, 32, 2, 32, 2, 512, family="t5", decoder_length=16),
    "llama-110m": Shape(12, 768, 12, 512, 1, 32000, "llama", num_groups=4, ffn_size=2048),
    "llama-toy": Shape(2, 32, 2, 32, 1, 512, "llama", num_groups=1, ffn_size=64),
    "toy": Shape(2, 32, 2, 32, 1, vocab_size=512),
}

Step = Callable[[], float]
"""Takes one step and returns its loss."""

CONTENDERS: dict[str, Callable[..., Step]] = {
    "lmcore": lmcore_step,
    "lmcore-bare": bare_step,
    "transformers": transformers_step,
    "megatron-core": megatron_step,
}


class Contender:
    """One contender in a separate process, so that no other's settings reach it."""

    def __init__(self, name: str, shape: str, threads: int, precision: str) -> None:
        """Start the process and wait until it has taken two steps."""
        self.name = name
        command = [sys.executable, "-W", "ignore", __file__, "--worker", name, "--shape", shape]
        self.process = subprocess.Popen(
            [*command, "--threads", str(threads), "--precision", precision],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.ready = self._answer()
        self.peak_mb = 0.0

    def seconds(self, steps: int) -> float:
        """Return the time of a step, a mean over *steps* of them."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        answer = self._answer()
        self.peak_mb = float(answer["peak_mb"])
        return float(answer["seconds"])

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        return {"missing": f"its process ended with status {self.process.wait()}"}

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


def work(name: str, shape: Shape, threads: int, precision: str) -> None:
    """Take steps as the lines of standard input say; the body of a contender's process."""
    base, _, mode = name.partition("+")
    began = time.perf_counter()
    try:
        compiled = mode == "compile"
        step = CONTENDERS[base](shape, compiled=compiled, threads=threads, precision=precision)
        losses = [step(), step()]
    except ImportError as missing:
        print(json.dumps({"missing": str(missing)}), flush=True)
        return
    took = time.perf_counter() - began
    print(json.dumps({"ready": took, "loss": losses[-1]}), flush=True)
    for line in sys.stdin:
        began, steps = time.perf_counter(), int(line)
        for _ in range(steps):
            step()
        seconds = (time.perf_counter() - began) / steps
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
        print(json.dumps({"seconds": seconds, "peak_mb": peak}), flush=True)


def start(names: list[str], shape: str, threads: int, precision: str) -> dict[str, Contender]:
    """Return the contenders that can run here, warmed up."""
    found = {}
    for name in names:
        contender = Contender(name, shape, threads, precision)
        if "missing" in contender.ready:
            print(f"{name}: left out, {contender.ready['missing']}", file=sys.stderr)
            contender.close()
            continue
        ready, loss = contender.ready["ready"], contender.ready["loss"]
        print(f"{name}: ready in {ready:.1f} s, loss {loss:.3f}", file=sys.stderr)
        found[name] = contender
    return found


def measure(
    contenders: dict[str, Contender], *, turns: int, per_turn: int
) -> dict[str, list[float]]:
    """Return seconds per step of each contender, one value a turn; the order rotates."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for _ in range(turns):
        for name in order:
            seconds[name].append(contenders[name].seconds(per_turn))
        order = order[1:] + order[:1]
    return seconds


def main() -> None:
    """Measure and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--family", choices=("gpt", "llama", "bert", "t5"), default="gpt")
    parser.add_argument("--contenders", nargs="*", default=list(CONTENDERS))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--per-turn", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--json", action="store_true")
    asked = parse(parser, shape="toy", turns=1, per_turn=1, threads=1)
    usual = {
        "gpt": ("small", "toy"),
        "llama": ("llama-110m", "llama-toy"),
        "bert": ("bert-base-128", "bert-toy"),
        "t5": ("t5-small", "t5-toy"),
    }[asked.family]
    asked.shape = usual[1] if asked.shape == "toy" else asked.shape or usual[0]
    shape = SHAPES[asked.shape]
    if asked.worker:
        work(asked.worker, shape, asked.threads, asked.precision)
        return
    check(asked)
    contenders = start(asked.contenders, asked.shape, asked.threads, asked.precision)
    try:
        seconds = measure(contenders, turns=asked.turns, per_turn=asked.per_turn)
    finally:
        for contender in contenders.values():
            contender.close()
    rows = {
        name: {
            "median_ms": statistics.median(values) * 1e3,
            "best_ms": min(values) * 1e3,
            "peak_mb": contenders[name].peak_mb,
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
        found = {"shape": asked.shape, "threads": asked.threads, "rows": rows}
        found["precision"] = asked.precision
        print(json.dumps(marked(found, asked), indent=2))
        return
    torch_version = metadata.version("torch")
    print(f"{asked.shape}, {asked.precision}, {asked.threads} threads, torch {torch_version}")
    print(f"{'':<24}{'ms a step':>10}{'best':>8}{'tokens/s':>10}{'peak MB':>9}   time / lmcore's")
    for name, row in rows.items():
        ratio = f"{row['ratio_of_lmcore']:.2f}" if row["ratio_of_lmcore"] else ""
        print(
            f"{name:<24}{row['median_ms']:>10.0f}{row['best_ms']:>8.0f}"
            f"{row['tokens_per_second']:>10.0f}{row['peak_mb']:>9.0f}   {ratio:>8}"
        )


if __name__ == "__main__":
    main()
