"""A tiny model whose greedy text is varied, and a run directory that holds it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lmcore.checkpoint import save_checkpoint
from lmcore.config.section import AcceleratorSection, Config
from lmcore.contract import OP_SPECS, OpTable
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.data.tokenizer.saved import save_tokenizer
from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding
from lmcore.model.shape import ModelShape
from lmcore.plugin import discover, select
from lmcore.runtime.launch.rank import RankInfo
from lmcore.runtime.runtime import Runtime, start_runtime


@pytest.fixture(autouse=True)
def _processor(processor: str) -> None:
    """Run with the facts of other processors, too."""


# 257 real ids of the byte tokenizer, padded.
SHAPE = ModelShape(2, 24, 3, 40, 32, 384, init_method_std=0.3)


@pytest.fixture(params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> OpBinding:
    """The core's own ops, and the kernels of the CPU plugin."""
    if request.param == "reference":
        return OpBinding(OpTable(OP_SPECS), "cpu", "float32")
    kernels = pytest.importorskip("lmcore_cpu.kernels").KERNELS
    return OpBinding(OpTable(OP_SPECS, kernels), "cpu", "float32")


LLAMA = ModelShape(
    2,
    24,
    6,
    40,
    32,
    384,
    init_method_std=0.3,
    num_query_groups=2,
    normalization="RMSNorm",
    swiglu=True,
    position_embedding_type="rope",
    untie_embeddings_and_output_weights=True,
    add_bias_linear=False,
)


@pytest.fixture(params=[SHAPE, LLAMA], ids=["gpt", "llama"])
def model(request: pytest.FixtureRequest, ops: OpBinding) -> GPT:
    """A model with random weights; the padded ids would often win if they could."""
    made = GPT(request.param, ops, masked=True)
    made.initialize(7)
    with torch.no_grad():
        made.head_weight[300:] *= 3
    return made


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """The CPU through its plugin."""
    plugins = discover()
    config = Config(accelerator=AcceleratorSection(device="cpu", precision="fp32"))
    selection = select(plugins, requested="cpu", env={})
    with start_runtime(config, plugins, selection, RankInfo()) as started:
        yield started


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """A run as `lmcore train` leaves it: weights, optimizer state, the byte tokenizer."""
    directory = tmp_path / "run"
    directory.mkdir()
    tokenizer = ByteTokenizer()
    save_tokenizer(tokenizer, directory / "tokenizer")
    source = GPT(SHAPE, OpBinding(OpTable(OP_SPECS), "cpu", "float32"))
    source.initialize(7)
    tensors = {f"model.{name}": tensor.detach() for name, tensor in source.named_parameters()}
    tensors["optimizer.step"] = torch.tensor(5.0)
    described = {"describe": tokenizer.describe(), "fingerprint": tokenizer.fingerprint()}
    save_checkpoint(
        directory / "checkpoints",
        5,
        tensors,
        {"tokenizer": described},
        model_shape=SHAPE.to_dict(),
    )
    return directory
