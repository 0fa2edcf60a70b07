"""Comparison of a kernel's signature with that of the op's reference.

The parameters before `*` in a reference are passed by position, those after it by name.  Used when
a kernel is bound and by `lmcore plugin check`; loads no torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter
from typing import Any

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
    """Return why *function* cannot be called like *reference*, in words; None if it can.

    A parameter that is passed by position may have a name of its own, but not the name of another
    one: that is a kernel with its arguments in another order.  A parameter with a default in the
    reference has the same default in the kernel.  Of compiled code without a signature nothing can
    be said, and the result is None; `readable_signature` identifies such functions.
    """
    found = readable_signature(function)
    if found is None:
        return None
    wanted = inspect.signature(reference).parameters.values()
    positional = [one for one in wanted if one.kind in _BY_POSITION]
    named = [one for one in wanted if one.kind is Parameter.KEYWORD_ONLY]
    parameters = list(found.parameters.values())
    first = [one for one in parameters if one.kind in _BY_POSITION][: len(positional)]
    rest = [one for one in parameters if one not in first]
    problems = [*_positional_problems(first, rest, positional), *_named_problems(rest, named)]
    return "; ".join(problems) or None


def _positional_problems(
    first: Sequence[Parameter], rest: Sequence[Parameter], wanted: Sequence[Parameter]
) -> Iterator[str]:
    """Yield what is wrong with the parameters that take what is passed by position."""
    takes_any = any(one.kind is Parameter.VAR_POSITIONAL for one in rest)
    if len(first) < len(wanted) and not takes_any:
        names = ", ".join(f"`{one.name}`" for one in wanted)
        count = f"{len(first)} argument{'' if len(first) == 1 else 's'}"
        yield f"it takes {count} by position, the op passes {len(wanted)}: {names}"
        return
    stems = [_stem(one.name) for one in wanted]
    for place, (mine, theirs) in enumerate(zip(first, wanted, strict=False)):
        stem = _stem(mine.name)
        if stem != stems[place] and stem in stems:
            yield f"its `{mine.name}` is in the place of the op's `{theirs.name}`"
        yield from _default_problem(mine, theirs)


def _named_problems(rest: Sequence[Parameter], wanted: Sequence[Parameter]) -> Iterator[str]:
    """Yield what is wrong with the parameters that are passed by name, or not at all."""
    by_name = {one.name: one for one in rest if one.kind in _BY_NAME}
    takes_any = any(one.kind is Parameter.VAR_KEYWORD for one in rest)
    for theirs in wanted:
        if theirs.name in by_name:
            yield from _default_problem(by_name[theirs.name], theirs)
        elif not takes_any:
            yield f"it does not take `{theirs.name}` by name, as the op passes it"
    passed = {one.name for one in wanted}
    for mine in rest:
        required = mine.default is Parameter.empty and mine.kind not in {
            Parameter.VAR_POSITIONAL,
            Parameter.VAR_KEYWORD,
        }
        if required and (mine.name not in passed or mine.kind is Parameter.POSITIONAL_ONLY):
            yield f"it needs `{mine.name}`, which the op does not pass"


def _default_problem(mine: Parameter, theirs: Parameter) -> Iterator[str]:
    """Yield how the defaults differ, where the op may leave the argument out."""
    if theirs.default is Parameter.empty:
        return
    if mine.default is Parameter.empty:
        yield f"it needs `{mine.name}`, which the op may leave out"
    elif not _is_scalar(mine.default) or mine.default != theirs.default:
        yield f"its default of `{mine.name}` is {mine.default!r}, the op's is {theirs.default!r}"


def _is_scalar(value: object) -> bool:
    """Return True if `==` on the value gives a bool, which it does not on a tensor."""
    return value is None or isinstance(value, bool | int | float | str)


def _stem(name: str) -> str:
    """Return a tensor's name without its shape: `q` for `q_BNSD`."""
    return re.sub(r"_[A-Z0-9]+$", "", name)
