"""Binding of a model's ops to kernels, for one device type and dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmcore.contract.op.context import op_context

if TYPE_CHECKING:
    from lmcore.contract.op.table import OpTable

__all__ = ["OpBinding"]


@dataclass(frozen=True)
class OpBinding:
    """Op table with the part of the context that is the same for all ops of a model.

    Attributes:
        table: Op table of the run.
        device_type: Device type that the kernels run on.
        dtype: Name of the dtype of activations.
        compile: True if the layers will be compiled.
    """

    table: OpTable
    device_type: str
    dtype: str
    compile: bool = False

    def bind(self, op: str, **attributes: Any) -> Callable[..., Any]:
        """Return the kernel of an op for given attributes.

        Args:
            op: Name of the op.
            attributes: All attributes that the op's spec declares, by the names of `OpAttributes`;
                `compile`, `score_bias` and `score_bias_gradient` may be left out.
        """
        spec = self.table.specs[op]
        # Families of plugins may lack these.
        usual = {"compile": self.compile, "score_bias": None, "score_bias_gradient": None}
        values = {name: usual[name] for name in usual if name in spec.attributes} | attributes
        assert values.keys() == set(spec.attributes), f"`{op}` is bound with {sorted(values)}"
        return self.table.bind(op, op_context(spec, self.device_type, self.dtype, values))
