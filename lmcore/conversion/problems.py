"""Listing of what does not fit between a checkpoint's tensors and its description."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lmcore.errors import CheckpointError

__all__ = ["require_no_problems"]

_SHOWN = 10


def require_no_problems(
    checkpoint: Path,
    problems: Sequence[str],
    *,
    description: str = "its arguments",
    hint: str = "copy all of its files again",
    error: type[CheckpointError] = CheckpointError,
) -> None:
    """Raise a `CheckpointError` that lists the first of *problems*, if there are any.

    Args:
        checkpoint: Directory of the checkpoint.
        problems: Sentences about single tensors.
        description: Name of the part of the checkpoint that describes the tensors.
        hint: Hint of the error.
        error: Class of the error.
    """
    if not problems:
        return
    more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    raise error(
        f"the tensors of `{checkpoint}` do not fit {description}",
        why="\n".join([*problems[:_SHOWN], *more]),
        hint=hint,
    )
