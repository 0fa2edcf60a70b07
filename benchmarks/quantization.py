"""Measures what narrow weights cost: perplexity of a small trained model on held-out text.

    python benchmarks/quantization.py --steps 600 --num-threads 2

A GPT over bytes is trained on the documentation of this repository, or on `--text FILE`, but for
its last tenth, and prepared for generation as `lmcore generate` does it: fp32, bf16, int8, int4.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))
from installed import check, marked, parse

if TYPE_CHECKING:
    from torch import Tensor

    from lmcore.families.protocol import CausalLM
    from lmcore.runtime.runtime import Runtime

KINDS = (("fp32", None), ("bf16", None), ("bf16", "int8"), ("bf16", "int4"))
"""Precision and quantization of each row of the table."""
BYTES = 256


def read_text(path: Path | None) -> bytes:
    """Return the text of a file, or of the documentation."""
    if path is not None:
        return path.read_bytes()
    pages = sorted((Path(__file__).resolve().parents[1] / "docs").rglob("*.md"))
    return b"\n".join(page.read_bytes() for page in pages)


def start(stack: ExitStack, precision: str) -> Runtime:
    """Return the CPU in a precision."""
    from lmcore.cli.selection import find_plugins
    from lmcore.config.section import AcceleratorSection, Config
    from lmcore.runtime.device_choice import choose_device
    from lmcore.runtime.launch.rank import RankInfo
    from lmcore.runtime.runtime import start_runtime

    plugins = find_plugins([])
    selection = choose_device(plugins, "cpu", RankInfo())
    config = Config(accelerator=AcceleratorSection(device="cpu", precision=precision))
    return stack.enter_context(start_runtime(config, plugins, selection, RankInfo()))


def train(model: CausalLM, text: Tensor, steps: int, length: int) -> None:
    """Train on random samples, 16 at a time."""
    import torch

    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    weight = torch.ones(16, length)
    for _ in range(steps):
        begin = torch.randint(0, len(text) - length, (16, 1), generator=generator)
        sample = text[begin + torch.arange(length + 1)]
        loss = model.loss(sample[:, :-1], sample[:, 1:], weight) / weight.numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def perplexity(model: CausalLM, runtime: Runtime, kind: str | None, held: Tensor) -> float:
    """Return the perplexity a byte of samples, with the weights as generation has them."""
    import torch

    from lmcore.inference.fix_weights import fix_weights

    runtime.precision.apply(model)
    execution = fix_weights(model.eval(), runtime, 1, kind)
    total = 0.0
    with execution.passes():
        for sample in held.split(16):
            logits = model.logits(model(sample[:, :-1])).double().flatten(0, 1)
            target = sample[:, 1:].flatten()
            total += float(torch.nn.functional.cross_entropy(logits, target, reduction="sum"))
    return math.exp(total / held[:, 1:].numel())


def main() -> None:
    """Train, measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--shape", type=int, nargs=3, default=[4, 128, 4], metavar="N")
    parser.add_argument("--json", type=Path)
    asked = parse(parser, steps=2, length=8, num_threads=1, shape=[1, 32, 2])
    check(asked)
    import torch

    from lmcore.families.build import build_model
    from lmcore.model.shape import ModelShape

    torch.set_num_threads(asked.num_threads)
    text = torch.frombuffer(bytearray(read_text(asked.text)), dtype=torch.uint8).long()
    seen = text[: len(text) * 9 // 10]
    rest = text[len(seen) :]
    count = min(len(rest) // (asked.length + 1), 2 if asked.toy else 512)
    held = rest[: count * (asked.length + 1)].view(count, -1)
    layers, hidden, heads = asked.shape
    shape = ModelShape(
        layers,
        hidden,
        heads,
        4 * hidden,
        asked.length,
        BYTES,
        hidden_dropout=0,
        attention_dropout=0,
    )
    figures: dict[str, float] = {}
    with ExitStack() as stack:
        runtimes = {precision: start(stack, precision) for precision in ("fp32", "bf16")}
        model = build_model(shape, runtimes["fp32"], masked=True)
        model.initialize(1)
        train(model.train(), seen, asked.steps, asked.length)
        for precision, kind in KINDS:
            name = kind or precision
            figures[name] = perplexity(copy.deepcopy(model), runtimes[precision], kind, held)
            worse = figures[name] / figures["fp32"] - 1
            print(f"{name}: perplexity {figures[name]:.4f}, {100 * worse:+.3f}%", flush=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps(marked(figures, asked), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
