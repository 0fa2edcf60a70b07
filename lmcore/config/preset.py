"""Named models: `--preset NAME` sets a published shape and a learning rate that suits its size.

A preset overrides defaults; files and flags override a preset.
Source: shapes of the large models: Narayanan et al. 2021, table 1; their learning rates: the next
larger model of Brown et al. 2020, table 2.1 (the largest there, for models beyond it); shape and
rate of `llama-1b`: Zhang et al. 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmcore.config.option import Option

__all__ = ["PRESETS", "PRESET_OPTION", "Preset"]


@dataclass(frozen=True)
class Preset:
    """A named model.

    Attributes:
        name: The value of `--preset`.
        summary: Shape of the model, one line.
        values: Values by option name.
        source: Publication that the values come from.
    """

    name: str
    summary: str
    values: Mapping[str, Any]
    source: str


def _gpt(
    name: str,
    shape: tuple[int, int, int],
    *,
    seq_length: int,
    vocab_size: int,
    lr: float,
    source: str,
) -> Preset:
    num_layers, hidden_size, num_attention_heads = shape
    heads = f"{num_attention_heads} heads"
    summary = f"{num_layers} layers, hidden {hidden_size}, {heads}, sequence {seq_length}"
    values = {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "seq_length": seq_length,
        "max_position_embeddings": seq_length,
        "vocab_size": vocab_size,
        "lr": lr,
        "min_lr": float(f"{lr / 10:.3g}"),
        "lr_warmup_fraction": 0.01,
    }
    return Preset(name, summary, values, source)


_GPT2 = "GPT-2 (Radford et al. 2019)"
_TABLE = "Megatron-LM scaling table (Narayanan et al. 2021)"

_LARGE: tuple[tuple[str, tuple[int, int, int], float], ...] = (
    ("1.7b", (24, 2304, 24), 1.6e-4),
    ("3.6b", (30, 3072, 32), 1.2e-4),
    ("7.5b", (36, 4096, 32), 1.0e-4),
    ("18.4b", (40, 6144, 48), 0.6e-4),
    ("39.1b", (48, 8192, 64), 0.6e-4),
    ("76.1b", (60, 10240, 80), 0.6e-4),
    ("145.6b", (80, 12288, 96), 0.6e-4),
    ("310.1b", (96, 16384, 128), 0.6e-4),
)


_LLAMA_1B: Mapping[str, Any] = {
    "num_layers": 22,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "group_query_attention": True,
    "num_query_groups": 4,
    "ffn_hidden_size": 5632,
    "swiglu": True,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-5,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "untie_embeddings_and_output_weights": True,
    "add_bias_linear": False,
    "seq_length": 4096,
    "max_position_embeddings": 4096,
    "vocab_size": 32000,
    "lr": 4e-4,
    "min_lr": 4e-5,
    "lr_warmup_fraction": 0.01,
}


def _bert(
    name: str, shape: tuple[int, int, int], own: Mapping[str, Any], *, kind: str, source: str
) -> Preset:
    base = _gpt(name, shape, seq_length=512, vocab_size=30522, lr=1e-4, source=source)
    values = {"model_family": "bert", **base.values, **own}
    return Preset(name, f"a BERT, {kind}: {base.summary}", values, source)


_ORIGINAL = {"bert_post_norm": True, "bert_gelu": "erf", "layernorm_epsilon": 1e-12}
_DEVLIN = "BERT (Devlin et al. 2018)"
_SHOEYBI = "Megatron-LM (Shoeybi et al. 2019)"


_T5: Mapping[str, Any] = {
    "model_family": "t5",
    "seq_length": 512,
    "max_position_embeddings": 512,
    "decoder_seq_length": 128,
    "position_embedding_type": "relative",
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-6,
    "add_bias_linear": False,
    "t5_scaled_attention": False,
    "t5_head_bias": False,
    "kv_channels": 64,
    "vocab_size": 32128,
    "lr": 1e-4,
    "min_lr": 1e-5,
    "lr_warmup_fraction": 0.01,
}
_ORIGINAL_T5 = {"t5_feed_forward": "relu", "t5_scaled_head": True}
_LATER_T5 = {"t5_feed_forward": "gated-gelu", "untie_embeddings_and_output_weights": True}
_RAFFEL = "T5 (Raffel et al. 2020); learning rate of Megatron-LM's example"


def _t5(name: str, sizes: tuple[int, int, int, int], own: Mapping[str, Any], kind: str) -> Preset:
    layers, hidden, heads, width = sizes
    values = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": width,
    }
    summary = f"a T5, {kind}: {layers} layers twice, hidden {hidden}, {heads} heads, sequence 512"
    return Preset(name, summary, {**_T5, **values, **own}, _RAFFEL)


def _all_presets() -> tuple[Preset, ...]:
    small = (
        _gpt(
            "gpt2-124m",
            (12, 768, 12),
            seq_length=1024,
            vocab_size=50257,
            lr=6e-4,
            source=_GPT2,
        ),
        _gpt(
            "gpt2-345m",
            (24, 1024, 16),
            seq_length=1024,
            vocab_size=50257,
            lr=1.5e-4,
            source=f"{_GPT2}; learning rate of Megatron-LM's example",
        ),
    )
    large = (
        _gpt(f"gpt-{name}", shape, seq_length=2048, vocab_size=51200, lr=lr, source=_TABLE)
        for name, shape, lr in _LARGE
    )
    llama = Preset(
        "llama-1b",
        "a Llama: 22 layers, hidden 2048, 32 heads, sequence 4096",
        _LLAMA_1B,
        "TinyLlama (Zhang et al. 2024) with twice its sequence",
    )
    bert = (
        _bert("bert-base", (12, 768, 12), _ORIGINAL, kind="post-norm", source=_DEVLIN),
        _bert("bert-large", (24, 1024, 16), _ORIGINAL, kind="post-norm", source=_DEVLIN),
        _bert("bert-345m", (24, 1024, 16), {}, kind="pre-norm", source=_SHOEYBI),
    )
    t5 = (
        _t5("t5-small", (6, 512, 8, 2048), _ORIGINAL_T5, "the original"),
        _t5("t5-base", (12, 768, 12, 3072), _ORIGINAL_T5, "the original"),
        _t5("t5-1.1-small", (8, 512, 6, 1024), _LATER_T5, "version 1.1"),
    )
    plain = _gpt("", (32, 2048, 32), seq_length=2048, vocab_size=50257, lr=6e-4, source="")
    retro = Preset(
        "retro-2b",
        f"a Retro: {plain.summary}, chunks of 64 tokens with 2 neighbours",
        {
            "model_family": "retro",
            **plain.values,
            "retro_chunk_length": 64,
            "retro_num_neighbors": 2,
            "retro_num_retrieved_chunks": 2,
            "retro_encoder_layers": 2,
        },
        "Megatron-LM's example of Retro",
    )
    return (*small, llama, *bert, *t5, retro, *large)


PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _all_presets()}

PRESET_OPTION = Option(
    name="preset",
    section="",
    type=str,
    repeated=False,
    optional=True,
    default=None,
    help="Named model to start from; files and flags override its values.",
    choices=tuple(PRESETS),
    metavar="NAME",
)
"""The option `--preset`, which sets other options and is none of a section."""
