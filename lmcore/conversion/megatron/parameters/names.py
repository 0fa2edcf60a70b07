"""Names of Megatron's parameters, in megatron-core and in the models before it.

megatron-core has two sets.  By default a projection holds the weight of the norm before it; the
layers of `--transformer-impl local` have separate norms.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

from lmcore.base.errors import CheckpointError
from lmcore.families.gpt.megatron import NAMES as GPT_NAMES
from lmcore.families.layers.parameters import module_of
from lmcore.model.family import families, family_of
from lmcore.model.megatron_names import MegatronNames, every_family

if TYPE_CHECKING:
    from lmcore.conversion.state import ModelState

__all__ = [
    "EMBEDDING",
    "HEAD",
    "STYLES",
    "TIED",
    "UNUSED",
    "foreign_name",
    "parameter_of",
    "require_names",
]

EMBEDDING, HEAD = "token_embedding.weight", "output_embedding.weight"
"""Names in lmcore of the token embedding and the output layer; a tied model has the first."""

TIED = "tied"
"""Result of `parameter_of` for the last stage's copy of the token embedding."""
UNUSED = "unused"
"""Result of `parameter_of` for values that the model of lmcore computes or does not need."""

_PREFIX = re.compile(r"^(module\.)*(language_model\.)?")
_LAYER = re.compile(r"^(?:encoder|decoder|transformer)\.layers\.(\d+)\.(.+)$")
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
    "attention_norm": "input_layernorm",
    "attention.qkv": "self_attention.linear_qkv",
    "attention.output": "self_attention.linear_proj",
    "feed_forward_norm": "pre_mlp_layernorm",
    "feed_forward.up": "mlp.linear_fc1",
    "feed_forward.down": "mlp.linear_fc2",
}
_LEGACY = {
    "attention_norm": "input_norm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.output": "self_attention.dense",
    "feed_forward_norm": "post_attention_norm",
    "feed_forward.up": "mlp.dense_h_to_4h",
    "feed_forward.down": "mlp.dense_4h_to_h",
}


@functools.cache
def _outside(_families: tuple[str, ...]) -> dict[str, str]:
    """Return lmcore's name of each module or parameter outside the layers, of all families."""
    found: dict[str, str] = {}
    for names in every_family():
        for table in (names.core, names.legacy):
            found |= {_PREFIX.sub("", theirs): ours for ours, theirs in table.items()}
        found |= names.older
    return found


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
        outside = _outside(tuple(families()))  # plugins may have added some
        if name in outside:
            return outside[name]
        module, _, parameter = name.rpartition(".")
        known = outside.get(module)
        biased = known is not None and parameter == "bias" and not known.endswith("embedding")
        return f"{known}.{parameter}" if known and (parameter == "weight" or biased) else None
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


def foreign_name(name: str, style: str, names: MegatronNames | None = None) -> str:
    """Return Megatron's name of a parameter of lmcore, with the same number of its layer.

    Args:
        name: Name in lmcore.
        style: One of `STYLES`.
        names: Record of the model's family; None: GPT's.
    """
    names = names or GPT_NAMES
    legacy = style == "legacy"
    if not name.startswith("blocks."):
        outside = names.legacy if legacy else names.core
        if name in outside:
            return outside[name]
        module, _, parameter = name.rpartition(".")
        return f"{outside[module]}.{parameter}"
    layer, module, parameter = module_of(name)
    stack = "language_model.encoder" if legacy else names.stack
    prefix = f"{stack}.layers.{layer}."
    if style == "core" and module.endswith("_norm"):
        holder = "attention.qkv" if module == "attention_norm" else "feed_forward.up"
        return f"{prefix}{_CORE[holder]}.layer_norm_{parameter}"
    return f"{prefix}{(_LEGACY if legacy else _CORE)[module]}.{parameter}"


def require_names(
    state: ModelState, program: str, names: MegatronNames | None, style: str = STYLES[0]
) -> None:
    """Raise a `CheckpointError` if a model has no counterpart in Megatron.

    Args:
        state: Model to write.
        program: Name of the program that loads the checkpoint.
        names: Record of the model's family; None: Megatron does not have it.
        style: Set of names, one of `STYLES`.
    """
    family = family_of(state.shape).name
    why = f"lmcore knows no names there for the family {family}"
    if names is not None:
        why = "it has " + ", ".join(different := names.differences(state.shape, style))
        if not different:
            return
    raise CheckpointError(
        f"the {family} model of `{state.path}` cannot be written for {program}", why=why
    )
