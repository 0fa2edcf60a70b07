"""Binds ops for one model: the device, dtype and flags that all of its binds have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcore.accelerator.op import OpContext

if TYPE_CHECKING:
    from lmcore.accelerator.op import OpTable

__all__ = ["OpBinding"]


@dataclass(frozen=True)
class OpBinding:
    """An op table with the part of the context that does not change within a model."""

    table: OpTable
    device_type: str
    dtype: str
    compile: bool = False

    def bind(self, op: str, **attributes: Any) -> Callable[..., Any]:
        """Return the callable for *op*; *attributes* say what is special about this use of it."""
        context = OpContext(self.device_type, self.dtype, {**attributes, "compile": self.compile})
        return self.table.bind(op, context)
