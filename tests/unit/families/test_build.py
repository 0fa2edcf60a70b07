"""Families of models: names, classes, and layouts that a family does not support."""

from __future__ import annotations

import dataclasses

import pytest
from layouts.mlp_model import MLPModel, replace_gpt

from lmcore.base.errors import RunError
from lmcore.contract import OP_SPECS, OpTable
from lmcore.families.build import create_model
from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding
from lmcore.model.family import families, family_of
from lmcore.model.shape import ModelShape
from lmcore.parallel.mesh import Axis
from lmcore.parallel.tensor_parallel import tensor_layouts

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    ffn_hidden_size=40,
    max_position_embeddings=12,
    padded_vocab_size=32,
)
OPS = OpBinding(OpTable(OP_SPECS), "cpu", "float32")


@pytest.mark.parametrize(
    "changes,family",
    [
        ({}, "GPT"),
        ({"swiglu": True, "normalization": "RMSNorm"}, "GPT"),
        ({"swiglu": True, "position_embedding_type": "rope"}, "GPT"),
        (
            {"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope"},
            "Llama",
        ),
    ],
)
def test_families(changes: dict[str, object], family: str) -> None:
    """RMSNorm, SwiGLU and rotary positions together are a Llama; one class builds both."""
    shape = dataclasses.replace(SHAPE, **changes)
    assert family_of(shape).name == family
    assert type(create_model(shape, OPS)) is GPT


def test_another_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registered class is built, and names the layouts that it does not support."""
    monkeypatch.setitem(families(), "GPT", replace_gpt())
    model = create_model(SHAPE, OPS)
    assert type(model) is MLPModel
    assert (
        tensor_layouts(model, Axis(0, 1, (0,), None)).keys()
        == dict(model.named_parameters()).keys()
    )
    with pytest.raises(RunError, match="--tensor-model-parallel-size"):
        tensor_layouts(model, Axis(0, 2, (0, 1), None))
    with pytest.raises(RunError, match="--pipeline-model-parallel-size"):
        model.stage_modules(first=True, last=False)
