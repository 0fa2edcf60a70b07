"""Attributes of a case, each declared once.

A field below is an attribute that `OpSpec.attributes` may name.  The model gives every one of its
op's when it binds, `lmcore ops explain` has a flag for each, and docs/reference/ops.md a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lmcore.config.option import Option, option, options_of
from lmcore.contract.op.records import OpContext, OpSpec

__all__ = ["TRAITS", "OpAttributes", "attribute_options", "op_context"]


@dataclass(frozen=True)
class OpAttributes:
    """Attributes of a case; None if there is no usual value."""

    head_dim: int | None = option(None, "Channels of an attention head.", minimum=1)
    num_attention_heads: int | None = option(None, "Query heads.", minimum=1)
    num_query_groups: int | None = option(
        None, "Key and value heads; each serves the same number of query heads.", minimum=1
    )
    seq_length: int | None = option(None, "Largest number of tokens of a sequence.", minimum=1)
    causal: bool = option(True, "A token attends only to itself and earlier tokens.")
    masked: bool = option(False, "The op gets a mask.")
    dropout: float = option(
        0.0, "Dropout probability in training; there is none in evaluation.", minimum=0, below=1
    )
    hidden_size: int | None = option(None, "Channels of the residual stream.", minimum=1)
    ffn_hidden_size: int | None = option(None, "Channels of the feed-forward layer.", minimum=1)
    in_features: int | None = option(None, "Input channels of a projection.", minimum=1)
    out_features: int | None = option(None, "Output channels of a projection.", minimum=1)
    bias: bool = option(True, "The op gets a bias.")
    rotary_dim: int | None = option(None, "Channels of a head that are rotated.", minimum=2)
    vocab_size: int | None = option(None, "Entries of the padded vocabulary.", minimum=1)
    compile: bool = option(False, "The op is called in a compiled block.")
    score_bias: bool | None = option(
        None, "The mask is a bias, which is added to the scores, such as ALiBi's."
    )
    score_bias_gradient: bool | None = option(
        None, "The bias of the scores gets a gradient, such as that of T5's relative positions."
    )


TRAITS: Mapping[str, str] = MappingProxyType(
    {
        "deterministic": "Equal inputs and an equal random state give equal bits, with the same "
        "number of threads; `--deterministic` requires it.",
        "score_bias": "The mask of `attention` may be of a floating-point dtype: it is added to "
        "the scores, and -inf hides. A case with `score_bias` gets only such kernels.",
        "score_bias_gradient": "The backward pass of `attention` gives the gradient of such a mask "
        "if it requires one. A case with `score_bias_gradient` gets only such kernels.",
        "fused": "The op is one kernel, or keeps less for the backward pass than its steps would.",
    }
)
"""Claims that a kernel may make, and what each means; a plugin may add its own."""


def attribute_options() -> dict[str, Option]:
    """Return the declarations of all attributes by name."""
    return {option.name: option for option in options_of(OpAttributes)}


def op_context(
    spec: OpSpec, device_type: str, dtype: str, attributes: Mapping[str, Any]
) -> OpContext:
    """Return the case of an op, with the *attributes* that it declares and that have a value."""
    values = {name: attributes.get(name) for name in spec.attributes}
    given = {name: value for name, value in values.items() if value is not None}
    return OpContext(device_type, dtype, given)
