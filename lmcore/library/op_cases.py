"""Cases of ops, derived from the arguments of a call: what kernels are bound for.

Shapes: B batch, S sequence or queries, T tokens or keys, H hidden, I inputs, O outputs, N heads, K
key/value heads, D head channels, R rotated pairs, F feed-forward, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lmcore.base.errors import LmcoreError, counted
from lmcore.contract.dtype import dtype_name

__all__ = ["case_attributes", "case_dtype", "check_arguments", "signature_key"]

Arguments = Mapping[str, Any]

_SHAPES: Mapping[str, Mapping[str, str]] = {
    "attention": {"q_BNSD": "BNSD", "k_BKSD": "BKTD", "v_BKSD": "BKTD"},
    "layer_norm": {"x_BSH": "*H", "weight_H": "H", "bias_H": "H"},
    "rms_norm": {"x_BSH": "*H", "weight_H": "H"},
    "linear": {"x_BSI": "*I", "weight_OI": "OI", "bias_O": "O"},
    "bias_gelu": {"x_BSF": "*F", "bias_F": "F"},
    "swiglu": {"x_BS2F": "*F"},
    "bias_dropout_add": {"x_BSH": "*H", "bias_H": "H", "residual_BSH": "*H"},
    "scaled_masked_softmax": {"x_BNST": "BNST"},
    "rotary_embedding": {"x_BNSD": "BNSD", "cos_SR": "SR", "sin_SR": "SR"},
    "cross_entropy": {"logits_TV": "TV", "target_T": "T"},
    "linear_cross_entropy": {
        "hidden_TH": "TH",
        "weight_VH": "VH",
        "target_T": "T",
        "loss_weight_T": "T",
    },
}
"""Dims of an op's tensors by parameter of its reference; "*" is any number of leading dims."""

_PRODUCTS = frozenset({"linear", "linear_cross_entropy"})
"""Ops that autocast computes in its own dtype."""

_DTYPES = {"target_T": torch.int64, "mask": torch.bool}
"""Dtypes of the tensors that hold no floating-point numbers."""

_OPTIONAL = frozenset({("linear", "bias_O"), ("bias_dropout_add", "bias_H")})


def _longest(*lengths: int) -> int:
    """Return the power of 2 that is not below any length.

    `seq_length` is an upper limit: with it rounded, a growing sequence binds a kernel a few times,
    not once for each length.
    """
    return 1 << (max(*lengths, 1) - 1).bit_length()


_ATTRIBUTES: Mapping[str, Callable[[Arguments], dict[str, Any]]] = {
    "attention": lambda of: {
        "head_dim": of["q_BNSD"].shape[3],
        "num_attention_heads": of["q_BNSD"].shape[1],
        "num_query_groups": of["k_BKSD"].shape[1],
        "seq_length": _longest(of["q_BNSD"].shape[2], of["k_BKSD"].shape[2]),
        "causal": bool(of["causal"]),
        "masked": of["mask"] is not None,
        "dropout": float(of["dropout"]),
    },
    "layer_norm": lambda of: {"hidden_size": of["x_BSH"].shape[-1]},
    "rms_norm": lambda of: {"hidden_size": of["x_BSH"].shape[-1]},
    "linear": lambda of: {
        "in_features": of["weight_OI"].shape[1],
        "out_features": of["weight_OI"].shape[0],
        "bias": of["bias_O"] is not None,
    },
    "bias_gelu": lambda of: {"ffn_hidden_size": of["x_BSF"].shape[-1]},
    "swiglu": lambda of: {"ffn_hidden_size": of["x_BS2F"].shape[-1] // 2},
    "bias_dropout_add": lambda of: {
        "hidden_size": of["x_BSH"].shape[-1],
        "bias": of["bias_H"] is not None,
        "dropout": float(of["dropout"]),
    },
    "scaled_masked_softmax": lambda of: {
        "num_attention_heads": of["x_BNST"].shape[1],
        "seq_length": _longest(of["x_BNST"].shape[3]),
        "causal": False,  # a mask may hide anything
        "masked": of["mask"] is not None,
    },
    "rotary_embedding": lambda of: {
        "head_dim": of["x_BNSD"].shape[3],
        "rotary_dim": 2 * of["cos_SR"].shape[-1],
        "num_attention_heads": of["x_BNSD"].shape[1],
        "seq_length": _longest(of["x_BNSD"].shape[2]),
    },
    "cross_entropy": lambda of: {"vocab_size": of["logits_TV"].shape[1]},
    "linear_cross_entropy": lambda of: {
        "vocab_size": of["weight_VH"].shape[0],
        "hidden_size": of["weight_VH"].shape[1],
    },
}


def signature_key(args: Sequence[Any], options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return all of a call's arguments that the case depends on, as a key; tensors by their kind.

    A list of tensors counts as its first tensor: the ops on lists have no attributes.
    """
    key: list[Any] = []
    for value in args:
        if isinstance(value, Tensor):
            key.append((value.shape, value.dtype, value.device))
        elif isinstance(value, list | tuple):
            key += [_kind(each) if isinstance(each, Tensor) else list for each in value[:1]]
        else:
            key.append(value)
    for name, value in options.items():
        key.append((name, _kind(value) if isinstance(value, Tensor) else value))
    return tuple(key)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def case_dtype(op: str, arguments: Arguments) -> str:
    """Return the name of the dtype of the case: the first tensor's, or autocast's of a product."""
    first = _tensors(arguments)[0][1]
    kind = first.device.type
    narrow = first.dtype != torch.float64
    if op in _PRODUCTS and narrow and torch.is_autocast_enabled(kind):
        return dtype_name(torch.get_autocast_dtype(kind))
    return dtype_name(first.dtype)


def case_attributes(op: str, arguments: Arguments) -> dict[str, Any]:
    """Return the attributes of the case by name; an op on lists of tensors has none."""
    return _ATTRIBUTES[op](arguments) if op in _ATTRIBUTES else {}


def _tensors(arguments: Arguments) -> list[tuple[str, Tensor]]:
    found = [(name, value) for name, value in arguments.items() if isinstance(value, Tensor)]
    for name, value in arguments.items():
        if isinstance(value, list | tuple):
            found += [(f"{name}[{at}]", each) for at, each in enumerate(value)]
    return found


def check_arguments(op: str, bound: inspect.BoundArguments, device_type: str) -> None:
    """Refuse arguments that the op cannot be computed from.

    Args:
        op: Name of the op.
        bound: Arguments by the names of the reference's parameters.
        device_type: Device type whose kernels are bound.

    Raises:
        LmcoreError: An argument is no tensor, is on another device, or has another dtype or shape.
    """
    arguments = bound.arguments
    call = f"`{op}{bound.signature}`".replace("'", "")
    expected = _SHAPES.get(op, {})
    for name in expected:
        missing = arguments[name] is None and (op, name) in _OPTIONAL
        if not isinstance(arguments[name], Tensor) and not missing:
            raise LmcoreError(
                f"`{op}`: `{name}` is of type `{type(arguments[name]).__name__}`, not a tensor",
                hint=f"the op is called as {call}",
            )
    tensors = _tensors(arguments)
    if not tensors:
        raise LmcoreError(f"`{op}` got no tensor", hint=f"the op is called as {call}")
    places = {name: str(tensor.device) for name, tensor in tensors if not _is_count(op, name)}
    if len(set(places.values())) > 1 or any(
        _type(place) != device_type for place in places.values()
    ):
        listed = ", ".join(f"`{name}` on {place}" for name, place in list(places.items())[:6])
        raise LmcoreError(
            f"`{op}`: the tensors are not on the device of the session, {device_type}",
            why=listed,
            hint="move them there: `tensor.to(rt.device)`",
        )
    shaped = {name: value for name, value in tensors if name in expected}
    _check_dtypes(op, shaped | {name: value for name, value in tensors if name == "mask"})
    _check_shapes(op, shaped, expected)


def _is_count(op: str, name: str) -> bool:
    """Return True for counts of steps, which some optimizers keep on the host."""
    return op == "adamw" and name.startswith("steps")


def _type(place: str) -> str:
    return place.partition(":")[0]


def _check_dtypes(op: str, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        wanted = _DTYPES.get(name)
        if tensor.is_floating_point() if wanted is None else tensor.dtype == wanted:
            continue
        named = "a floating-point dtype" if wanted is None else dtype_name(wanted)
        raise LmcoreError(
            f"`{op}`: `{name}` is {dtype_name(tensor.dtype)}, and {named} is needed",
            hint="True in a mask hides an entry" if name == "mask" else None,
        )


def _check_shapes(op: str, tensors: Mapping[str, Tensor], expected: Mapping[str, str]) -> None:
    """Refuse a dim whose size differs from the same letter's in another tensor."""
    sizes: dict[str, tuple[int | tuple[int, ...], str]] = {}
    for name, tensor in tensors.items():
        letters, shape = expected[name], tuple(tensor.shape)
        leading = letters.startswith("*")
        named = letters.removeprefix("*")
        if len(shape) < len(named) or (len(shape) > len(named) and not leading):
            least = "at least " if leading else ""
            raise LmcoreError(
                f"`{op}`: `{name}` has {counted(len(shape), 'dim')}, and {least}{len(named)} "
                f"{'is' if len(named) == 1 else 'are'} needed",
                why=f"its shape is {list(shape)}, and [{', '.join(letters)}] is needed",
            )
        start = len(shape) - len(named)
        found: list[tuple[str, int | tuple[int, ...]]] = [("*", shape[:start])] if leading else []
        found += zip(named, shape[start:], strict=True)
        for letter, size in found:
            first, owner = sizes.setdefault(letter, (size, name))
            if size != first:
                of = "leading dims" if letter == "*" else f"`{letter}`"
                raise LmcoreError(
                    f"`{op}`: {of} of `{owner}` and of `{name}` differ",
                    why=f"`{owner}` has shape {list(tensors[owner].shape)}, "
                    f"`{name}` has {list(shape)}",
                )
    _check_ratios(op, {letter: size for letter, (size, _) in sizes.items()})


def _check_ratios(op: str, sizes: Mapping[str, Any]) -> None:
    if op == "attention" and sizes["N"] % max(sizes["K"], 1):
        raise LmcoreError(
            f"`attention`: {sizes['K']} heads of keys do not divide {sizes['N']} query heads"
        )
    if op == "swiglu" and sizes["F"] % 2:
        raise LmcoreError(
            f"`swiglu`: the last dim of `x_BS2F` has {sizes['F']} channels, an odd number",
            why="it holds the gate and then the other factor, of equal widths",
        )
    if op == "rotary_embedding" and 2 * sizes["R"] > sizes["D"]:
        raise LmcoreError(
            f"`rotary_embedding`: {sizes['R']} angles rotate {2 * sizes['R']} channels, "
            f"and a head has {sizes['D']}",
            hint="pass the cosine of each pair once, not twice",
        )
