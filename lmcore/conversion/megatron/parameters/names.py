"""Names of Megatron's parameters, in megatron-core and in the models before it.

megatron-core has two sets.  By default a projection holds the weight of the norm before it; the
layers of `--transformer-impl local` have separate norms.
"""

from __future__ import annotations

import re

__all__ = ["STYLES", "TIED", "UNUSED", "foreign_name", "parameter_of"]

TIED = "tied"
"""Result of `parameter_of` for the last stage's copy of the token embedding."""
UNUSED = "unused"
"""Result of `parameter_of` for values that the model of lmcore computes or does not need."""

_PREFIX = re.compile(r"^(module\.)*(language_model\.)?")
_LAYER = re.compile(r"^(?:encoder|decoder|transformer)\.layers\.(\d+)\.(.+)$")
_OUTSIDE = {
    "embedding.word_embeddings": "token_embedding",
    "embedding.position_embeddings": "position_embedding",
    "output_layer": "output_embedding",
    **{
        f"{stack}.{norm}": "final_norm"
        for stack in ("encoder", "decoder", "transformer")
        for norm in ("final_layernorm", "final_norm")
    },
}
_MODULES = {
    "input_layernorm": "attention_norm",
    "input_norm": "attention_norm",
    "query_key_value": "attention.qkv",
    "linear_qkv": "attention.qkv",
    "dense": "attention.output",
    "linear_proj": "attention.output",
    "post_attention_layernorm": "feed_forward_norm",
    "post_attention_norm": "feed_forward_norm",
    "pre_mlp_layernorm": "feed_forward_norm",
    "dense_h_to_4h": "feed_forward.up",
    "linear_fc1": "feed_forward.up",
    "dense_4h_to_h": "feed_forward.down",
    "linear_fc2": "feed_forward.down",
}
_ATTENTION = ("attention.", "self_attention.")
_FEED_FORWARD = ("mlp.",)
_NORM_INSIDE = {"layer_norm_weight": "weight", "layer_norm_bias": "bias"}
_UNUSED_ENDINGS = ("_extra_state", ".inv_freq", "attention.bias", "attention.masked_bias")

STYLES = ("core", "core-local", "legacy")
"""Sets of names that can be written."""
_CORE = {
    "token_embedding": "embedding.word_embeddings",
    "position_embedding": "embedding.position_embeddings",
    "final_norm": "decoder.final_layernorm",
    "output_embedding": "output_layer",
    "attention_norm": "input_layernorm",
    "attention.qkv": "self_attention.linear_qkv",
    "attention.output": "self_attention.linear_proj",
    "feed_forward_norm": "pre_mlp_layernorm",
    "feed_forward.up": "mlp.linear_fc1",
    "feed_forward.down": "mlp.linear_fc2",
}
_LEGACY = {
    "token_embedding": "language_model.embedding.word_embeddings",
    "position_embedding": "language_model.embedding.position_embeddings",
    "final_norm": "language_model.encoder.final_norm",
    "output_embedding": "language_model.output_layer",
    "attention_norm": "input_norm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.output": "self_attention.dense",
    "feed_forward_norm": "post_attention_norm",
    "feed_forward.up": "mlp.dense_h_to_4h",
    "feed_forward.down": "mlp.dense_4h_to_h",
}


def parameter_of(name: str, *, swiglu: bool) -> str | None:
    """Return lmcore's name of a parameter; `TIED` or `UNUSED`; None if it is unknown.

    Layers keep the number that they have in *name*.

    Args:
        name: Name in Megatron, of any of its versions.
        swiglu: True if the feed-forward layers are gated; it changes the name of their bias.
    """
    if name.endswith(_UNUSED_ENDINGS):
        return UNUSED
    name = _PREFIX.sub("", name)
    if name in {"word_embeddings_for_head.weight", "word_embeddings.weight"}:
        return TIED
    layer = _LAYER.match(name)
    if layer is None:
        module, _, parameter = name.rpartition(".")
        known = _OUTSIDE.get(module)
        norm = known == "final_norm" and parameter == "bias"
        return f"{known}.{parameter}" if known and (parameter == "weight" or norm) else None
    inside = _in_layer(layer[2], swiglu=swiglu)
    return None if inside is None else f"blocks.{layer[1]}.{inside}"


def _in_layer(name: str, *, swiglu: bool) -> str | None:
    module, _, parameter = name.rpartition(".")
    owner, _, last = module.rpartition(".")
    ours = _MODULES.get(last)
    if ours is None:
        return None
    if parameter in _NORM_INSIDE:
        norm = {"attention.qkv": "attention_norm", "feed_forward.up": "feed_forward_norm"}.get(ours)
        return None if norm is None else f"{norm}.{_NORM_INSIDE[parameter]}"
    owners = _ATTENTION if ours.startswith("attention.") else _FEED_FORWARD
    if ours.endswith("_norm"):
        owners = ("",)
    if f"{owner}." not in owners and owner not in owners:
        return None
    if parameter not in {"weight", "bias"}:
        return None
    return f"{ours}{_suffix(ours, swiglu=swiglu) if parameter == 'bias' else '.weight'}"


def _suffix(module: str, *, swiglu: bool) -> str:
    """Return the ending of a bias's name in lmcore: a bias that a later op adds has another."""
    own = module.endswith("_norm") or module == "attention.qkv"
    return ".bias" if own or (module == "feed_forward.up" and swiglu) else "_bias"


def foreign_name(name: str, style: str) -> str:
    """Return Megatron's name of a parameter of lmcore, with the same number of its layer.

    Args:
        name: Name in lmcore.
        style: One of `STYLES`.
    """
    table = _LEGACY if style == "legacy" else _CORE
    prefix, inside = "", name
    if name.startswith("blocks."):
        _, layer, inside = name.split(".", 2)
        stack = "language_model.encoder" if style == "legacy" else "decoder"
        prefix = f"{stack}.layers.{layer}."
    if inside.endswith("_bias"):
        module, parameter = inside.removesuffix("_bias"), "bias"
    else:
        module, _, parameter = inside.rpartition(".")
    if style == "core" and prefix and module.endswith("_norm"):
        holder = "attention.qkv" if module == "attention_norm" else "feed_forward.up"
        return f"{prefix}{table[holder]}.layer_norm_{parameter}"
    return f"{prefix}{table[module]}.{parameter}"
