"""Shape of a model from settings."""

from __future__ import annotations

import pytest

from lmcore.config.derived.model_math import ffn_hidden_size
from lmcore.config.section.model import ModelSection


@pytest.mark.parametrize("hidden,expected", [(4096, 10880), (2048, 5440), (32, 64)])
def test_width_of_a_gate(hidden: int, expected: int) -> None:
    """With SwiGLU the width is Megatron's int(4h * 2/3 / 64) * 64."""
    assert (
        ffn_hidden_size(
            ModelSection(num_layers=1, hidden_size=hidden, num_attention_heads=1, swiglu=True)
        )
        == expected
    )
