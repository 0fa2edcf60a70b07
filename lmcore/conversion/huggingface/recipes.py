"""Tensor names of transformers' models, as recipes for the tensors of lmcore.

GPT-2 stores the matrices of its layers transposed, [in, out]; Llama and its relatives store
queries, keys and values, and the two projections of SwiGLU, as separate tensors.  Rotary
channels are paired alike (i with i + half of the head), so that nothing is permuted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lmcore.conversion.recipe import Recipe, same, stacked, transposed
from lmcore.model.parameters import parameter_shapes
from lmcore.model.shape import ModelShape

__all__ = ["UNUSED", "recipes_of"]

UNUSED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Suffixes of buffers in files of older versions, which a model computes by itself."""

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
_BIAS = "_bias"
"""Suffix of biases in lmcore that a later op adds."""


def recipes_of(
    model_type: str, shape: ModelShape, *, attention_bias_only: bool = False
) -> dict[str, Recipe]:
    """Return the recipe of each parameter of lmcore, by its name.

    Args:
        model_type: Architecture of transformers.
        shape: Shape of the model.
        attention_bias_only: True if the other format has no biases in its feed-forward layers.
    """
    recipe: Callable[[str, tuple[int, ...], ModelShape], Recipe]
    recipe = _gpt2 if model_type == "gpt2" else _llama
    found = {}
    for name, size in parameter_shapes(shape).items():
        biased = ".feed_forward." in name and name.endswith("bias")
        found[name] = _zeros(size) if attention_bias_only and biased else recipe(name, size, shape)
    return found


def _zeros(size: tuple[int, ...]) -> Recipe:
    """Return the recipe of a tensor of zeros, which the other format lacks."""

    def none(_tensor: Tensor) -> Sequence[Tensor]:
        raise AssertionError("this recipe reads only")

    return Recipe({}, lambda _parts: torch.zeros(size), none)


def _parts(name: str) -> tuple[str, str, str]:
    """Return layer number (empty outside the layers), module and parameter of a name."""
    prefix = ""
    if name.startswith("blocks."):
        _, number, name = name.split(".", 2)
        prefix = number
    module, _, parameter = name.rpartition(".")
    if parameter.endswith(_BIAS):
        return prefix, f"{module}.{parameter.removesuffix(_BIAS)}", "bias"
    return prefix, module, parameter


def _gpt2(name: str, size: tuple[int, ...], _shape: ModelShape) -> Recipe:
    layer, module, parameter = _parts(name)
    other = f"{_GPT2[module]}.{parameter}"
    if not layer:
        return same(other, size)
    return transposed(f"transformer.h.{layer}.{other}", size)


def _llama(name: str, size: tuple[int, ...], shape: ModelShape) -> Recipe:
    layer, module, parameter = _parts(name)
    prefix = f"model.layers.{layer}." if layer else ""
    names = [f"{prefix}{other}.{parameter}" for other in _LLAMA[module]]
    if len(names) == 1:
        return same(names[0], size)
    if module == "attention.qkv":
        rows = [shape.attention_size, shape.key_size, shape.key_size]
    else:
        rows = [shape.ffn_hidden_size] * 2
    return stacked(names, rows, size)
