"""Check of a model's shape in a checkpoint, before memory is allocated for it."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from lmcore.base.errors import CheckpointError
from lmcore.config.section import run_options
from lmcore.model.family import family_of, named_family
from lmcore.model.shape import ModelShape

__all__ = ["is_number", "read_shape"]

# Bounds far above any model.
_MAX_LAYERS = 10_000
_MAX_WIDTH = 2**24
_MAX_SIZES = {"num_layers": _MAX_LAYERS, "rotary_base": 2**53}
_KINDS: Mapping[str, tuple[str, type | tuple[type, ...]]] = {
    "int": ("an integer", int),
    "float": ("a finite number", (int, float)),
    "bool": ("true or false", bool),
    "str": ("a string", str),
}
_CHOICES = {name: option.choices for name, option in run_options().items() if option.choices}

_BOUNDS = {name: (option.minimum, option.maximum) for name, option in run_options().items()}


def is_number(value: object) -> TypeGuard[int | float]:
    """Return True if a value of a file is a finite number, and no larger than a float may be."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max


def read_shape(values: Mapping[str, Any], checkpoint: Path) -> ModelShape:
    """Return the shape of a model from values of a checkpoint, whose author is not known.

    Args:
        values: Values by the names of `ModelShape`, of a manifest or converted.
        checkpoint: Directory of the checkpoint, for error messages.

    Raises:
        CheckpointError: A value is missing, unknown, of the wrong type or out of bounds.
    """
    own, problem = _own_values(values)
    values = {name: value for name, value in values.items() if name not in own}
    fields = ModelShape.saved_types()
    if problem is None:
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
    return ModelShape(**values, further=tuple(sorted(own.items())))


def _own_values(values: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return the values that only the checkpoint's family has, and what is wrong with them."""
    name = values.get("model_family", "")
    if not isinstance(name, str):
        return {}, f"`model_family` is `{name!s:.80}`, not a name"
    family = named_family(name) if name else None
    if name and family is None:
        return (
            {},
            f"its family `{name:.80}` is unknown; a plugin that is not installed may bring it",
        )
    known = family.settings if family else {}
    own = {name: value for name, value in values.items() if name in known}
    if missing := sorted(set(known) - set(own)):
        return own, f"its shape lacks `{missing[0]}`"
    problems = (_own_problem(key, value, known[key]) for key, value in own.items())
    return own, next(filter(None, problems), None)


def _own_problem(key: str, value: object, usual: object) -> str | None:
    """Return what is wrong with the value of a family's own setting; None if nothing is."""
    if type(value) is not type(usual) or (type(value) is int and not 0 <= value < _MAX_WIDTH):
        return f"`{key}` is `{value!s:.80}`, where a value such as `{usual}` is expected"
    if key in _CHOICES and value not in _CHOICES[key]:
        return f"`{key}` is `{value!s:.80}`, not one of {_CHOICES[key]}"
    least, most = _BOUNDS.get(key, (None, None))
    if type(value) is int and not (least or 0) <= value <= (most or _MAX_WIDTH):
        return f"`{key}` is {value}, not from {least or 0} to {most or _MAX_WIDTH}"
    return None


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
    family = named_family(shape.model_family) or family_of(dataclasses.replace(shape, task=""))
    if shape.position_embedding_type not in family.positions:
        return (
            f"`position_embedding_type` is `{shape.position_embedding_type}`, not one of "
            f"{family.name}'s: {family.positions}"
        )
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
    known = is_number(value) if kind == "float" else isinstance(value, type_)
    if not known or (isinstance(value, bool) and kind != "bool"):
        return f"`{name}` is `{value!s:.80}`, not {words}"
    if name == "model_family":
        return None  # see `_own_values`
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
