"""`use_kernels` beside a model of `transformers` as it is: a part of `library.py`.

The model's own step runs in a process that plain torch sets up, the one with kernels in a session
of lmcore; both have the same weights, tokens, random numbers and optimizer, torch's AdamW.  Steps
are taken in turns, and a ratio is the median of those within a turn.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CASES", "VARIANTS", "compare", "take_steps"]

VARIANTS = ("own", "kernels")
VOCABULARY = {"GPT-2": 50257, "Llama": 32000}
TOY = {"layers": 2, "width": 32, "heads": 2, "tokens": 16}


@dataclass(frozen=True)
class Case:
    """A model and its batch.

    Attributes:
        family: "GPT-2" or "Llama".
        layers, width, heads: Sizes of the model.
        batch, tokens: Sequences of a batch and tokens of a sequence.
        precision: "fp32", or "bf16" for autocast.
        dropout: True for the library's default rate, 0.1 for GPT-2; False for none.
    """

    family: str
    layers: int
    width: int
    heads: int
    batch: int
    tokens: int
    precision: str = "fp32"
    dropout: bool = True

    @property
    def name(self) -> str:
        """The name in the table."""
        plain = "" if self.dropout else ", no dropout"
        sizes = f"{self.layers} x {self.width}, batch {self.batch} x {self.tokens}"
        return f"{self.family} {sizes}, {self.precision}{plain}"


CASES = (
    Case("GPT-2", 12, 768, 12, 1, 512),
    Case("GPT-2", 12, 768, 12, 1, 512, dropout=False),
    Case("GPT-2", 12, 768, 12, 1, 1024),
    Case("GPT-2", 12, 768, 12, 2, 512, dropout=False),
    Case("GPT-2", 12, 768, 12, 1, 512, "bf16"),
    Case("GPT-2", 12, 768, 12, 1, 512, "bf16", dropout=False),
    Case("GPT-2", 4, 256, 8, 8, 256, dropout=False),
    Case("Llama", 12, 768, 12, 1, 512, dropout=False),
)
"""The first models are GPT-2 small, 124M parameters; the first one is the library's default."""


def model_of(case: Case, *, toy: bool) -> Any:
    """Return the model with random weights, in training mode."""
    import transformers

    sizes = TOY if toy else vars(case)
    layers, width, heads = sizes["layers"], sizes["width"], sizes["heads"]
    vocabulary = 128 if toy else VOCABULARY[case.family]
    if case.family == "Llama":
        config = transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=width * 8 // 3,
            num_hidden_layers=layers,
            num_attention_heads=heads,
        )
        return transformers.LlamaForCausalLM(config).train()
    rates = {} if case.dropout else dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(
        vocab_size=vocabulary, n_layer=layers, n_embd=width, n_head=heads, **rates
    )
    return transformers.GPT2LMHeadModel(config).train()


def steps(case: Case, *, toy: bool, use_kernels: Callable[..., Any] | None) -> Iterator[Any]:
    """Yield loss, seconds of forward and backward pass, and seconds of the step."""
    import torch

    torch.manual_seed(0)
    model = model_of(case, toy=toy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    shape = (case.batch, TOY["tokens"] if toy else case.tokens)
    tokens = torch.randint(0, model.config.vocab_size, shape)
    if use_kernels is not None:
        use_kernels(model, optimizer)
    while True:
        begin = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16"):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        gradients = time.perf_counter() - begin
        optimizer.step()
        optimizer.zero_grad()
        yield float(loss.detach()), gradients, time.perf_counter() - begin


def take_steps(variant: str, number: int, *, threads: int, toy: bool) -> None:
    """Take a step of a case for each line of standard input, and print its figures."""
    import torch

    torch.set_num_threads(threads)
    with ExitStack() as stack:
        use_kernels = None
        if variant == "kernels":
            from lmcore import start

            session = stack.enter_context(
                start(device="cpu", precision="fp32", num_threads=threads)
            )
            use_kernels = session.use_kernels
        for _, figures in zip(
            sys.stdin, steps(CASES[number], toy=toy, use_kernels=use_kernels), strict=False
        ):
            print("figures", *figures, flush=True)


def compare(script: Path, turns: int, flags: tuple[str, ...]) -> None:
    """Print the times of each case, both ways, and the ratio."""
    import torch

    if importlib.util.find_spec("transformers") is None:
        print("\nkernels in a model of transformers: left out, transformers is not installed")
        return
    threads = torch.get_num_threads()
    print(
        f"\nkernels in a model of transformers, {threads} threads: ms of a step with AdamW, the "
        "model's own and with kernels; own / with kernels, and that of forward and backward pass"
    )
    for number, case in enumerate(CASES):
        found = _turns(script, number, threads, turns, flags)
        own, kernels = (list(zip(*found[variant], strict=True)) for variant in VARIANTS)
        ratios = [
            statistics.median(a / b for a, b in zip(own[at], kernels[at], strict=True))
            for at in (2, 1)
        ]
        gap = max(abs(a - b) for a, b in zip(own[0], kernels[0], strict=True))
        times = [statistics.median(each[2]) * 1e3 for each in (own, kernels)]
        print(
            f"{case.name:<46}{times[0]:>9.1f}{times[1]:>9.1f}{ratios[0]:>7.2f}{ratios[1]:>7.2f}"
            f"  losses differ by {gap:.1e}",
            flush=True,
        )


def _turns(
    script: Path, number: int, threads: int, turns: int, flags: tuple[str, ...]
) -> dict[str, list[tuple[float, ...]]]:
    """Return the figures of each step, by variant; the first two steps are not among them."""
    with ExitStack() as stack:
        workers = {
            variant: stack.enter_context(
                subprocess.Popen(
                    [
                        *(sys.executable, "-W", "ignore", script, *flags),
                        *("--model-steps", variant, "--case", str(number)),
                        *("--threads", str(threads)),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for variant in VARIANTS
        }
        found: dict[str, list[tuple[float, ...]]] = {variant: [] for variant in VARIANTS}
        for turn in range(turns + 2):
            for variant in VARIANTS if turn % 2 else VARIANTS[::-1]:
                figures = _step(workers[variant], variant)
                if turn > 1:
                    found[variant].append(figures)
        for worker in workers.values():
            worker.kill()
    return found


def _step(worker: subprocess.Popen[str], variant: str) -> tuple[float, ...]:
    """Return the figures of one step of a process."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write("\n")
    worker.stdin.flush()
    for line in worker.stdout:
        name, *figures = line.split()
        if name == "figures":
            return tuple(map(float, figures))
    assert worker.stderr is not None
    raise SystemExit(f"{variant} failed:\n{worker.stderr.read()}")
