"""Megatron's flags of each command, as flags of another program that `parse_flags` accepts."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from lmcore.config.foreign.megatron import (
    FIXED,
    MERGE_FIXED,
    OF_ANOTHER_PROGRAM,
    PREPARE_FIXED,
    PREPARE_RENAMED,
    PREPARE_UNSUPPORTED,
    RENAMED,
    SWITCHES,
    UNSUPPORTED,
    VALUES_OF_ANOTHER_PROGRAM,
    Fixed,
    Renamed,
)
from lmcore.config.options.flags import ForeignFlag, Translation, UnsupportedFlagError

__all__ = ["merge_flags", "prepare_flags", "train_flags"]


@functools.cache
def train_flags() -> Mapping[str, ForeignFlag]:
    """Return Megatron's flags that `lmcore train` accepts."""
    return _foreign(RENAMED, FIXED, {**UNSUPPORTED, **OF_ANOTHER_PROGRAM})


@functools.cache
def prepare_flags() -> Mapping[str, ForeignFlag]:
    """Return Megatron's flags that `lmcore data prepare` accepts."""
    return _foreign(PREPARE_RENAMED, PREPARE_FIXED, PREPARE_UNSUPPORTED)


@functools.cache
def merge_flags() -> Mapping[str, ForeignFlag]:
    """Return Megatron's flags that `lmcore data merge` accepts."""
    return _foreign({}, MERGE_FIXED, {})


def _foreign(
    renamed: Mapping[str, Renamed], fixed: Mapping[str, Fixed], unsupported: Mapping[str, str]
) -> dict[str, ForeignFlag]:
    flags: dict[str, ForeignFlag] = {}
    for name, rename in renamed.items():
        whole = rename.whole
        if whole is None:
            whole = " " in rename.replacement or rename.replacement in SWITCHES
        arity = "1" if rename.only else ("0" if whole else "+")
        flags[name] = ForeignFlag(
            arity, functools.partial(_rename, name, rename), rename.replacement
        )
    for name, same in fixed.items():
        arity = "0" if same.only == () else ("1" if same.only else "?")
        flags[name] = ForeignFlag(arity, functools.partial(_accept, name, same))
    for name, hint in unsupported.items():
        flags[name] = ForeignFlag(
            "*",
            functools.partial(_refuse, name, hint),
            its_values=frozenset(VALUES_OF_ANOTHER_PROGRAM.get(name, ())),
        )
    return flags


def _rename(name: str, rename: Renamed, values: tuple[str, ...]) -> Translation:
    if rename.only and values[0] not in rename.only:
        return _refuse(name, rename.hint, values)
    passed = () if rename.only else values
    return Translation((*rename.replacement.split(), *passed), yields=rename.yields)


def _accept(name: str, same: Fixed, values: tuple[str, ...]) -> Translation:
    if same.only and values[0] not in same.only:
        return _refuse(name, same.hint, values)
    return Translation(no_effect=same.note)


def _refuse(name: str, hint: str, values: tuple[str, ...]) -> Translation:
    error = UnsupportedFlagError(f"`{' '.join((name, *values))}` is not supported", hint=hint)
    error.alone = name in OF_ANOTHER_PROGRAM
    return Translation(problem=error)
