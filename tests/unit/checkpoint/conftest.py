"""Tensors of every kind, and a subprocess that saves with something done to it first."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from suite import warm

from lmcore.checkpoint import save_checkpoint

SHAPE = {"num_layers": 2, "hidden_size": 256, "vocab_size": 512}
META = {"consumed_samples": 96, "schedule": {"lr": 0.1 + 0.2, "names": ["a", "ß"]}, "done": False}


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor of random bits, not-a-numbers and all."""
    generator = torch.Generator().manual_seed(seed)
    width = torch.empty((), dtype=dtype).element_size()
    count = width * torch.Size(shape).numel()
    bits = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).reshape(shape)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """A small state: each dtype, empty and 0-dim tensors, views of all sorts, a parameter."""
    matrix = random_bits((40, 30), torch.float32, 1)
    return {
        "model.layers.0.attention.qkv.weight": torch.nn.Parameter(torch.randn(64, 32)),
        "model.bf16": random_bits((7, 5), torch.bfloat16, 2),
        "model.fp16": random_bits((33,), torch.float16, 3),
        "model.nan": matrix,
        "model.transposed": matrix.t(),
        "model.strided": torch.arange(100)[3:90:7],
        "model.expanded": torch.ones(1).expand(6),
        "optimizer.step": torch.tensor(17),
        "optimizer.scale": torch.tensor(0.5, dtype=torch.float64),
        "optimizer.mask": torch.tensor([True, False, True]),
        "optimizer.empty": torch.zeros(0, 4, dtype=torch.bfloat16),
        "rng.cpu": torch.get_rng_state(),
    }


@pytest.fixture
def saved(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A complete checkpoint of iteration 100."""
    return save_checkpoint(tmp_path / "checkpoints", 100, tensors, META, model_shape=SHAPE)


@pytest.fixture(scope="session")
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a piece of Python in a separate process, where a warning is an error."""

    def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        strict = "import warnings; warnings.simplefilter('error')\n" + textwrap.dedent(code)
        return warm.run(
            [sys.executable, "-c", strict, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run
