"""A small causal model with random weights, and its tokenizer of bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lmcore.contract import OP_SPECS, OpTable
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding
from lmcore.inference.load import LoadedModel
from lmcore.inference.text_model import PLAIN
from lmcore.model.shape import ModelShape

_LEARNED = ModelShape(2, 24, 3, 40, 32, 384, init_method_std=0.3)
_ROTARY = ModelShape(
    2,
    24,
    6,
    40,
    32,
    384,
    init_method_std=0.3,
    num_query_groups=2,
    position_embedding_type="rope",
    swiglu=True,
    normalization="RMSNorm",
)


@pytest.fixture
def loaded() -> Callable[..., LoadedModel]:
    """Makes a model in float64, with learned or rotary positions."""

    def make(positions: str = "learned") -> LoadedModel:
        shape = _ROTARY if positions == "rotary" else _LEARNED
        model = GPT(shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32"), masked=True)
        model.initialize(7)
        return LoadedModel(model.double().eval(), ByteTokenizer(), Path("run"), PLAIN)

    return make
