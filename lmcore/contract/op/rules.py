"""Rules for the cases that a kernel does, from which plugins build `OpImpl.supports`; torch-free.

A rule takes the case and returns None or the reason against it; properties of the device are given
to the function that makes it.  Rules run in order, and the first reason is the answer: cheap
rules first, the import of a package last.
"""

from __future__ import annotations

from collections.abc import Callable

from lmcore.contract.op.packages import UsablePackages
from lmcore.contract.op.records import OpContext, Reject

__all__ = [
    "HALF",
    "Rule",
    "dtypes",
    "eager",
    "head_dim",
    "no_dropout",
    "package",
    "supports",
    "unmasked",
]

HALF = ("bfloat16", "float16")

Rule = Callable[[OpContext], str | None]


def supports(*rules: Rule) -> Callable[[OpContext], Reject | None]:
    """Return a `supports` that applies the rules in order."""

    def answer(context: OpContext) -> Reject | None:
        for rule in rules:
            reason = rule(context)
            if reason is not None:
                return Reject(reason)
        return None

    return answer


def dtypes(*names: str) -> Rule:
    """Return the rule that the op's inputs are of one of these dtypes."""
    listed = " and ".join(names)

    def rule(context: OpContext) -> str | None:
        return None if context.dtype in names else f"computes in {listed}, not {context.dtype}"

    return rule


def head_dim(most: int, multiple: int = 8, least: int = 8) -> Rule:
    """Return the rule on the channels of an attention head."""

    def rule(context: OpContext) -> str | None:
        size = context.attributes["head_dim"]
        if least <= size <= most and size % multiple == 0:
            return None
        return f"takes {least} to {most} channels a head, in steps of {multiple}, not {size}"

    return rule


def no_dropout(context: OpContext) -> str | None:
    """Refuse cases with dropout."""
    return "has no dropout" if context.attributes.get("dropout") else None


def unmasked(context: OpContext) -> str | None:
    """Refuse cases with a mask."""
    return "takes no mask" if context.attributes.get("masked") else None


def eager(context: OpContext) -> str | None:
    """Refuse compiled blocks, which a call that the compiler cannot follow cuts in two."""
    if context.attributes.get("compile"):
        return "is not for compiled blocks: the compiler cannot follow it, and would cut the block"
    return None


def package(usable: UsablePackages, name: str, *, load: bool = True) -> Rule:
    """Return the rule that a package is installed and fits the torch that is there.

    Args:
        usable: the installed packages.
        name: name of the package.
        load: True to import it if its metadata shows no problem.
    """

    def rule(context: OpContext) -> str | None:  # noqa: ARG001 - the same for every case
        return usable.problem(name, load=load)

    return rule
