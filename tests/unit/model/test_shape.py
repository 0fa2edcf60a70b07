"""Parameter counts of the published shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_states import SHAPES

from lmcore.config.derived.model_math import model_shape
from lmcore.config.preset import PRESETS
from lmcore.config.section.model import ModelSection
from lmcore.contract import OP_SPECS, OpTable
from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding
from lmcore.model.shape import ModelShape
from lmcore.model.vocabulary import pad_vocab_size

# Layers, hidden size, heads, positions, padded vocabulary -> parameters.
PUBLISHED = {
    "gpt2-124m": ((12, 768, 12, 1024, 50304), 124_475_904),
    "gpt2-345m": ((24, 1024, 16, 1024, 50304), 354_871_296),
    "gpt-1.7b": ((24, 2304, 24, 2048, 51200), 1_652_230_656),
    "gpt-3.6b": ((30, 3072, 32, 2048, 51200), 3_562_168_320),
    "gpt-7.5b": ((36, 4096, 32, 2048, 51200), 7_467_786_240),
    "gpt-18.4b": ((40, 6144, 48, 2048, 51200), 18_449_756_160),
    "gpt-39.1b": ((48, 8192, 64, 2048, 51200), 39_096_041_472),
    "gpt-76.1b": ((60, 10240, 80, 2048, 51200), 76_050_739_200),
    "gpt-145.6b": ((80, 12288, 96, 2048, 51200), 145_622_261_760),
    "gpt-310.1b": ((96, 16384, 128, 2048, 51200), 310_130_540_544),
}


def count(numbers: tuple[int, int, int, int, int]) -> int:
    """Count the parameters of a GPT that is built without memory."""
    num_layers, hidden_size, heads, positions, vocabulary = numbers
    shape = ModelShape(num_layers, hidden_size, heads, 4 * hidden_size, positions, vocabulary)
    with torch.device("meta"):
        return GPT(shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32")).parameter_count()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_count(name: str) -> None:
    """A published model has exactly the published number of parameters."""
    numbers, expected = PUBLISHED[name]
    assert count(numbers) == expected


def test_padding_is_counted() -> None:
    """The 3.6B model at vocabulary 50304 has 896 rows of 3072 less than at 51200."""
    assert count((30, 3072, 32, 2048, 50304)) == 3_559_415_808


@pytest.mark.parametrize("name", PUBLISHED)
def test_preset_has_the_published_shape(name: str) -> None:
    """The preset of a published model sets the numbers that give that count."""
    values = PRESETS[name].values
    keys = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    numbers, _ = PUBLISHED[name]
    assert tuple(values[key] for key in keys) == numbers[:4]
    assert 0 <= numbers[4] - values["vocab_size"] < 128


@pytest.mark.parametrize(
    "more",
    [
        {"hidden_dropout": 0.1},
        {"head_dim": 6, "num_query_groups": 1, "swiglu": True},
        {"normalization": "RMSNorm", "position_embedding_type": "rope", "rotary_base": 500_000},
        {"add_bias_linear": False, "untie_embeddings_and_output_weights": True},
    ],
)
def test_shape_survives_a_dictionary(more: dict[str, Any]) -> None:
    """The values of a manifest give the same shape."""
    shape = ModelShape(2, 24, 3, 40, 12, 32, **more)
    assert ModelShape(**shape.to_dict()) == shape


def test_manifest_of_a_gpt() -> None:
    """A GPT-2's manifest has no later fields, so that older versions can read it."""
    shape = ModelShape(2, 24, 3, 40, 12, 32, head_dim=8, num_query_groups=3)
    assert set(shape.to_dict()) == {
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "ffn_hidden_size",
        "max_position_embeddings",
        "padded_vocab_size",
        "layernorm_epsilon",
        "init_method_std",
        "attention_dropout",
        "hidden_dropout",
    }


def test_narrow_shape() -> None:
    """A part of every layer has a part of the heads of keys, too, and heads of the same size."""
    part = ModelShape(2, 24, 4, 40, 12, 32, head_dim=10, num_query_groups=2).narrowed(2)
    assert (part.num_attention_heads, part.num_query_groups, part.head_dim) == (2, 1, 10)
    assert (part.attention_size, part.key_size, part.hidden_size) == (20, 10, 24)


@pytest.mark.parametrize("name", SHAPES)
def test_settings_give_the_shape_again(name: str) -> None:
    """The options that `settings` returns give a run with that shape."""
    shape = SHAPES[name]
    rows = shape.padded_vocab_size
    settings = shape.settings(rows - 1)
    multiple = settings.pop("make_vocab_size_divisible_by")
    assert pad_vocab_size(rows - 1, divisible_by=multiple) == rows
    assert shape.settings(None)["make_vocab_size_divisible_by"] == rows
    assert model_shape(ModelSection(**settings), shape.padded_vocab_size) == shape
