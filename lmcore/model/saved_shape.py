"""Check of a model's shape in a checkpoint, before memory is allocated for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmcore.config.option import options_of
from lmcore.config.section.model import ModelSection
from lmcore.errors import CheckpointError
from lmcore.model.shape import ModelShape

__all__ = ["read_shape"]

# Bounds far above any model.
_MAX_LAYERS = 10_000
_MAX_WIDTH = 2**24
_MAX_SIZES = {"num_layers": _MAX_LAYERS, "rotary_base": 2**53}
_KINDS: Mapping[str, tuple[str, type | tuple[type, ...]]] = {
    "int": ("an integer", int),
    "float": ("a number", (int, float)),
    "bool": ("true or false", bool),
    "str": ("a string", str),
}
_CHOICES = {option.name: option.choices for option in options_of(ModelSection) if option.choices}


def read_shape(values: Mapping[str, Any], checkpoint: Path) -> ModelShape:
    """Return the shape of a model from values of a checkpoint, whose author is not known.

    Args:
        values: Values by the names of `ModelShape`, of a manifest or converted.
        checkpoint: Directory of the checkpoint, for error messages.

    Raises:
        CheckpointError: A value is missing, unknown, of the wrong type or out of bounds.
    """
    fields = ModelShape.saved_types()
    problem = _names_problem(set(values), set(fields), ModelShape.later())
    for name, kind in fields.items():
        if problem is None and name in values:
            problem = _value_problem(name, kind, values[name])
    if problem is None:
        problem = _shape_problem(values)
    if problem is not None:
        raise CheckpointError(
            f"the model of checkpoint `{checkpoint}` cannot be built",
            why=problem,
            hint="load a checkpoint of `lmcore train`, of this version or an older one",
        )
    return ModelShape(**values)


def _shape_problem(values: Mapping[str, Any]) -> str | None:
    """Return the conflict between values; None if there is none."""
    heads = values["num_attention_heads"]
    if "head_dim" not in values and values["hidden_size"] % heads:
        return (
            f"hidden_size {values['hidden_size']} is not divisible by num_attention_heads {heads}"
        )
    if heads % values.get("num_query_groups", heads):
        groups = values["num_query_groups"]
        return f"num_attention_heads {heads} is not divisible by num_query_groups {groups}"
    shape = ModelShape(**values)
    if shape.rotary and (shape.rotary_dim < 2 or shape.rotary_dim % 2):
        return f"{shape.rotary_dim} of a head's {shape.head_dim} channels cannot be rotated"
    return None


def _names_problem(found: set[str], known: set[str], later: frozenset[str]) -> str | None:
    if missing := sorted(known - later - found):
        return f"its shape lacks `{missing[0]}`"
    if unknown := sorted(found - known):
        return f"its shape has `{unknown[0]}`, which is unknown to this version"
    return None


def _value_problem(name: str, kind: str, value: object) -> str | None:
    words, type_ = _KINDS[kind]
    if not isinstance(value, type_) or (isinstance(value, bool) and kind != "bool"):
        return f"`{name}` is `{value}`, not {words}"
    if isinstance(value, str):
        choices = _CHOICES[name]
        return None if value in choices else f"`{name}` is `{value}`, not one of {choices}"
    return None if isinstance(value, bool) else _number_problem(name, kind, value)


def _number_problem(name: str, kind: str, value: Any) -> str | None:
    if kind == "int":
        largest = _MAX_SIZES.get(name, _MAX_WIDTH)
        return None if 1 <= value <= largest else f"`{name}` is {value}, not from 1 to {largest}"
    if name.endswith("dropout"):
        return None if 0.0 <= value < 1.0 else f"`{name}` is {value}, not a probability"
    if name == "rotary_percent":
        return None if 0.0 < value <= 1.0 else f"`{name}` is {value}, not in (0, 1]"
    return None if 0.0 < value < math.inf else f"`{name}` is {value}, not above 0"
