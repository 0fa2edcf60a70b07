"""Files of Megatron and its forks, in which every object of a program is read as an inert record.

Beside tensors such a file holds the command's `argparse.Namespace`, members of Megatron's enums and
the states of random generators.  Each name of a program that the file may contain becomes a
`Record`, which keeps what was stored and runs nothing; any other name is refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch

from lmcore.base.bounded_file import open_regular
from lmcore.base.errors import CheckpointError
from lmcore.conversion.foreign_pickle.load import load_tensors, only_allowed

__all__ = ["Record", "load_content", "values_of"]

_NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")
_PACKAGES = ("megatron.", "transformer_engine.", "deepspeed.", "fp16.")
"""Packages whose objects become records, whatever their names."""
_OTHERS = (
    *_NAMESPACES,
    "_io.BytesIO",
    "signal.Signals",
    "pathlib.Path",
    "pathlib.PosixPath",
    "numpy.dtype",
    "numpy.ndarray",
    *(
        f"numpy.{module}.multiarray.{name}"
        for module in ("core", "_core")
        for name in ("_reconstruct", "scalar")
    ),
    "megatron.fp16.loss_scaler.DynamicLossScaler",
    "megatron.model.enums.PositionEmbeddingType",
    "megatron.enums.PositionEmbeddingType",
    "megatron.model.enums.ModelType",
)


class Record:
    """Object of another program as its file stores it.

    Attributes:
        kind: Full name of the class or function.
        args: Arguments with which the object was made; the value of an enum's member.
        state: State that was set afterwards; None without one.
    """

    kind = ""

    def __new__(cls, *_args: Any) -> Self:
        """Return a record, whatever the other program passed."""
        return super().__new__(cls)

    def __init__(self, *args: Any) -> None:
        """Keep the arguments."""
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        """Keep the state."""
        self.state = state

    def __str__(self) -> str:
        """Return the name and the value, as in an error message."""
        value = self.__dict__.get("args", ())
        return f"{self.kind}({', '.join(str(one) for one in value)})"


def values_of(record: object) -> Mapping[str, Any] | None:
    """Return the values of a stored namespace or configuration; None if it is something else."""
    if isinstance(record, Record):
        record = record.__dict__.get("state")
    return record if isinstance(record, dict) else None


def load_content(path: Path, *, compare: bool = True) -> Mapping[str, Any]:
    """Return the content of a file of Megatron or a fork, with its tensors memory-mapped.

    Args:
        path: Path of the file.
        compare: True to compare its checksums, which reads all of it.

    Raises:
        CheckpointError: It is damaged, or names anything outside the format.
    """
    named = set(_OTHERS)
    named |= {name for name in _names_in(path) if name.startswith(_PACKAGES)}
    allowed: list[Any] = [
        (type(name.rpartition(".")[2], (Record,), {"kind": name}), name) for name in sorted(named)
    ]
    allowed.append((_member, "builtins.getattr"))
    content = load_tensors(path, allowed=allowed, compare=compare)
    if not isinstance(content, dict):
        raise CheckpointError(
            f"`{path}` is damaged",
            why=f"it has `{type(content).__name__}` instead of a mapping of names to values",
            hint="copy the file again from the checkpoint",
        )
    return content


def _member(owner: object, name: object) -> Record:
    """Replace `getattr`, with which Python 3.11.0 to 3.11.3 pickle an enum's member."""
    if not (isinstance(owner, type) and issubclass(owner, Record)):
        raise TypeError("an attribute of something else than a record is read")
    return owner(name)


def _names_in(path: Path) -> list[str]:
    """Return the names of classes and functions in a file; none if it is of torch's older format.

    `load_tensors` reports what is wrong with a file whose names cannot be listed.
    """
    try:
        os.close(open_regular(path))
        with only_allowed(()):
            return torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except Exception:  # noqa: BLE001 - a damaged file fails in many ways
        return []
