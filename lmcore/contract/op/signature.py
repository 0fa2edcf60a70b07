"""Comparison of a kernel's signature with the signature of the op's reference.

The parameters before `*` in a reference are passed by position, those after it by name.  Used when
a kernel is bound and by `lmcore plugin check`; loads no torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter
from typing import Any

from lmcore.base.errors import counted

__all__ = ["readable_signature", "signature_problem"]

_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def readable_signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of *function*; None for compiled code without one."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def signature_problem(function: Callable[..., Any], reference: Callable[..., Any]) -> str | None:
    """Return the reason why *function* cannot be called like *reference*; None if it can.

    A parameter that is passed by position may have a different name, but not the name of another
    parameter: such a kernel has its arguments in another order.  A parameter with a default in the
    reference has the same default in the kernel.  Compiled code without a signature cannot be
    checked, and the result is None; `readable_signature` identifies such functions.
    """
    found = readable_signature(function)
    if found is None:
        return None
    wanted = inspect.signature(reference).parameters.values()
    positional = [parameter for parameter in wanted if parameter.kind in _BY_POSITION]
    named = [parameter for parameter in wanted if parameter.kind is Parameter.KEYWORD_ONLY]
    parameters = list(found.parameters.values())
    first = [parameter for parameter in parameters if parameter.kind in _BY_POSITION][
        : len(positional)
    ]
    remaining = [parameter for parameter in parameters if parameter not in first]
    problems = [
        *_positional_problems(first, remaining, positional),
        *_named_problems(remaining, named),
    ]
    return "; ".join(problems) or None


def _positional_problems(
    first: Sequence[Parameter], remaining: Sequence[Parameter], wanted: Sequence[Parameter]
) -> Iterator[str]:
    """Yield the problems of the parameters that take positional arguments."""
    takes_any = any(parameter.kind is Parameter.VAR_POSITIONAL for parameter in remaining)
    if len(first) < len(wanted) and not takes_any:
        names = ", ".join(f"`{parameter.name}`" for parameter in wanted)
        count = counted(len(first), "argument")
        yield f"it takes {count} by position, the op passes {len(wanted)}: {names}"
        return
    stems = [_stem(parameter.name) for parameter in wanted]
    for place, (parameter, expected) in enumerate(zip(first, wanted, strict=False)):
        stem = _stem(parameter.name)
        if stem != stems[place] and stem in stems:
            yield f"its `{parameter.name}` is in the place of the op's `{expected.name}`"
        yield from _default_problem(parameter, expected)


def _named_problems(remaining: Sequence[Parameter], wanted: Sequence[Parameter]) -> Iterator[str]:
    """Yield the problems of the parameters that are passed by name, or not at all."""
    by_name = {parameter.name: parameter for parameter in remaining if parameter.kind in _BY_NAME}
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in remaining)
    for expected in wanted:
        if expected.name in by_name:
            yield from _default_problem(by_name[expected.name], expected)
        elif not takes_any:
            yield f"it does not take `{expected.name}` by name, as the op passes it"
    passed = {parameter.name for parameter in wanted}
    for parameter in remaining:
        required = parameter.default is Parameter.empty and parameter.kind not in {
            Parameter.VAR_POSITIONAL,
            Parameter.VAR_KEYWORD,
        }
        if required and (
            parameter.name not in passed or parameter.kind is Parameter.POSITIONAL_ONLY
        ):
            yield f"it needs `{parameter.name}`, which the op does not pass"


def _default_problem(parameter: Parameter, expected: Parameter) -> Iterator[str]:
    """Yield how the defaults differ, where the op may leave the argument out."""
    if expected.default is Parameter.empty:
        return
    if parameter.default is Parameter.empty:
        yield f"it needs `{parameter.name}`, which the op may leave out"
    elif not _is_scalar(parameter.default) or parameter.default != expected.default:
        default, right = parameter.default, expected.default
        yield f"its default of `{parameter.name}` is {default!r}, the op's is {right!r}"


def _is_scalar(value: object) -> bool:
    """Return True if `==` on the value gives a bool, which it does not on a tensor."""
    return value is None or isinstance(value, bool | int | float | str)


def _stem(name: str) -> str:
    """Return a tensor's name without its shape: `q` for `q_BNSD`."""
    return re.sub(r"_[A-Z0-9]+$", "", name)
