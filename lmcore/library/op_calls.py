"""Ops of a session as plain functions: `rt.ops.rms_norm(x, weight, epsilon)`.

A call looks up the kernel by its case, the shapes and dtypes of its arguments, and calls it.
Kernels are bound, and arguments checked, at the first call with new shapes.

Shapes: B batch, S sequence or queries, T tokens or keys, H hidden, I inputs, O outputs, N heads, K
key/value heads, D head channels, R rotated pairs, F feed-forward, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.base.errors import ConfigError, LmcoreError, counted, nearest, suggestion
from lmcore.contract.dtype import dtype_name
from lmcore.contract.op.context import OpAttributes, attribute_options, op_context
from lmcore.contract.op.explain import explanation
from lmcore.contract.op.records import OpContext, OpSpec, Resolution, load_target

if TYPE_CHECKING:
    from lmcore.runtime.runtime import Runtime

__all__ = ["OpCalls"]

_MOST_SHAPES = 4096
"""Combinations of shapes of an op that are kept; beyond it all are dropped."""


class OpCalls:
    """The kernels of a session's device, each op a function with its reference's arguments.

    `lmcore.contract.op.reference` documents the functions.  Each runs the kernel that the device
    has for the shapes and dtypes of its arguments; under autocast `linear` and
    `linear_cross_entropy` run the kernel for its dtype.

    In a function that `torch.compile` compiles, get the kernel by `bind(..., compile=True)` before.

    Attributes:
        device_type: Device type that the kernels run on.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Take the op table and the device of *runtime*; kernels are bound when called."""
        self._table = runtime.ops
        self._device = runtime.device
        self.device_type = runtime.device.type
        self._precision = runtime.precision

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the function of an op; made at the first use.

        Raises:
            AttributeError: There is no such op.
        """
        specs = self.__dict__.get("_table") and self._table.specs
        if not specs or name not in specs:
            close = nearest(name, specs or ())
            meant = f"; did you mean `{close}`?" if close else ""
            raise AttributeError(f"no op `{name}`{meant}", name=name, obj=self)
        call = self._call_of(specs[name])
        self.__dict__[name] = call
        return call

    def __dir__(self) -> list[str]:
        """Return the names of the ops and methods."""
        return sorted({*self._table.specs, "bind", "explain", "resolution", "spec"})

    def _call_of(self, spec: OpSpec) -> Callable[..., Any]:
        """Return the function that looks up the kernel of a call and calls it."""
        reference = load_target(spec.reference)
        signature = inspect.signature(reference)
        by_name = frozenset(
            name
            for name, parameter in signature.parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        )
        listed = not spec.attributes
        is_product = spec.name in {"linear", "linear_cross_entropy"}
        kind = self._device.type
        kernels: dict[Any, Callable[..., Any]] = {}

        @wraps(reference)
        def call(*args: Any, **options: Any) -> Any:
            if options and not options.keys() <= by_name:  # kernels name parameters as they like
                bound = signature.bind(*args, **options)
                args, options = bound.args, bound.kwargs
            key = signature_key(args, {} if listed else options)
            if is_product and torch.is_autocast_enabled(kind):
                key = (torch.get_autocast_dtype(kind), key)
            kernel = kernels.get(key)
            if kernel is None:
                context = self._case(spec, args, options)
                if len(kernels) >= _MOST_SHAPES:
                    kernels.clear()
                kernel = kernels[key] = self._table.bind(spec.name, context)
            return kernel(*args, **options)

        return call

    def _case(self, spec: OpSpec, args: tuple[Any, ...], options: dict[str, Any]) -> OpContext:
        """Return the case of a call; refuse wrong arguments."""
        bound = inspect.signature(load_target(spec.reference)).bind(*args, **options)
        bound.apply_defaults()
        check_arguments(spec.name, bound, self._device.type)
        attributes = case_attributes(spec.name, bound.arguments)
        if "compile" in spec.attributes:
            attributes["compile"] = False
        dtype = case_dtype(spec.name, bound.arguments)
        return op_context(spec, self._device.type, dtype, attributes)

    def bind(self, op: str, *, dtype: str | None = None, **attributes: Any) -> Callable[..., Any]:
        """Return the kernel of an op for given attributes, to be called without a look-up.

        Args:
            op: Name of the op.
            dtype: Name of the dtype of the op's inputs; None: the dtype of the session's
                precision.
            attributes: Attributes of the case, by the names of `OpAttributes`; `compile=True` for
                a call within a compiled function.

        Raises:
            ConfigError: The op or an attribute is unknown; with `--strict-ops` there is no kernel.
            PluginError: The kernel of the device's plugin cannot be loaded.
        """
        return self._table.bind(op, self._given_case(op, dtype, attributes))

    def explain(self, op: str, *args: Any, dtype: str | None = None, **options: Any) -> str:
        """Return which kernel a case of an op gets, and why not each other one.

        Args:
            op: Name of the op.
            args: Arguments of a call, whose case is explained; none: the case is given by
                attributes.
            dtype: Name of the dtype, if the case is given by attributes; None: the dtype of
                the session's precision.
            options: Further arguments of the call, or attributes as for `bind`.

        Raises:
            LmcoreError: The op or an attribute is unknown; an argument is wrong.
        """
        found = self.resolution(op, *args, dtype=dtype, **options)
        lines = explanation(found, self._table, self._device.dtypes)
        return "\n".join(line for line, _ in lines)

    def resolution(
        self, op: str, *args: Any, dtype: str | None = None, **options: Any
    ) -> Resolution:
        """Return the choice of a kernel as a record; arguments as of `explain`."""
        if args:
            return self._table.resolve(op, self._case(self.spec(op), args, options))
        return self._table.resolve(op, self._given_case(op, dtype, options))

    def _given_case(self, op: str, dtype: str | None, attributes: dict[str, Any]) -> OpContext:
        spec = self.spec(op)
        options = attribute_options()
        for name, value in attributes.items():
            if name not in spec.attributes:
                raise ConfigError(
                    f"op `{op}` has no attribute `{name}`",
                    hint=suggestion(name, spec.attributes),
                )
            where = f"op `{op}`: `{name}={value!r}`"
            if isinstance(value, str) and options[name].type is not str:
                raise ConfigError(f"{where}: {options[name].expected}, not text")
            options[name].convert(value, where=where)
        usual = asdict(OpAttributes())
        if dtype is None:
            policy = self._precision
            dtype = policy.activations if spec.has_backward else policy.keep
        return op_context(spec, self._device.type, dtype, usual | attributes)

    def spec(self, op: str) -> OpSpec:
        """Return the declaration of an op.

        Raises:
            ConfigError: There is no such op.
        """
        if op not in self._table.specs:
            longer = [name for name in self._table.specs if name.startswith(op)]
            raise ConfigError(
                f"unknown op `{op}`",
                hint=f"did you mean {' or '.join(f'`{name}`' for name in longer)}?"
                if op and longer
                else suggestion(op, self._table.specs),
            )
        return self._table.specs[op]


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


def _bias_of_scores(mask: Tensor | None) -> dict[str, bool]:
    """Return the attributes of a mask that is added to the scores; another mask has none."""
    if mask is None or not mask.is_floating_point():
        return {}
    return {"score_bias": True} | ({"score_bias_gradient": True} if _is_trained(mask) else {})


_ATTRIBUTES: Mapping[str, Callable[[Arguments], dict[str, Any]]] = {
    "attention": lambda of: {
        "head_dim": of["q_BNSD"].shape[3],
        "num_attention_heads": of["q_BNSD"].shape[1],
        "num_query_groups": of["k_BKSD"].shape[1],
        "seq_length": _longest(of["q_BNSD"].shape[2], of["k_BKSD"].shape[2]),
        "causal": bool(of["causal"]),
        "masked": of["mask"] is not None,
        "dropout": float(of["dropout"]),
        **_bias_of_scores(of["mask"]),
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
        key.append(
            (name, (*_kind(value), _is_trained(value)) if isinstance(value, Tensor) else value)
        )
    return tuple(key)


def _is_trained(tensor: Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


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
        also_floating = (op, name) == ("attention", "mask")  # a bias of the scores
        if also_floating and tensor.is_floating_point():
            continue
        if tensor.is_floating_point() if wanted is None else tensor.dtype == wanted:
            continue
        named = "a floating-point dtype" if wanted is None else dtype_name(wanted)
        if also_floating:
            named += " or a floating-point dtype"
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
