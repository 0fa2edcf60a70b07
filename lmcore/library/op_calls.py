"""Ops of a session as plain functions: `rt.ops.rms_norm(x, weight, epsilon)`.

A call looks up the kernel by the shapes and dtypes of its arguments, and calls it.  Kernels are
bound, and arguments checked, at the first call with new shapes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from lmcore.base.errors import ConfigError, nearest, suggestion
from lmcore.contract.op.context import OpAttributes, attribute_options, op_context
from lmcore.contract.op.explain import explanation
from lmcore.contract.op.records import OpContext, OpSpec, Resolution, load_target
from lmcore.library.op_cases import (
    case_attributes,
    case_dtype,
    check_arguments,
    signature_key,
)

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
