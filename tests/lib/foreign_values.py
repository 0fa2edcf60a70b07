"""Values of each JSON type, with which fields of other programs' files are read or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lmcore.base.errors import LmcoreError

VALUES: tuple[Any, ...] = (None, True, 0, -1, 1.5, 10**400, "x", [], ["x"], {}, {"a": 1})
NOT_JSON = (float("inf"), float("nan"))
"""Values that Python's JSON has as well, and pickles."""


def accept_or_refuse(call: Callable[..., object], label: object, *arguments: Any) -> None:
    """Call a reader, which may raise an error for the user and no other one."""
    try:
        call(*arguments)
    except LmcoreError:
        pass
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} for {label!r:.200}") from error


def places(value: Any, depth: int, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys of each value in nested mappings."""
    if isinstance(value, dict) and len(keys) < depth:
        for key, one in value.items():
            yield (*keys, key)
            yield from places(one, depth, (*keys, key))
