"""Architectures of transformers: GPT-2, BLOOM, Llama, Mistral and Qwen2.  Torch-free.

GPT-2 stores the matrices of its layers transposed, [in, out]; Llama and its relatives store
queries, keys and values, and the two projections of SwiGLU, as separate tensors.  Rotary
channels are paired alike (i with i + half of the head), so that nothing is permuted.
Values come from the configuration classes of transformers (`GPT2Config`, `LlamaConfig`,
`MistralConfig`, `Qwen2Config`); values that a file leaves out have their defaults.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lmcore.base.errors import counted
from lmcore.families.gpt import bloom
from lmcore.families.layers.parameters import module_of
from lmcore.families.saved_shape import is_number
from lmcore.model.architecture import Architecture, ConfigReader, ForeignTensors
from lmcore.model.shape import ModelShape

__all__ = ["ARCHITECTURES", "ROPE_SCALING", "TRAINED_LENGTH"]

ROPE_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
TRAINED_LENGTH = 8192
"""Settings of Llama 3.1's rotary scaling, the only ones that `--use-rope-scaling` computes."""
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""Names of the tanh approximation of GELU, which `bias_gelu` computes."""
_GPT2_DROPOUT = 0.1
_HEAD = "lm_head.weight"
_OTHER_TASK = re.compile(r".*For(?!CausalLM)[A-Z].*")
"""Name of a class of transformers with another head, as `GPT2ForSequenceClassification`."""

_GPT2 = {
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "output_embedding": "lm_head",
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
}
_LLAMA = {
    "token_embedding": ("model.embed_tokens",),
    "final_norm": ("model.norm",),
    "output_embedding": ("lm_head",),
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.output": ("self_attn.o_proj",),
    "feed_forward_norm": ("post_attention_layernorm",),
    "feed_forward.up": ("mlp.gate_proj", "mlp.up_proj"),
    "feed_forward.down": ("mlp.down_proj",),
}


def _gpt2_tensors(name: str, _shape: ModelShape) -> ForeignTensors:
    layer, module, parameter = module_of(name)
    other = f"{_GPT2[module]}.{parameter}"
    if not layer:
        return ForeignTensors((other,))
    return ForeignTensors((f"transformer.h.{layer}.{other}",), transposed=True)


def _llama_tensors(name: str, shape: ModelShape) -> ForeignTensors:
    layer, module, parameter = module_of(name)
    prefix = f"model.layers.{layer}." if layer else ""
    names = tuple(f"{prefix}{other}.{parameter}" for other in _LLAMA[module])
    if len(names) == 1:
        return ForeignTensors(names)
    if module == "attention.qkv":
        return ForeignTensors(names, (shape.attention_size, shape.key_size, shape.key_size))
    return ForeignTensors(names, (shape.ffn_hidden_size,) * 2)


def _read_gpt2(reader: ConfigReader) -> dict[str, Any]:
    reader.require("activation_function", _TANH_GELU)
    reader.require("scale_attn_weights", [True])
    reader.require("scale_attn_by_inverse_layer_idx", [False])
    reader.require("add_cross_attention", [False])
    hidden = reader.get("n_embd", 768)
    if not isinstance(hidden, int):
        raise reader.unsupported(f"`n_embd` is `{hidden}`, not an integer")
    hidden_dropout = reader.get("resid_pdrop", _GPT2_DROPOUT)
    embedding_dropout = reader.get("embd_pdrop", _GPT2_DROPOUT)
    if embedding_dropout != hidden_dropout:
        reader.notes.append(
            f"the embeddings get the dropout of the layers (`resid_pdrop`, {hidden_dropout}) "
            f"instead of their own (`embd_pdrop`, {embedding_dropout}): lmcore has one for both"
        )
    return {
        "num_layers": reader.get("n_layer", 12),
        "hidden_size": hidden,
        "num_attention_heads": reader.get("n_head", 12),
        "ffn_hidden_size": reader.get("n_inner", 4 * hidden),
        "max_position_embeddings": reader.get("n_positions", 1024),
        "padded_vocab_size": reader.get("vocab_size", 50257),
        "layernorm_epsilon": reader.get("layer_norm_epsilon", 1e-5),
        "init_method_std": reader.get("initializer_range", 0.02),
        "untie_embeddings_and_output_weights": not reader.get("tie_word_embeddings", True),
        "attention_dropout": reader.get("attn_pdrop", _GPT2_DROPOUT),
        "hidden_dropout": hidden_dropout,
    }


def _read_llama(reader: ConfigReader) -> dict[str, Any]:
    attention, feed_forward = reader.get("attention_bias", False), reader.get("mlp_bias", False)
    if feed_forward and not attention:
        raise reader.unsupported("its feed-forward layers have biases, its attention has none")
    if attention and not feed_forward:
        reader.notes.append(
            "the feed-forward layers get biases of 0: lmcore has biases in attention and "
            "feed-forward layers, or in neither"
        )
        reader.zeros = r".*\.feed_forward\..*bias"
    values = _rotary_values(reader, base=10000.0, epsilon=1e-6)
    values["add_bias_linear"] = bool(attention)
    return values


def _read_mistral(reader: ConfigReader) -> dict[str, Any]:
    window = reader.config.get("sliding_window", 4096)
    length = reader.get("max_position_embeddings", 131072)
    if window is not None and isinstance(length, int) and window < length:
        reader.notes.append(
            f"attention beyond {window} tokens (`sliding_window`) is not limited in lmcore: use "
            f"sequences of at most {window} tokens"
        )
    values = _rotary_values(reader, base=10000.0, epsilon=1e-6, groups=8)
    values["add_bias_linear"] = False
    return values


def _read_qwen2(reader: ConfigReader) -> dict[str, Any]:
    reader.require("use_sliding_window", [False])
    values = _rotary_values(reader, base=10000.0, epsilon=1e-6)
    return values | {"add_bias_linear": False, "add_qkv_bias": True}


def _rotary_values(
    reader: ConfigReader, *, base: float, epsilon: float, groups: int | None = None
) -> dict[str, Any]:
    """Return the values of the shape that models with rotary positions name alike."""
    reader.require("hidden_act", ["silu", "swish"])
    required = {
        name: reader.config.get(name)
        for name in (
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "intermediate_size",
            "vocab_size",
        )
    }
    for name, value in required.items():
        if value is None:
            raise reader.unsupported(f"`{name}` is missing")
    heads = required["num_attention_heads"]
    rotary_base, factor = _rope(reader, base)
    values = {
        "num_layers": required["num_hidden_layers"],
        "hidden_size": required["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": reader.get("num_key_value_heads", groups or heads),
        "ffn_hidden_size": required["intermediate_size"],
        "max_position_embeddings": reader.get("max_position_embeddings", 2048),
        "padded_vocab_size": required["vocab_size"],
        "layernorm_epsilon": reader.get("rms_norm_eps", epsilon),
        "init_method_std": reader.get("initializer_range", 0.02),
        "normalization": "RMSNorm",
        "swiglu": True,
        "position_embedding_type": "rope",
        "rotary_base": rotary_base,
        "rope_scaling_factor": factor,
        "untie_embeddings_and_output_weights": not reader.get("tie_word_embeddings", False),
        "attention_dropout": reader.get("attention_dropout", 0.0),
        "hidden_dropout": 0.0,
    }
    if reader.config.get("head_dim") is not None:
        values["head_dim"] = reader.config["head_dim"]
    return values


def _rope(reader: ConfigReader, default_base: float) -> tuple[int, float]:
    """Return base and scaling factor of the rotary frequencies, in either form of the file.

    transformers 5 writes `rope_parameters`, earlier versions `rope_theta` and `rope_scaling`.
    """
    old = reader.get("rope_scaling", {})
    settings = reader.get("rope_parameters", old)
    if not isinstance(settings, Mapping):
        raise reader.unsupported("its rotary settings are no object")
    base = settings.get("rope_theta", reader.get("rope_theta", default_base))
    if not is_number(base) or base != int(base):
        raise reader.unsupported(f"`rope_theta` is `{base}`; lmcore takes whole numbers")
    if settings.get("partial_rotary_factor", reader.get("partial_rotary_factor", 1.0)) != 1.0:
        raise reader.unsupported("it rotates a part of each head's channels")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return int(base), 1.0
    found = {name: settings.get(name, value) for name, value in ROPE_SCALING.items()}
    length = settings.get("original_max_position_embeddings", TRAINED_LENGTH)
    if kind != "llama3" or found != ROPE_SCALING or length != TRAINED_LENGTH:
        raise reader.unsupported(
            f"its rotary scaling is `{json.dumps(dict(settings))}`; lmcore computes `llama3` with "
            f"{json.dumps(ROPE_SCALING)} and `original_max_position_embeddings` {TRAINED_LENGTH}"
        )
    factor = settings.get("factor", 8.0)
    if not is_number(factor):
        raise reader.unsupported(f"`factor` of its rotary scaling is `{factor!s:.80}`, no number")
    return int(base), float(factor)


def _llama_differences(shape: ModelShape) -> list[str]:
    found = {
        f"{shape.normalization} instead of RMSNorm": shape.normalization != "RMSNorm",
        f"{_activation(shape)} instead of SwiGLU": not shape.swiglu,
        "normalized embeddings": shape.embed_layernorm,
        f"{_positions(shape)} instead of rotary ones": not shape.rotary,
        f"rotary positions in {shape.rotary_percent:g} of a head's channels instead of all": (
            shape.rotary and shape.rotary_percent != 1.0
        ),
    }
    return [what for what, there in found.items() if there]


def _gpt2_differences(shape: ModelShape) -> list[str]:
    keys = counted(shape.num_query_groups, "key head")
    found = {
        f"{shape.normalization} instead of LayerNorm": shape.normalization != "LayerNorm",
        f"{_activation(shape)} instead of GELU": shape.gated,
        "normalized embeddings": shape.embed_layernorm,
        f"{_positions(shape)} instead of learned ones": not shape.learned_positions,
        "no biases": not shape.add_bias_linear,
        f"{keys} for {shape.num_attention_heads} query heads": (
            shape.num_query_groups != shape.num_attention_heads
        ),
        f"{shape.attention_size} channels in all heads instead of {shape.hidden_size}": (
            shape.attention_size != shape.hidden_size
        ),
    }
    return [what for what, there in found.items() if there]


def _activation(shape: ModelShape) -> str:
    return {"": "SwiGLU" if shape.swiglu else "GELU"}.get(
        shape.glu_activation, shape.glu_activation.upper()
    )


def _positions(shape: ModelShape) -> str:
    kinds = {"learned_absolute": "learned", "rope": "rotary", "alibi": "ALiBi", "none": "no"}
    return f"{kinds[shape.position_embedding_type]} positions"


def _written_gpt2(shape: ModelShape) -> dict[str, Any]:
    return {
        "activation_function": "gelu_new",
        "attn_pdrop": shape.attention_dropout,
        "embd_pdrop": shape.hidden_dropout,
        "layer_norm_epsilon": shape.layernorm_epsilon,
        "n_embd": shape.hidden_size,
        "n_head": shape.num_attention_heads,
        "n_inner": shape.ffn_hidden_size,
        "n_layer": shape.num_layers,
        "n_positions": shape.max_position_embeddings,
        "resid_pdrop": shape.hidden_dropout,
    }


def _written_rotary(shape: ModelShape) -> dict[str, Any]:
    scaling = None
    if shape.rope_scaling_factor != 1.0:
        scaling = {
            "rope_type": "llama3",
            "factor": shape.rope_scaling_factor,
            "original_max_position_embeddings": TRAINED_LENGTH,
            **ROPE_SCALING,
        }
    return {
        "attention_dropout": shape.attention_dropout,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_query_groups,
        "rms_norm_eps": shape.layernorm_epsilon,
        "rope_scaling": scaling,
        "rope_theta": float(shape.rotary_base),
    }


def _written_llama(shape: ModelShape) -> dict[str, Any]:
    biases = {"attention_bias": shape.add_bias_linear, "mlp_bias": shape.add_bias_linear}
    return _written_rotary(shape) | biases


def _bare(name: str) -> tuple[str, ...]:
    """Return the names with and without the prefix, which files without a head lack."""
    prefix = next((one for one in ("transformer.", "model.") if name.startswith(one)), "")
    return (name, name.removeprefix(prefix))


def _qkv_biases_only(shape: ModelShape) -> bool:
    return shape.add_qkv_bias and not shape.add_bias_linear


_LLAMA_TYPE = Architecture(
    "llama",
    read=_read_llama,
    tensors=_llama_tensors,
    write=_written_llama,
    differences=lambda shape: [
        *_llama_differences(shape),
        *(["biases of queries, keys and values alone"] if _qkv_biases_only(shape) else []),
    ],
    class_name=lambda _shape: "LlamaForCausalLM",
    other_classes=_OTHER_TASK,
    purpose="a model for causal language modelling",
    head=_HEAD,
    copies={_HEAD: "model.embed_tokens.weight"},
    spellings=_bare,
    buffers=re.compile(r"(?:model\.)?(?:layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
)
ARCHITECTURES = (
    _LLAMA_TYPE,
    replace(
        _LLAMA_TYPE,
        model_type="qwen2",
        read=_read_qwen2,
        write=_written_rotary,
        differences=lambda shape: [
            *_llama_differences(shape),
            *([] if _qkv_biases_only(shape) else ["other biases than of queries, keys and values"]),
        ],
        class_name=lambda _shape: "Qwen2ForCausalLM",
    ),
    replace(_LLAMA_TYPE, model_type="mistral", read=_read_mistral, differences=None),
    replace(
        _LLAMA_TYPE,
        model_type="gpt2",
        read=_read_gpt2,
        tensors=_gpt2_tensors,
        write=_written_gpt2,
        differences=_gpt2_differences,
        class_name=lambda _shape: "GPT2LMHeadModel",
        copies={_HEAD: "transformer.wte.weight"},
        buffers=re.compile(r"(?:transformer\.)?h\.\d+\.attn\.(?:bias|masked_bias)"),
    ),
    replace(
        _LLAMA_TYPE,
        model_type="bloom",
        read=bloom.read,
        tensors=bloom.tensors,
        write=bloom.write,
        differences=bloom.differences,
        class_name=lambda _shape: "BloomForCausalLM",
        copies={_HEAD: bloom.EMBEDDING},
        buffers=re.compile(r"(?!)"),
    ),
)
