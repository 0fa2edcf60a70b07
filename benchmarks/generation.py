"""Times greedy generation: lmcore beside `generate` of transformers, GPT-2 124M in fp32.

    python benchmarks/generation.py --batch-sizes 1 8 --tokens 128 --repeats 3 --num-threads 2
    python benchmarks/generation.py --family t5 --shape 6 512 8

Both continue the same 32-token prompts with models of the same shape and random weights; no
document ends early.  They run in turn inside each repeat, so that a slow moment of the machine
hits both; printed are medians of tokens/s and the median ratio.  With `--family t5` the prompts are
the encoder's input.  Further rows, without it:

- the time to the first token after a long prompt, `--prompt`, also beside the peer;
- the bytes of weights that one token at a time reads per second after the first token, as a share
  of the memory bandwidth, which is measured by sums of a large tensor in the same repeats.

lmcore runs in `--precision`, with `--quantization` if it is given; the peer always in fp32.
Without transformers only lmcore is timed.  `--json FILE` keeps every figure.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from installed import check, marked, parse

Prompts = Sequence[Sequence[int]]
Contender = Callable[[Prompts, int], int]
"""Continues prompts by a number of tokens and returns how many it made."""

POSITIONS = 1024
VOCABULARY = 50257
PADDED = 50304
T5_VOCABULARY = 32128


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of its weights in memory."""

    layers: int
    hidden: int
    heads: int

    def bytes_per_token(self, precision: str, quantization: str | None) -> float:
        """Return the bytes of the matrices that each token is multiplied by."""
        own = {"int8": 1.0, "int4": 0.5}
        width = 4.0 if precision == "fp32" else 2.0
        blocks = 12 * self.layers * self.hidden**2 * own.get(quantization or "", width)
        return blocks + PADDED * self.hidden * (1.0 if quantization else width)


def lmcore_contender(
    stack: ExitStack,
    sizes: Sizes,
    *,
    precision: str,
    quantization: str | None = None,
    rows: int = 8,
) -> Contender:
    """Return lmcore's generation on a model that is built as a run builds it."""
    from lmcore.cli.selection import find_plugins
    from lmcore.config.section import AcceleratorSection, Config
    from lmcore.families.build import build_model
    from lmcore.generation.generate import generate
    from lmcore.generation.sampling.options import SamplingOptions
    from lmcore.inference.fix_weights import fix_weights
    from lmcore.model.shape import ModelShape
    from lmcore.runtime.device_choice import choose_device
    from lmcore.runtime.launch.rank import RankInfo
    from lmcore.runtime.runtime import start_runtime

    plugins = find_plugins([])
    selection = choose_device(plugins, "cpu", RankInfo())
    config = Config(accelerator=AcceleratorSection(device="cpu", precision=precision))
    runtime = stack.enter_context(start_runtime(config, plugins, selection, RankInfo()))
    hidden = sizes.hidden
    shape = ModelShape(sizes.layers, hidden, sizes.heads, 4 * hidden, POSITIONS, PADDED)
    model = build_model(shape, runtime, masked=True)
    model.initialize(1)
    execution = fix_weights(model.eval(), runtime, rows, quantization)

    def run(prompts: Prompts, num_tokens: int) -> int:
        made = generate(
            model,
            prompts,
            num_tokens=num_tokens,
            options=SamplingOptions(greedy=True),
            seed=0,
            eod=None,
            vocab_size=VOCABULARY,
            execution=execution,
        )
        return sum(len(one.tokens) for one in made)

    return run


def transformers_contender(sizes: Sizes) -> Contender | None:
    """Return the peer's generation with its default cache, or None where it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return None
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=PADDED,
        n_positions=POSITIONS,
        n_embd=sizes.hidden,
        n_layer=sizes.layers,
        n_head=sizes.heads,
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


def lmcore_t5(stack: ExitStack, sizes: Sizes) -> Contender:
    """Return lmcore's generation with the original T5 of random weights, in float32."""
    from lmcore.cli.selection import find_plugins
    from lmcore.config.section import AcceleratorSection, Config
    from lmcore.families.build import build_model
    from lmcore.generation.continuous_batch import ContinuousBatch
    from lmcore.generation.request import Request
    from lmcore.generation.sampling.options import SamplingOptions
    from lmcore.inference.fix_weights import fix_weights
    from lmcore.model.shape import ModelShape
    from lmcore.runtime.device_choice import choose_device
    from lmcore.runtime.launch.rank import RankInfo
    from lmcore.runtime.runtime import start_runtime

    plugins = find_plugins([])
    selection = choose_device(plugins, "cpu", RankInfo())
    config = Config(accelerator=AcceleratorSection(device="cpu", precision="fp32"))
    runtime = stack.enter_context(start_runtime(config, plugins, selection, RankInfo()))
    own = {
        "decoder_num_layers": 0,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "t5_feed_forward": "relu",
        "t5_scaled_attention": False,
        "t5_scaled_head": True,
        "t5_head_bias": False,
    }
    shape = ModelShape(
        *(sizes.layers, sizes.hidden, sizes.heads, 4 * sizes.hidden, POSITIONS, T5_VOCABULARY),
        normalization="RMSNorm",
        position_embedding_type="relative",
        add_bias_linear=False,
        model_family="t5",
        further=tuple(sorted(own.items())),
    )
    model: Any = build_model(shape, runtime, masked=True)
    model.initialize(1)
    execution = fix_weights(model.eval(), runtime, 8)

    def run(prompts: Prompts, num_tokens: int) -> int:
        batch = ContinuousBatch(
            model, vocab_size=T5_VOCABULARY, max_requests=len(prompts), execution=execution
        )
        greedy = SamplingOptions(greedy=True)
        made = [batch.add(Request([0], num_tokens, greedy, source=one)) for one in prompts]
        batch.run()
        return sum(len(one.tokens) for one in made)

    return run


def transformers_t5(sizes: Sizes) -> Contender | None:
    """Return the peer's generation with T5, or None where it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return None
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=T5_VOCABULARY,
        d_model=sizes.hidden,
        d_kv=sizes.hidden // sizes.heads,
        d_ff=4 * sizes.hidden,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        decoder_start_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = T5ForConditionalGeneration(config).eval()

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
        return (out.shape[1] - 1) * len(prompts)

    return run


def rate(contender: Contender, prompts: Prompts, num_tokens: int) -> float:
    """Return tokens/s of one run, the pass over the prompts included."""
    begin = time.perf_counter()
    made = contender(prompts, num_tokens)
    assert made == num_tokens * len(prompts)
    return made / (time.perf_counter() - begin)


def bandwidth(num_bytes: int) -> float:
    """Return the bytes per second that all threads read of a tensor too large for caches."""
    import torch

    source = torch.ones(num_bytes // 4)
    begin = time.perf_counter()
    source.sum()
    return 4 * source.numel() / (time.perf_counter() - begin)


def random_prompts(batch_size: int, length: int) -> Prompts:
    """Return prompts of random tokens, which both models have."""
    import torch

    generator = torch.Generator().manual_seed(0)
    found: Prompts = torch.randint(
        0, T5_VOCABULARY, (batch_size, length), generator=generator
    ).tolist()
    return found


def measure(
    contenders: dict[str, Contender], prompts: Prompts, num_tokens: int, repeats: int
) -> dict[str, list[float]]:
    """Return the rates of every contender, taken in turn after a warm-up."""
    for contender in contenders.values():
        contender(prompts, min(num_tokens, 4))
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, contender in contenders.items():
            rates[name].append(rate(contender, prompts, num_tokens))
    return rates


def ratio(rates: dict[str, list[float]]) -> str:
    """Return the median ratio to the peer as text; empty without a peer."""
    if "transformers" not in rates:
        return ""
    pairs = zip(rates["lmcore"], rates["transformers"], strict=True)
    return f", ratio {statistics.median(ours / theirs for ours, theirs in pairs):.2f}"


def share_of_bandwidth(contender: Contender, asked: argparse.Namespace, sizes: Sizes) -> float:
    """Print and return the share of the memory bandwidth that one token at a time uses."""
    per_token = sizes.bytes_per_token(asked.precision, asked.quantization)
    shares = []
    for _ in range(asked.repeats):
        highest = max(bandwidth(asked.bandwidth_mb * 10**6) for _ in range(3))
        prompts = random_prompts(1, 32)
        first = 1 / rate(contender, prompts, 1)
        seconds = asked.tokens / rate(contender, prompts, asked.tokens) - first
        shares.append(((asked.tokens - 1) * per_token / seconds / highest, highest))
    share, highest = statistics.median(one for one, _ in shares), max(one for _, one in shares)
    print(
        f"one token at a time reads {per_token / 1e6:.0f} MB of weights: {share:.0%} of the memory "
        f"bandwidth ({highest / 1e9:.0f} GB/s)",
        flush=True,
    )
    return share


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--prompt", type=int, default=900, help="tokens of the long prompt")
    parser.add_argument("--bandwidth-mb", type=int, default=800)
    parser.add_argument("--shape", type=int, nargs=3, default=[12, 768, 12], metavar="N")
    parser.add_argument("--family", choices=("gpt", "t5"), default="gpt")
    parser.add_argument("--json", type=Path)
    asked = parse(
        parser,
        batch_sizes=[1, 2],
        tokens=4,
        repeats=1,
        num_threads=1,
        shape=[1, 32, 2],
        prompt=40,
        bandwidth_mb=4,
    )
    check(asked)
    import torch

    torch.set_num_threads(asked.num_threads)
    sizes = Sizes(*asked.shape)
    with ExitStack() as stack:
        own = {"precision": asked.precision, "quantization": asked.quantization}
        t5 = asked.family == "t5"
        ours = lmcore_t5(stack, sizes) if t5 else lmcore_contender(stack, sizes, **own)
        contenders = {"lmcore": ours}
        peer = (transformers_t5 if t5 else transformers_contender)(sizes)
        if peer is None:
            print("transformers is not installed (`pip install transformers`): lmcore alone")
        else:
            contenders["transformers"] = peer
        figures: dict[str, Any] = {}
        for batch_size in asked.batch_sizes:
            prompts = random_prompts(batch_size, 32)
            rates = measure(contenders, prompts, asked.tokens, asked.repeats)
            figures[f"batch {batch_size}"] = rates
            shown = [f"{name} {statistics.median(found):7.1f}" for name, found in rates.items()]
            print(f"batch {batch_size}, tokens/s: {', '.join(shown)}{ratio(rates)}", flush=True)
        if t5:
            _keep(figures, asked)
            return
        rates = measure(contenders, random_prompts(1, asked.prompt), 1, asked.repeats)
        figures["first token"] = {name: [1 / one for one in own] for name, own in rates.items()}
        shown = [f"{name} {1e3 / statistics.median(found):7.0f}" for name, found in rates.items()]
        print(
            f"first token after {asked.prompt} tokens, ms: {', '.join(shown)}{ratio(rates)}",
            flush=True,
        )
        figures["share of bandwidth"] = share_of_bandwidth(contenders["lmcore"], asked, sizes)
    _keep(figures, asked)


def _keep(figures: dict[str, Any], asked: argparse.Namespace) -> None:
    """Write the figures to the file that was asked for."""
    if asked.json is not None:
        asked.json.write_text(json.dumps(marked(figures, asked), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
