"""Contenders of `device_suite.py`: loops on an accelerator, each measured in a separate process.

`bare` is lmcore's model and kernels in a hand-written loop, for the cost of the framework;
`transformers` is the best loop over that library's model that its documentation shows: the whole
model compiled, SDPA, autocast, fused AdamW, the batch on the device already, no value read back;
`accelerate` and `fabric` are the same as these two frameworks have it, where they are installed.
`matmul` finds what products of this device reach at most.

    python benchmarks/device_loops.py bare --device cuda --model gpt2-124m --micro-batch-size 32
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

sys.path.insert(0, str(Path(__file__).parent))
from installed import check, parse
from train_step import Shape

WINDOWS, MATMUL_SIZES = 5, (4096, 8192)
_RATE = 1e-4
Step = Callable[[], Any]
"""Takes one step and reads nothing back."""


@dataclass(frozen=True)
class DeviceShape(Shape):
    """A model and a micro-batch; with groups of query heads it is a Llama, else a GPT-2."""

    num_groups: int = 0
    ffn_hidden_size: int = 0

    @property
    def values(self) -> dict[str, Any]:
        """Options of lmcore's that make the model a Llama."""
        if not self.num_groups:
            return {}
        return {
            "normalization": "RMSNorm",
            "swiglu": True,
            "ffn_hidden_size": self.ffn_hidden_size,
            "position_embedding_type": "rope",
            "group_query_attention": True,
            "num_query_groups": self.num_groups,
            "add_bias_linear": False,
            "untie_embeddings_and_output_weights": True,
        }

    @property
    def flags(self) -> list[str]:
        """The same as flags of `lmcore train`."""
        found = []
        for name, value in self.values.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                found.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                found += [f"--{flag}", str(value)]
        return found


SHAPES: dict[str, tuple[int, int, int, int]] = {
    "tiny": (2, 64, 4, 64),
    "tiny-llama": (2, 64, 4, 64),
    "gpt2-124m": (12, 768, 12, 1024),
    "gpt2-345m": (24, 1024, 16, 1024),
    "llama-1b": (22, 2048, 32, 4096),
    "gpt-1.7b": (24, 2304, 24, 2048),
    "gpt-3.6b": (30, 3072, 32, 2048),
}
"""Layers, width, heads and sequence of the presets that are measured, and of a trial's model."""


LLAMAS = {"tiny-llama": (2, 128), "llama-1b": (4, 5632)}
"""Groups of query heads and feed-forward width of the models that are Llamas."""


def shape_of(model: str, micro_batch_size: int) -> DeviceShape:
    """Return a preset's shape with its vocabulary padded as lmcore pads it."""
    if model not in LLAMAS:
        return DeviceShape(*SHAPES[model], micro_batch_size)
    groups, width = LLAMAS[model]
    return DeviceShape(
        *SHAPES[model], micro_batch_size, 32000, num_groups=groups, ffn_hidden_size=width
    )


def bare_loop(shape: DeviceShape, device: str, precision: str, *, compiled: bool) -> Step:
    """Return a step of lmcore's model without what lmcore does around it."""
    from subjects import Parts

    flags = ["--precision", precision, *shape.flags]
    parts = Parts(shape, compiled=compiled, threads=1, flags=flags, device=device)
    import torch

    from lmcore.data.loading.nested import to_device
    from lmcore.train.token_mean import weighted

    model, optimizer = parts.state.model, parts.state.optimizer
    where = parts.runtime.device.torch_device
    batch = weighted(to_device(next(parts.batches()), where), model.family)
    parameters = [p for group in optimizer.groups for p in group.parameters]

    def take() -> torch.Tensor:
        model.zero_grad()
        with parts.runtime.precision.context():
            loss = model.loss(**batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step(_RATE)
        return loss.detach()

    return take


def transformers_model(shape: DeviceShape) -> Any:
    """Return the model of `transformers` of a shape, on the CPU, in training mode."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    torch.manual_seed(0)
    return (_llama_of(shape) if shape.num_groups else _gpt2_of(shape)).train()


def _llama_of(shape: DeviceShape) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_groups,
        max_position_embeddings=shape.seq_length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def _gpt2_of(shape: DeviceShape) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.seq_length,
        n_embd=shape.hidden_size,
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def random_tokens(shape: DeviceShape) -> torch.Tensor:
    """Return a micro-batch of token ids on the CPU."""
    import torch

    size, known = (shape.micro_batch_size, shape.seq_length), min(50257, shape.vocab_size)
    return torch.randint(0, known, size, generator=torch.Generator().manual_seed(0))


def transformers_loop(shape: DeviceShape, device: str, precision: str, *, compiled: bool) -> Step:
    """Return a step of the model of `transformers`."""
    import torch

    where = torch.device(device)
    model = transformers_model(shape).to(where)
    run = torch.compile(model, dynamic=False) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.01, fused=True)
    tokens = random_tokens(shape).to(where)
    half = precision != "fp32"

    def take() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=half):
            loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    return take


def accelerate_loop(shape: DeviceShape, device: str, precision: str, *, compiled: bool) -> Step:
    """Return a step of the same model by Hugging Face's Accelerate."""
    import torch
    from accelerate import Accelerator

    half = "bf16" if precision != "fp32" else "no"
    dynamo = "inductor" if compiled else None
    framework = Accelerator(mixed_precision=half, dynamo_backend=dynamo, cpu=device == "cpu")
    model = transformers_model(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.01, fused=True)
    model, optimizer = framework.prepare(model, optimizer)
    tokens = random_tokens(shape).to(framework.device)

    def take() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        framework.backward(loss)
        framework.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    return take


def fabric_loop(shape: DeviceShape, device: str, precision: str, *, compiled: bool) -> Step:
    """Return a step of the same model by Lightning Fabric."""
    import torch

    try:
        from lightning.fabric import Fabric
    except ImportError:
        from lightning_fabric import Fabric

    half = "bf16-mixed" if precision != "fp32" else "32-true"
    framework = Fabric(accelerator=device, devices=1, precision=half)
    plain = transformers_model(shape)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=_RATE, weight_decay=0.01, fused=True)
    compiler = torch.compile(plain, dynamic=False) if compiled else plain
    model, optimizer = framework.setup(compiler, optimizer)
    tokens = random_tokens(shape).to(framework.device)

    def take() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        framework.backward(loss)
        framework.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        return loss.detach()  # type: ignore[no-any-return]

    return take


LOOPS = {
    "bare": bare_loop,
    "transformers": transformers_loop,
    "accelerate": accelerate_loop,
    "fabric": fabric_loop,
}
PEERS = ("transformers", "accelerate", "fabric")
"""Loops over the model of `transformers`: by hand, and by the frameworks that are installed."""


def measure(step: Step, device: str, *, steps: int) -> dict[str, float]:
    """Return the median time of a step over windows that end when the device is done."""
    import torch

    wait = torch.accelerator.synchronize if device != "cpu" else lambda: None
    began = time.perf_counter()
    first = float(step())
    ready = time.perf_counter() - began
    for _ in range(3):
        step()
    wait()
    times = []
    for _ in range(WINDOWS):
        began = time.perf_counter()
        for _ in range(steps):
            loss = step()
        wait()
        times.append((time.perf_counter() - began) / steps)
    last = float(loss)
    peak = torch.accelerator.max_memory_allocated() if device != "cpu" else 0
    return {
        "seconds": statistics.median(times),
        "first_step_seconds": ready,
        "peak_memory_bytes": peak,
        "first_loss": first,
        "last_loss": last,
    }


def matmul_ceiling(device: str, precision: str, *, size: int | None = None) -> dict[str, float]:
    """Return the most FLOP/s that square products of this device reach."""
    import torch

    wait = torch.accelerator.synchronize if device != "cpu" else lambda: None
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    best = 0.0
    for n in (size,) if size else MATMUL_SIZES:
        left, right = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        for _ in range(5):
            left @ right
        wait()
        for _ in range(10):
            began = time.perf_counter()
            for _ in range(10):
                left @ right
            wait()
            best = max(best, 20 * n**3 / (time.perf_counter() - began))
    return {"flops": best}


def main() -> None:
    """Measure one contender and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=[*LOOPS, "matmul"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--steps", type=int, default=5, help="of each of five windows")
    parser.add_argument("--matmul-size", type=int)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    asked = parse(parser, steps=1, matmul_size=64, compile=False)
    check(asked)
    if asked.what == "matmul":
        found = matmul_ceiling(asked.device, asked.precision, size=asked.matmul_size)
        print(json.dumps(found), flush=True)
        return
    shape = shape_of(asked.model, asked.micro_batch_size)
    try:
        step = LOOPS[asked.what](shape, asked.device, asked.precision, compiled=asked.compile)
    except ImportError as missing:
        print(json.dumps({"missing": str(missing)}), flush=True)
        return
    print(json.dumps(measure(step, asked.device, steps=asked.steps)), flush=True)


if __name__ == "__main__":
    main()
