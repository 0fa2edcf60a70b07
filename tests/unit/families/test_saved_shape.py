"""Tests of the shape of a model that a checkpoint names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmcore.base.errors import CheckpointError, LmcoreError
from lmcore.families.saved_shape import read_shape

VALUES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 3,
    "ffn_hidden_size": 40,
    "max_position_embeddings": 32,
    "padded_vocab_size": 384,
    "layernorm_epsilon": 1e-5,
    "init_method_std": 0.3,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


class TestShape:
    """`read_shape`."""

    def test_right(self) -> None:
        """A saved shape is read back."""
        assert read_shape(VALUES, Path("x")).to_dict() == VALUES

    @pytest.mark.parametrize(
        "change,expected",
        [
            ({"num_layers": 0}, "from 1 to"),
            ({"num_layers": 10_001}, "from 1 to"),
            ({"num_layers": 2.0}, "not an integer"),
            ({"num_layers": True}, "not an integer"),
            ({"num_layers": "2"}, "not an integer"),
            ({"hidden_size": 2**25}, "from 1 to"),
            ({"padded_vocab_size": -1}, "from 1 to"),
            ({"num_attention_heads": 5}, "not divisible"),
            ({"layernorm_epsilon": 0.0}, "not above 0"),
            ({"layernorm_epsilon": None}, "not a finite number"),
            ({"init_method_std": float("inf")}, "not a finite number"),
            ({"init_method_std": float("nan")}, "not a finite number"),
            ({"hidden_dropout": 1.0}, "not a probability"),
            ({"attention_dropout": -0.1}, "not a probability"),
            ({"experts": 8}, "unknown to this version"),
            ({"normalization": "BatchNorm"}, "not one of"),
            ({"normalization": 1}, "not a string"),
            ({"position_embedding_type": "mrope"}, "not one of"),
            ({"swiglu": 1}, "not true or false"),
            ({"add_bias_linear": "no"}, "not true or false"),
            ({"num_query_groups": 2}, "not divisible by num_query_groups 2"),
            ({"num_query_groups": 0}, "from 1 to"),
            ({"head_dim": 2**25}, "from 1 to"),
            ({"rotary_percent": 1.5}, "not in (0, 1]"),
            ({"rope_scaling_factor": 0.0}, "not above 0"),
            ({"position_embedding_type": "rope", "head_dim": 5}, "cannot be rotated"),
        ],
    )
    def test_wrong(self, change: dict[str, Any], expected: str) -> None:
        """A value out of bounds or of the wrong type is named with what is allowed."""
        with pytest.raises(CheckpointError, match="cannot be built") as caught:
            read_shape(VALUES | change, Path("x"))
        assert expected in str(caught.value.why)

    @pytest.mark.parametrize("name", VALUES)
    def test_missing(self, name: str) -> None:
        """Every value must be there."""
        values = {key: value for key, value in VALUES.items() if key != name}
        with pytest.raises(LmcoreError, match=f"lacks `{name}`"):
            read_shape(values, Path("x"))

    def test_own_values(self) -> None:
        """Values that only one family has are read back; an unknown choice is named."""
        own = {"bert_gelu": "erf", "bert_binary_head": True, "bert_post_norm": False}
        values = VALUES | {"model_family": "bert", "bert_token_types": 2} | own
        assert read_shape(values, Path("x")).to_dict() == values
        with pytest.raises(CheckpointError) as caught:
            read_shape(values | {"bert_gelu": "exact"}, Path("x"))
        assert "`bert_gelu` is `exact`, not one of" in str(caught.value.why)

    def test_task(self) -> None:
        """A shape with a head for a task is read back; an unknown task is named."""
        values = VALUES | {"task": "classification", "num_labels": 3}
        assert read_shape(values, Path("x")).to_dict() == values
        with pytest.raises(CheckpointError) as caught:
            read_shape(values | {"task": "tagging"}, Path("x"))
        assert "`task` is `tagging`, not one of" in str(caught.value.why)
