"""Split parameters, and the number of parameters on each rank."""

from __future__ import annotations

import math

import pytest
import torch

from lmcore.contract import OP_SPECS, OpTable
from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding
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
BILLIONS = ModelShape(
    num_layers=36,
    hidden_size=4096,
    num_attention_heads=32,
    ffn_hidden_size=4 * 4096,
    max_position_embeddings=2048,
    padded_vocab_size=51200,
)
"""The 7.5B model of the Megatron-LM paper."""


def on_no_device(shape: ModelShape) -> GPT:
    with torch.device("meta"):
        return GPT(shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32"))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_layouts_are_of_the_whole_model(size: int) -> None:
    """Parts have the whole model's names and shapes, and together its elements."""
    whole = {name: tuple(one.shape) for name, one in on_no_device(SHAPE).named_parameters()}
    held = dict.fromkeys(whole, 0)
    for rank in range(size):
        part = on_no_device(SHAPE.narrowed(size))
        layouts = tensor_layouts(part, Axis(rank, size, tuple(range(size)), None))
        assert {name: layout.shape for name, layout in layouts.items()} == whole
        for name, parameter in part.named_parameters():
            held[name] += sum(math.prod(piece.size) for piece in layouts[name].chunks)
            assert parameter.numel() * size >= math.prod(whole[name])
    for name, shape in whole.items():
        assert held[name] in {math.prod(shape), size * math.prod(shape)}, name


def test_replicated_parameters() -> None:
    """Norms, positions and the biases that are added to sums are whole everywhere."""
    layouts = tensor_layouts(on_no_device(SHAPE.narrowed(2)), Axis(0, 2, (0, 1), None))
    part = dict(on_no_device(SHAPE.narrowed(2)).named_parameters())
    whole = {name for name, one in layouts.items() if one.shape == tuple(part[name].shape)}
    of_layers = {name.split(".", 2)[2] for name in whole if name.startswith("blocks.")}
    assert {name for name in whole if not name.startswith("blocks.")} == {
        "position_embedding.weight",
        "final_norm.weight",
        "final_norm.bias",
    }
    assert of_layers == {
        "attention_norm.weight",
        "attention_norm.bias",
        "attention.output_bias",
        "feed_forward_norm.weight",
        "feed_forward_norm.bias",
        "feed_forward.down_bias",
    }


def test_published_count() -> None:
    """Each of 8 ranks has as many parameters of the 7.5B model as a published log says."""
    assert on_no_device(BILLIONS.narrowed(8)).parameter_count() == 941_594_624
