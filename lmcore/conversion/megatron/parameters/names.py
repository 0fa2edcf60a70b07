"""Names of Megatron's parameters, in megatron-core and in the models before it.

megatron-core has two sets.  By default a projection holds the weight of the norm before it; the
layers of `--transformer-impl local` have separate norms.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from lmcore.base.errors import CheckpointError
from lmcore.conversion.other_formats import other_formats
from lmcore.families.gpt.megatron import NAMES as GPT_NAMES
from lmcore.families.layers.parameters import module_of
from lmcore.model.family import family_of
from lmcore.model.megatron_names import MegatronNames

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
    "stack_of",
]

EMBEDDING, HEAD = "token_embedding.weight", "output_embedding.weight"
"""Names in lmcore of the token embedding and the output layer; a tied model has the first."""

TIED = "tied"
"""Result of `parameter_of` for the last stage's copy of the token embedding."""
UNUSED = "unused"
"""Result of `parameter_of` for values that the model of lmcore computes or does not need."""

_PREFIX = re.compile(r"^(module\.)*(language_model\.)?")
_LAYER = re.compile(r"^(.+)\.layers\.(\d+)\.(.+)$")
_ONLY_STACK = ("encoder", "decoder", "transformer")
"""Names of the stack of a model that has one, in all versions."""
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
_CROSSED = {
    "pre_cross_attn_layernorm": "cross_attention_norm",
    "post_attention_layernorm": "cross_attention_norm",
    "post_attention_norm": "cross_attention_norm",
    "post_inter_attention_layernorm": "feed_forward_norm",
    "post_inter_attention_norm": "feed_forward_norm",
    "cross_attention.linear_q": "cross_attention.query",
    "cross_attention.linear_kv": "cross_attention.key_value",
    "cross_attention.linear_proj": "cross_attention.output",
    "inter_attention.query": "cross_attention.query",
    "inter_attention.key_value": "cross_attention.key_value",
    "inter_attention.dense": "cross_attention.output",
}
"""Modules of layers that attend to another stack, in the place of `_MODULES`."""
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
    "cross_attention_norm": "pre_cross_attn_layernorm",
    "cross_attention.query": "cross_attention.linear_q",
    "cross_attention.key_value": "cross_attention.linear_kv",
    "cross_attention.output": "cross_attention.linear_proj",
    "feed_forward_norm": "pre_mlp_layernorm",
    "feed_forward.up": "mlp.linear_fc1",
    "feed_forward.down": "mlp.linear_fc2",
}
_NORM_HOLDERS = {"attention_norm": "attention.qkv", "feed_forward_norm": "feed_forward.up"}
"""Projections that hold the norm before them, by default of megatron-core."""
_LEGACY = {
    "attention_norm": "input_norm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.output": "self_attention.dense",
    "feed_forward_norm": "post_attention_norm",
    "feed_forward.up": "mlp.dense_h_to_4h",
    "feed_forward.down": "mlp.dense_4h_to_h",
}
_LEGACY_CROSSED = {
    **_LEGACY,
    "cross_attention_norm": "post_attention_norm",
    "cross_attention.query": "inter_attention.query",
    "cross_attention.key_value": "inter_attention.key_value",
    "cross_attention.output": "inter_attention.dense",
    "feed_forward_norm": "post_inter_attention_norm",
}


def stack_of(name: str, names: MegatronNames) -> tuple[str, int, str] | None:
    """Return stack, number of the layer and name in the layer; None outside the layers.

    Args:
        name: Name in lmcore.
        names: Record of the model's family.
    """
    for stack in names.stacks:
        layer, _, inside = name.removeprefix(f"{stack}.").partition(".")
        if name.startswith(f"{stack}.") and layer.isdecimal():
            return stack, int(layer), inside
    return None


class _Table(NamedTuple):
    """Names of a family in Megatron, of all versions, without `_PREFIX`.

    Attributes:
        outside: lmcore's names of modules and parameters outside the layers.
        stacks: Beginnings of lmcore's names of stacks.
    """

    outside: dict[str, str]
    stacks: dict[str, str]


def _table(names: MegatronNames) -> _Table:
    outside: dict[str, str] = {}
    for table in (names.core, names.legacy):
        outside |= {_PREFIX.sub("", theirs): ours for ours, theirs in table.items()}
    stacks = {
        _PREFIX.sub("", theirs): ours
        for ours, stack in names.stacks.items()
        for theirs in (stack.core, stack.legacy)
        if theirs
    }
    if len(names.stacks) == 1:
        stacks |= dict.fromkeys(_ONLY_STACK, next(iter(names.stacks)))
    return _Table({**outside, **names.older}, stacks)


def parameter_of(name: str, *, swiglu: bool, names: MegatronNames = GPT_NAMES) -> str | None:
    """Return lmcore's name of a parameter; `TIED` or `UNUSED`; None if it is unknown.

    Layers keep the number that they have in *name*.

    Args:
        name: Name in Megatron, of any of its versions.
        swiglu: True if the feed-forward layers are gated; it changes the name of their bias.
        names: Record of the model's family.
    """
    if name.endswith(_UNUSED_ENDINGS):
        return UNUSED
    name = _PREFIX.sub("", name)
    if name in {"word_embeddings_for_head.weight", "word_embeddings.weight"}:
        return TIED
    outside, stacks = _table(names)
    layer = _LAYER.match(name)
    if layer is not None:
        stack = stacks.get(layer[1])
        if stack is None:
            return None
        inside = _in_layer(layer[3], swiglu=swiglu, crossed=names.stacks[stack].crossed)
        return None if inside is None else f"{stack}.{layer[2]}.{inside}"
    if name in outside:
        return outside[name]
    module, _, parameter = name.rpartition(".")
    known = outside.get(module)
    biased = known is not None and parameter == "bias" and not known.endswith("embedding")
    return f"{known}.{parameter}" if known and (parameter == "weight" or biased) else None


def _in_layer(name: str, *, swiglu: bool, crossed: bool) -> str | None:
    module, _, parameter = name.rpartition(".")
    owner, _, last = module.rpartition(".")
    ours = _CROSSED.get(module) if crossed else None
    if ours is None:
        ours = _MODULES.get(last)
        if ours is None:
            return None
        if parameter in _NORM_INSIDE:
            norm = {held: norm for norm, held in _NORM_HOLDERS.items()}.get(ours)
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
    own = module.endswith(("_norm", ".qkv", ".query", ".key_value"))
    return ".bias" if own or (module == "feed_forward.up" and swiglu) else "_bias"


def foreign_name(name: str, style: str, names: MegatronNames = GPT_NAMES) -> str:
    """Return Megatron's name of a parameter of lmcore, with the same number of its layer.

    Args:
        name: Name in lmcore.
        style: One of `STYLES`.
        names: Record of the model's family.
    """
    legacy = style == "legacy"
    place = stack_of(name, names)
    if place is None:
        outside = names.legacy if legacy else names.core
        if name in outside:
            return outside[name]
        module, _, parameter = name.rpartition(".")
        return f"{outside[module]}.{parameter}"
    key, layer, inside = place
    stack = names.stacks[key]
    _, module, parameter = module_of(inside)
    prefix = f"{stack.legacy if legacy else stack.core}.layers.{layer}."
    if style == "core" and module in _NORM_HOLDERS:
        return f"{prefix}{_CORE[_NORM_HOLDERS[module]]}.layer_norm_{parameter}"
    modules = _CORE
    if legacy:
        modules = _LEGACY_CROSSED if stack.crossed else _LEGACY
    return f"{prefix}{modules[module]}.{parameter}"


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
        f"the {family} model of `{state.path}` cannot be written for {program}",
        why=why,
        hint=other_formats(state.shape),
    )
