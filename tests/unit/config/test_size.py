"""Sizes and arithmetic of a model, against published figures."""

from __future__ import annotations

import math

import pytest

from lmcore.config.section.model import ModelSection
from lmcore.config.size import flops_per_step, padded_vocabulary, parameter_count


def gpt(l: int, h: int, a: int, s: int, **more: int) -> ModelSection:  # noqa: E741 - the formula's
    return ModelSection(num_layers=l, hidden_size=h, num_attention_heads=a, seq_length=s, **more)


def test_padded_vocabulary() -> None:
    """GPT-2's 50257 tokens become 50304 alone and 51200 over 8 devices."""
    assert padded_vocabulary(50257, divisible_by=128) == 50304
    assert padded_vocabulary(50257, divisible_by=128, tensor_parallel_size=8) == 51200
    assert padded_vocabulary(50304, divisible_by=128) == 50304


@pytest.mark.parametrize(
    "model,vocabulary,expected",
    [
        (gpt(24, 1024, 16, 1024), 50304, 354_871_296),
        (gpt(30, 3072, 32, 2048), 50304, 3_559_415_808),
        # by hand: (5+3)*2 + [4*4+8 + 2*2*6+6+2 + 8] + 4 = 16 + 64 + 4
        (gpt(1, 2, 1, 3, ffn_hidden_size=6), 5, 84),
        (gpt(1, 2, 1, 3, ffn_hidden_size=6, max_position_embeddings=10), 5, 98),
    ],
)
def test_parameter_count(model: ModelSection, vocabulary: int, expected: int) -> None:
    """Parameters are counted exactly, with any feed-forward width and number of positions."""
    assert parameter_count(model, vocabulary) == expected


@pytest.mark.parametrize("recompute,factor,divisor", [(False, 72, 12), (True, 96, 16)])
def test_flops_formula(recompute: bool, factor: int, divisor: int) -> None:
    """With a width of 4h the count equals both published formulas."""
    l, h, s, vocabulary, batch = 24, 2304, 2048, 51200, 512  # noqa: E741
    formula = factor * batch * s * l * h**2 * (1 + s / (6 * h) + vocabulary / (divisor * l * h))
    found = flops_per_step(gpt(l, h, 24, s), vocabulary, batch, recompute=recompute)
    assert math.isclose(found, formula, rel_tol=1e-12)


def test_flops_of_gpt3() -> None:
    """GPT-3 175B with full recomputation: 4.511e18 an iteration, 138 TFLOP/s on 1024 devices."""
    flops = flops_per_step(gpt(96, 12288, 96, 2048), 51200, 1536, recompute=True)
    assert f"{flops:.3e}" == "4.511e+18"
    assert round(flops / 32 / 1024 / 1e12) == 138
