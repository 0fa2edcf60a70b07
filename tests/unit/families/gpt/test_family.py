"""Tests of the names and shapes of parameters, beside models that were built."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from lmcore.contract import OP_SPECS, OpTable
from lmcore.families.build import create_model
from lmcore.families.op_binding import OpBinding
from lmcore.model.family import parameter_shapes
from lmcore.model.shape import ModelShape

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=3,
    ffn_hidden_size=40,
    max_position_embeddings=12,
    padded_vocab_size=32,
)


def test_names_order_and_shapes_are_the_models() -> None:
    ops = OpBinding(OpTable(OP_SPECS), "cpu", "float32")
    choices = {
        "normalization": ("LayerNorm", "RMSNorm"),
        "swiglu": (False, True),
        "position_embedding_type": ("learned_absolute", "rope", "none"),
        "untie_embeddings_and_output_weights": (False, True),
        "add_bias_linear": (False, True),
        "add_qkv_bias": (False, True),
    }
    for values in itertools.product(*choices.values()):
        shape = replace(SHAPE, **dict(zip(choices, values, strict=True)))
        with torch.device("meta"):
            model = create_model(shape, ops)
        found = {name: tuple(one.shape) for name, one in model.named_parameters()}
        assert parameter_shapes(shape) == found
    grouped = replace(SHAPE, num_attention_heads=4, num_query_groups=2, head_dim=10)
    with torch.device("meta"):
        model = create_model(grouped, ops)
    assert parameter_shapes(grouped) == {n: tuple(p.shape) for n, p in model.named_parameters()}
