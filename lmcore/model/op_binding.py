"""Binds ops for one model: the device, dtype and flags that all of its binds have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcore.accelerator.op.context import op_context

if TYPE_CHECKING:
    from lmcore.accelerator.op.table import OpTable

__all__ = ["OpBinding"]


@dataclass(frozen=True)
class OpBinding:
    """An op table with the part of the context that does not change within a model."""

    table: OpTable
    device_type: str
    dtype: str
    compile: bool = False

    def bind(self, op: str, **attributes: Any) -> Callable[..., Any]:
        """Return the callable for *op* in the case that *attributes* describe.

        The words are those of `OpAttributes`; an op gets all that its spec declares, and no other.
        """
        spec = self.table.specs[op]
        values = {"compile": self.compile, **attributes} if spec.attributes else attributes
        assert values.keys() == set(spec.attributes), f"`{op}` is bound with {sorted(values)}"
        return self.table.bind(op, op_context(spec, self.device_type, self.dtype, values))
