"""Presets: published shapes by name."""

from __future__ import annotations

import pytest

from lmcore.config.derived.model_math import model_shape
from lmcore.config.load import load_config
from lmcore.config.preset import PRESETS
from lmcore.config.section import run_options
from lmcore.model.family import parameters_of
from lmcore.model.parameters import parameter_count
from lmcore.model.vocabulary import pad_vocab_size

# l, h, a, vocabulary, parameters: the published table, and GPT-2 by hand
TABLE = [
    ("gpt2-124m", 12, 768, 12, 50304, 124_475_904),
    ("gpt2-345m", 24, 1024, 16, 50304, 354_871_296),
    ("llama-1b", 22, 2048, 32, 32000, 1_100_048_384),
    # with two segments and both heads; the originals have 30522 rows: 70 x 769 or 1025 fewer
    ("bert-base", 12, 768, 12, 30592, 110_106_428 + 70 * 769),
    ("bert-large", 24, 1024, 16, 30592, 336_226_108 + 70 * 1025),
    ("bert-345m", 24, 1024, 16, 30592, 336_297_858),
    ("t5-small", 6, 512, 8, 32128, 60_506_624),
    ("t5-base", 12, 768, 12, 32128, 222_903_552),
    ("t5-1.1-small", 8, 512, 6, 32128, 76_961_152),
    # a GPT's 32 layers, 2 of the encoder, and cross-attention in one of these and in 9, 12, ..., 30
    (
        *("retro-2b", 32, 2048, 32, 50304),
        34 * (12 * 2048**2 + 13 * 2048) + (50304 + 2048 + 2) * 2048 + 9 * (4 * 2048**2 + 6 * 2048),
    ),
    ("gpt-1.7b", 24, 2304, 24, 51200, 1_652_230_656),
    ("gpt-3.6b", 30, 3072, 32, 51200, 3_562_168_320),
    ("gpt-7.5b", 36, 4096, 32, 51200, 7_467_786_240),
    ("gpt-18.4b", 40, 6144, 48, 51200, 18_449_756_160),
    ("gpt-39.1b", 48, 8192, 64, 51200, 39_096_041_472),
    ("gpt-76.1b", 60, 10240, 80, 51200, 76_050_739_200),
    ("gpt-145.6b", 80, 12288, 96, 51200, 145_622_261_760),
    ("gpt-310.1b", 96, 16384, 128, 51200, 310_130_540_544),
]


@pytest.mark.parametrize("name,layers,hidden,heads,vocabulary,parameters", TABLE)
def test_published_table(
    name: str, layers: int, hidden: int, heads: int, vocabulary: int, parameters: int
) -> None:
    """Each preset has the published shape and exactly the published number of parameters."""
    config = load_config(["--preset", name]).config
    model = config.model
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (
        layers,
        hidden,
        heads,
    )
    assert model.seq_length == model.max_position_embeddings
    padded = pad_vocab_size(config.data.vocab_size or 0, divisible_by=128)
    assert padded == vocabulary
    assert parameter_count(parameters_of(model_shape(model, padded, config))) == parameters


def test_table_is_complete() -> None:
    """No preset is untested, and each says what it is and where it comes from."""
    assert [row[0] for row in TABLE] == list(PRESETS)
    for preset in PRESETS.values():
        assert preset.summary
        assert preset.source
        assert set(preset.values) <= set(run_options())
