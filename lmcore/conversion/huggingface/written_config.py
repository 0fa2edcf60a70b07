"""Writing of the `config.json` of Hugging Face, for an architecture that computes the same."""

from __future__ import annotations

from typing import Any

from lmcore.conversion.huggingface.saved_config import ROPE_SCALING, TRAINED_LENGTH
from lmcore.errors import CheckpointError, counted
from lmcore.model.shape import ModelShape

__all__ = ["config_of", "model_type_of"]


def model_type_of(shape: ModelShape) -> str:
    """Return the architecture of transformers that computes the same as a model of lmcore.

    Raises:
        CheckpointError: There is none.
    """
    differences = _differences(shape)
    if not differences["llama"]:
        return "qwen2" if shape.add_qkv_bias and not shape.add_bias_linear else "llama"
    if not differences["gpt2"]:
        return "gpt2"
    raise CheckpointError(
        "no supported architecture of transformers computes the same as this model",
        why="\n".join(
            f"not `{kind}`: it has {', '.join(found)}" for kind, found in differences.items()
        ),
        hint="train a model of one of these families to share it there",
    )


def _differences(shape: ModelShape) -> dict[str, list[str]]:
    """Return the features of a model that each architecture of transformers lacks."""
    positions = {"learned_absolute": "learned", "rope": "rotary", "none": "no"}
    encoding = f"{positions[shape.position_embedding_type]} positions"
    keys = counted(shape.num_query_groups, "key head")
    found = {
        "llama": {
            f"{shape.normalization} instead of RMSNorm": shape.normalization != "RMSNorm",
            "GELU instead of SwiGLU": not shape.swiglu,
            f"{encoding} instead of rotary ones": not shape.rotary,
            f"rotary positions in {shape.rotary_percent:g} of a head's channels instead of all": (
                shape.rotary and shape.rotary_percent != 1.0
            ),
        },
        "gpt2": {
            f"{shape.normalization} instead of LayerNorm": shape.normalization != "LayerNorm",
            "SwiGLU instead of GELU": shape.swiglu,
            f"{encoding} instead of learned ones": not shape.learned_positions,
            "no biases": not shape.add_bias_linear,
            f"{keys} for {shape.num_attention_heads} query heads": (
                shape.num_query_groups != shape.num_attention_heads
            ),
            f"{shape.attention_size} channels in all heads instead of {shape.hidden_size}": (
                shape.attention_size != shape.hidden_size
            ),
        },
    }
    return {kind: [what for what, there in one.items() if there] for kind, one in found.items()}


def config_of(shape: ModelShape, *, dtype: str, eos: int | None, bos: int | None) -> dict[str, Any]:
    """Return the `config.json` of a model.

    Args:
        shape: Shape of the model, with as many rows of the embedding as are written.
        dtype: Dtype of the weights.
        eos: Token that ends a text; None: the tokenizer has none.
        bos: Token that begins a text; None: the tokenizer has none.
    """
    kind = model_type_of(shape)
    common = {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "torch_dtype": dtype,
        "vocab_size": shape.padded_vocab_size,
        "initializer_range": shape.init_method_std,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "use_cache": True,
    }
    if kind == "gpt2":
        return common | {
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
    scaling = None
    if shape.rope_scaling_factor != 1.0:
        scaling = {
            "rope_type": "llama3",
            "factor": shape.rope_scaling_factor,
            "original_max_position_embeddings": TRAINED_LENGTH,
            **ROPE_SCALING,
        }
    config = common | {
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
    if kind == "llama":
        config |= {"attention_bias": shape.add_bias_linear, "mlp_bias": shape.add_bias_linear}
    return config


_CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
