"""Parameters and FLOPs of GPT and Llama, against published figures."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from lmcore.config.derived.model_math import model_shape
from lmcore.config.load import load_config
from lmcore.config.section.model import ModelSection
from lmcore.families.gpt.family import forward_flops, parameters
from lmcore.model.parameters import parameter_count


def gpt(l: int, h: int, a: int, s: int, **more: Any) -> ModelSection:  # noqa: E741 - the formula's
    return ModelSection(num_layers=l, hidden_size=h, num_attention_heads=a, seq_length=s, **more)


def flops_per_step(
    model: ModelSection, vocabulary: int, batch: int, *, recompute: bool = False
) -> int:
    """Return the FLOPs of a step."""
    forward = forward_flops(model_shape(model, vocabulary), model.seq_length)
    return batch * forward.of_training(recompute=recompute)


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
    assert parameter_count(parameters(model_shape(model, vocabulary))) == expected


BLOOM = {"position_embedding_type": "alibi", "embed_layernorm": True}
EXAMPLE = Path(__file__).parents[4] / "examples/bigscience_deepspeed/bloom-176b.yaml"


@pytest.mark.parametrize(
    "model,expected",
    [
        # The published BLOOM 560M and 176B.
        (gpt(24, 1024, 16, 2048, **BLOOM), 559_214_592),
        (gpt(70, 14336, 112, 2048, **BLOOM), 176_247_271_424),
        (load_config([str(EXAMPLE)]).config.model, 176_247_271_424),
    ],
    ids=["560m", "176b", "example"],
)
def test_bloom_parameter_count(model: ModelSection, expected: int) -> None:
    """Published counts of BLOOM are met exactly, by the settings of the example too."""
    assert parameter_count(parameters(model_shape(model, 250880))) == expected


@pytest.mark.parametrize("gate", ["geglu", "liglu", "reglu", "swiglu"])
def test_gates_are_as_wide_as_the_layer(gate: str) -> None:
    """The default width is 4 * hidden size, to which the gate is added, as in BigScience's fork."""
    plain, gated = (model_shape(gpt(1, 64, 4, 16, glu_activation=one), 128) for one in (None, gate))
    assert gated.ffn_hidden_size == plain.ffn_hidden_size == 256
    more = 256 * 64 + 256
    assert parameter_count(parameters(gated)) - parameter_count(parameters(plain)) == more
    operations = forward_flops(gated, 16).layers - forward_flops(plain, 16).layers
    assert operations == 2 * 16 * 64 * 256


LLAMA = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "add_bias_linear": False,
}


@pytest.mark.parametrize(
    "model,vocabulary,expected",
    [
        # The published Llama 2 7B and TinyLlama 1.1B, and the embedding and head of Llama 3.1 8B.
        (gpt(32, 4096, 32, 4096, **LLAMA, ffn_hidden_size=11008), 32000, 6_738_415_616),
        (
            gpt(
                22,
                2048,
                32,
                2048,
                **LLAMA,
                ffn_hidden_size=5632,
                group_query_attention=True,
                num_query_groups=4,
            ),
            32000,
            1_100_048_384,
        ),
        (
            gpt(
                32,
                4096,
                32,
                8192,
                **LLAMA,
                ffn_hidden_size=14336,
                group_query_attention=True,
                num_query_groups=8,
            ),
            128256,
            8_030_261_248,
        ),
        # by hand: 5*2 + [2*(6+3+3)+12 + 6*2 + 2*12+12 + 6*2+2 + 2] + 2, no positions and one group
        (
            gpt(
                1,
                2,
                2,
                3,
                ffn_hidden_size=6,
                kv_channels=3,
                group_query_attention=True,
                swiglu=True,
                position_embedding_type="none",
                normalization="RMSNorm",
            ),
            5,
            10 + (2 * 12 + 12 + 6 * 2 + 2) + (2 * 12 + 12 + 6 * 2 + 2) + 2 * 2 + 2,
        ),
    ],
)
def test_parameter_count_of_llamas(model: ModelSection, vocabulary: int, expected: int) -> None:
    """Gates, groups, wide heads, missing biases and an untied head are counted."""
    assert parameter_count(parameters(model_shape(model, vocabulary))) == expected


def test_flops_of_a_llama() -> None:
    """Megatron's formula: 12 B s l h^2 (1 + k/a + s/h + 3f/2h) and 6 B s h V for the head."""
    l, h, a, k, f, s, v, batch = 22, 2048, 32, 4, 5632, 4096, 32000, 8  # noqa: E741
    model = gpt(
        l, h, a, s, **LLAMA, ffn_hidden_size=f, group_query_attention=True, num_query_groups=k
    )
    formula = 12 * batch * s * l * h**2 * (1 + k / a + s / h + 1.5 * f / h) + 6 * batch * s * h * v
    assert math.isclose(flops_per_step(model, v, batch), formula, rel_tol=1e-12)
    # With heads of twice the channels all of attention is twice as much.
    wide = dataclasses.replace(model, kv_channels=128)
    more = 12 * batch * s * l * h**2 * (1 + k / a + s / h)
    assert math.isclose(flops_per_step(wide, v, batch), formula + more, rel_tol=1e-12)


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
