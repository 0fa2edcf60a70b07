"""The kernels that the CPU plugin offers; torch-free, so that the table can be read anywhere.

All of them give the same bits in each run with the same number of threads.
"""

from __future__ import annotations

from lmcore.accelerator import OpContext, OpImpl, Reject

__all__ = ["KERNELS"]

_DETERMINISTIC = frozenset({"deterministic"})
_FUSED = frozenset({"deterministic", "fused"})
_OPS = "lmcore_cpu.ops"


def _one_dtype(context: OpContext) -> Reject | None:
    """Refuse half precision: the fused step reads weights, gradients and moments as one type."""
    if context.dtype in {"float32", "float64"}:
        return None
    return Reject(f"updates float32 and float64 weights, not {context.dtype}")


KERNELS: tuple[OpImpl, ...] = (
    OpImpl("attention", "sdpa", f"{_OPS}:attention", traits=_FUSED),
    OpImpl("layer_norm", "torch", f"{_OPS}:layer_norm", traits=_FUSED),
    OpImpl("rms_norm", "torch", f"{_OPS}:rms_norm", traits=_FUSED),
    OpImpl("bias_gelu", "torch", f"{_OPS}:bias_gelu", traits=_DETERMINISTIC),
    OpImpl("cross_entropy", "torch", f"{_OPS}:cross_entropy", traits=_FUSED),
    OpImpl(
        "linear_cross_entropy",
        "chunked",
        "lmcore_cpu.linear_cross_entropy:linear_cross_entropy",
        priority=20,
        traits=_FUSED,
    ),
    OpImpl("adamw", "fused", f"{_OPS}:adamw", supports=_one_dtype, traits=_FUSED),
    OpImpl("grad_norm", "foreach", f"{_OPS}:grad_norm", traits=_DETERMINISTIC),
)
