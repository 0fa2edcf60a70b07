"""Small models on the ops' references and on the CPU's kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from model_states import drawn

from lmcore.contract import OP_SPECS, OpTable
from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding
from lmcore.families.recompute import KEEP_ALL, Recompute
from lmcore.model.shape import ModelShape

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=3,
    ffn_hidden_size=40,
    max_position_embeddings=12,
    padded_vocab_size=32,
    init_method_std=0.3,
)

MakeModel = Callable[..., GPT]


@pytest.fixture(params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> OpBinding:
    """The core's own ops, and the kernels of the CPU plugin."""
    if request.param == "reference":
        return OpBinding(OpTable(OP_SPECS), "cpu", "float32")
    kernels = pytest.importorskip("lmcore_cpu.kernels").KERNELS
    return OpBinding(OpTable(OP_SPECS, kernels), "cpu", "float32")


@pytest.fixture
def make_model(ops: OpBinding) -> MakeModel:
    """Makes a model with every parameter random, gains and offsets too, so that none is idle."""

    def make(
        seed: int = 1, *, recompute: Recompute = KEEP_ALL, masked: bool = False, **changes
    ) -> GPT:
        return drawn(GPT(replace(SHAPE, **changes), ops, recompute, masked=masked), seed)

    return make
