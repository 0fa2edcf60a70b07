"""Times greedy generation: lmcore beside `generate` of transformers, GPT-2 124M in fp32.

    python benchmarks/generation.py --batch-sizes 1 8 --tokens 128 --repeats 3 --num-threads 2

Both continue the same 32-token prompts with models of the same shape and random weights; no
document ends early.  They run in turn inside each repeat, so that a slow moment of the machine
hits both; printed are medians of tokens/s and the median ratio.  Without transformers only lmcore
is timed.  `--json FILE` keeps every figure.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from installed import check, marked, parse

Prompts = Sequence[Sequence[int]]
Contender = Callable[[Prompts, int], int]
"""Continues prompts by a number of tokens and returns how many it made."""

POSITIONS = 1024
VOCABULARY = 50257
PADDED = 50304


def lmcore_contender(
    stack: ExitStack, layers: int, hidden: int, heads: int, *, precision: str, rows: int = 8
) -> Contender:
    """Return lmcore's generation on a model that is built as a run builds it."""
    from lmcore.cli.selection import find_plugins
    from lmcore.config.section import AcceleratorSection, Config
    from lmcore.generation.generate import generate
    from lmcore.generation.sampling_options import SamplingOptions
    from lmcore.generation.weights import fix_weights
    from lmcore.model.build import build_model
    from lmcore.model.shape import ModelShape
    from lmcore.runtime.device_choice import choose_device
    from lmcore.runtime.launch.rank import RankInfo
    from lmcore.runtime.runtime import start_runtime

    plugins = find_plugins([])
    selection = choose_device(plugins, "cpu", RankInfo())
    config = Config(accelerator=AcceleratorSection(device="cpu", precision=precision))
    runtime = stack.enter_context(start_runtime(config, plugins, selection, RankInfo()))
    shape = ModelShape(layers, hidden, heads, 4 * hidden, POSITIONS, PADDED)
    model = build_model(shape, runtime, masked=True)
    model.initialize(1)
    context = fix_weights(model.eval(), runtime, rows)

    def run(prompts: Prompts, num_tokens: int) -> int:
        made = generate(
            model,
            prompts,
            num_tokens=num_tokens,
            options=SamplingOptions(greedy=True),
            seed=0,
            eod=None,
            vocab_size=VOCABULARY,
            precision_context=context,
        )
        return sum(len(one.tokens) for one in made)

    return run


def transformers_contender(layers: int, hidden: int, heads: int) -> Contender | None:
    """Return the peer's generation with its default cache, or None where it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return None
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=PADDED,
        n_positions=POSITIONS,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    import torch

    model = GPT2LMHeadModel(config).eval()

    def run(prompts: Prompts, num_tokens: int) -> int:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
            )
        return (out.shape[1] - ids.shape[1]) * len(prompts)

    return run


def rate(contender: Contender, prompts: Prompts, num_tokens: int) -> float:
    """Return tokens/s of one run, the pass over the prompts included."""
    begin = time.perf_counter()
    made = contender(prompts, num_tokens)
    assert made == num_tokens * len(prompts)
    return made / (time.perf_counter() - begin)


def measure(
    contenders: dict[str, Contender], batch_size: int, num_tokens: int, repeats: int
) -> dict[str, list[float]]:
    """Return the rates of every contender, taken in turn after a warm-up."""
    import torch

    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, VOCABULARY, (batch_size, 32), generator=generator).tolist()
    for contender in contenders.values():
        contender(prompts, 4)
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, contender in contenders.items():
            rates[name].append(rate(contender, prompts, num_tokens))
    return rates


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--shape", type=int, nargs=3, default=[12, 768, 12], metavar="N")
    parser.add_argument("--json", type=Path)
    asked = parse(parser, batch_sizes=[1, 2], tokens=4, repeats=1, num_threads=1, shape=[1, 32, 2])
    check(asked)
    import torch

    torch.set_num_threads(asked.num_threads)
    layers, hidden, heads = asked.shape
    with ExitStack() as stack:
        contenders = {
            "lmcore": lmcore_contender(stack, layers, hidden, heads, precision=asked.precision)
        }
        peer = transformers_contender(layers, hidden, heads)
        if peer is None:
            print("transformers is not installed (`pip install transformers`): lmcore alone")
        else:
            contenders["transformers"] = peer
        figures = {}
        for batch_size in asked.batch_sizes:
            rates = measure(contenders, batch_size, asked.tokens, asked.repeats)
            figures[f"batch {batch_size}"] = rates
            shown = [f"{name} {statistics.median(found):7.1f}" for name, found in rates.items()]
            if peer is not None:
                pairs = zip(rates["lmcore"], rates["transformers"], strict=True)
                ratio = statistics.median(ours / theirs for ours, theirs in pairs)
                shown.append(f"ratio {ratio:.2f}")
            print(f"batch {batch_size}, tokens/s: {', '.join(shown)}", flush=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps(marked(figures, asked), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
