"""Rows of the table of parameters (see `lmcore.model.parameters`) for the layers of this folder.

Torch-free.  The names are the modules' own.
"""

from __future__ import annotations

import math

from lmcore.model.parameters import ONES, ZEROS, Init, Parameter, Split
from lmcore.model.shape import ModelShape

__all__ = ["block_rows", "cross_attention_rows", "module_of", "norm_rows", "output_std"]

_BIAS = "_bias"
"""Suffix of biases that a later op adds."""


def norm_rows(name: str, shape: ModelShape) -> list[Parameter]:
    """Return the parameters of a norm of the kind that the shape names."""
    gain = Parameter(f"{name}.weight", (shape.hidden_size,), ONES)
    if shape.normalization == "RMSNorm":
        return [gain]
    return [gain, Parameter(f"{name}.bias", (shape.hidden_size,), ZEROS)]


def block_rows(name: str, shape: ModelShape) -> list[Parameter]:
    """Return the parameters of a `Block`."""
    return [
        *norm_rows(f"{name}.attention_norm", shape),
        *_attention_rows(f"{name}.attention", shape),
        *norm_rows(f"{name}.feed_forward_norm", shape),
        *_feed_forward_rows(f"{name}.feed_forward", shape),
    ]


def _attention_rows(name: str, shape: ModelShape) -> list[Parameter]:
    hidden, queries = shape.hidden_size, shape.attention_size
    packed = (queries, shape.key_size, shape.key_size)
    split = Split(0, packed)
    rows = [Parameter(f"{name}.qkv.weight", (sum(packed), hidden), _inner(shape), split)]
    if shape.qkv_bias:
        rows.append(Parameter(f"{name}.qkv.bias", (sum(packed),), ZEROS, split))
    rows.append(Parameter(f"{name}.output.weight", (hidden, queries), _residual(shape), Split(1)))
    return rows + _bias_rows(f"{name}.output_bias", hidden, shape)


def cross_attention_rows(name: str, shape: ModelShape) -> list[Parameter]:
    """Return the parameters of attention to the states of another stack."""
    hidden, queries = shape.hidden_size, shape.attention_size
    packed, inner = (shape.key_size, shape.key_size), _inner(shape)
    rows = [
        Parameter(f"{name}.query.weight", (queries, hidden), inner, Split(0)),
        Parameter(f"{name}.key_value.weight", (sum(packed), hidden), inner, Split(0, packed)),
        Parameter(f"{name}.output.weight", (hidden, queries), _residual(shape), Split(1)),
    ]
    if shape.qkv_bias:
        rows += [
            Parameter(f"{name}.query.bias", (queries,), ZEROS, Split(0)),
            Parameter(f"{name}.key_value.bias", (sum(packed),), ZEROS, Split(0, packed)),
        ]
    return rows + _bias_rows(f"{name}.output_bias", hidden, shape)


def _feed_forward_rows(name: str, shape: ModelShape) -> list[Parameter]:
    hidden, width = shape.hidden_size, shape.ffn_hidden_size
    packed = (width, width) if shape.gated else ()
    channels, split = sum(packed) or width, Split(0, packed)
    rows = [Parameter(f"{name}.up.weight", (channels, hidden), _inner(shape), split)]
    if shape.add_bias_linear:
        bias = "up.bias" if shape.gated else "up_bias"
        rows.append(Parameter(f"{name}.{bias}", (channels,), ZEROS, split))
    rows.append(Parameter(f"{name}.down.weight", (hidden, width), _residual(shape), Split(1)))
    return rows + _bias_rows(f"{name}.down_bias", hidden, shape)


def _bias_rows(name: str, size: int, shape: ModelShape) -> list[Parameter]:
    return [Parameter(name, (size,), ZEROS)] if shape.add_bias_linear else []


def _inner(shape: ModelShape) -> Init:
    return Init(std=shape.init_method_std)


def _residual(shape: ModelShape) -> Init:
    return Init(std=output_std(shape))


def output_std(shape: ModelShape) -> float:
    """Return the std of projections that write to the residual stream: sigma / sqrt(2 l)."""
    return shape.init_method_std / math.sqrt(2.0 * shape.num_layers)


def module_of(name: str) -> tuple[str, str, str]:
    """Return layer number (empty outside the blocks), module and `weight` or `bias` of a name."""
    layer = ""
    if name.startswith("blocks."):
        _, layer, name = name.split(".", 2)
    module, _, parameter = name.rpartition(".")
    if parameter.endswith(_BIAS):
        return layer, f"{module}.{parameter.removesuffix(_BIAS)}", "bias"
    return layer, module, parameter
