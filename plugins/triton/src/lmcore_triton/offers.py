"""Records of these kernels, with the cases that they decline, for a device's plugin to offer.

Torch-free, and Triton-free too: Triton is looked for when a kernel is considered, and loaded when
one is bound.

`EXPECTED` has the expected speed of each kernel, `IN_COMPILED` the kernels for compiled
blocks.  Neither has been measured yet; `benchmarks/gpu_kernels.py` does.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

from lmcore.contract import OpContext, OpImpl, Reject

__all__ = ["EXPECTED", "ID", "IN_COMPILED", "WIDEST_NORM", "WIDEST_SOFTMAX", "op_impls"]

ID = "triton"
"""The id of every kernel."""

WIDEST_NORM = 8192
"""Most channels of a row that the normalizations keep in registers: their backward pass has five
values of each there, and from the next power of two on some would go to memory."""

WIDEST_SOFTMAX = 32768
"""Most scores of a row that the softmax keeps in registers."""

OLDEST_CAPABILITY = (8, 0)
"""The first compute capability that Triton's compiler is made for."""

EXPECTED: Mapping[str, str] = MappingProxyType(
    {
        "layer_norm": "Against the reference: 3 to 6 times as fast, one pass of memory each way. "
        "Against a compiled one: forward equal or slower if the compiler fuses it with the "
        "addition before; backward up to 1.3 times as fast, as it reads x once and not twice.",
        "rms_norm": "As layer_norm.",
        "bias_gelu": "Against the reference: 3 to 5 times as fast. Against a compiled one: equal "
        "forward; backward up to 1.3 times as fast, as the bias's sum is taken on the way.",
        "swiglu": "Against the reference: 3 to 5 times as fast. Against a compiled one: equal.",
        "bias_dropout_add": "Against the reference: 2 to 4 times as fast, and no mask is kept. "
        "Against a compiled one: equal or slower, as the compiler fuses it with the norm after it.",
        "scaled_masked_softmax": "Against the reference: 2 to 4 times as fast with a mask. Against "
        "a compiled one: equal.",
        "rotary_embedding": "Against the reference: 3 to 5 times as fast. Against a compiled one: "
        "equal or slower, as the compiler fuses it with the copy of the heads.",
        "cross_entropy": "Against the reference: 3 to 5 times as fast, and no copy of the logits "
        "in float32. Against a compiled one: equal.",
        "linear_cross_entropy": "Against the reference, compiled or not: up to 1.5 times as fast, "
        "and the logits of at most 512 MiB are in memory, instead of all of them several times.",
    }
)
"""Expected gain of each kernel by the bytes that it reads and writes; not measured."""

IN_COMPILED = frozenset({"linear_cross_entropy"})
"""Ops whose kernels are offered to compiled blocks by default: no compiler joins their steps."""

_TARGETS = MappingProxyType(
    {
        "layer_norm": "lmcore_triton.norm:layer_norm",
        "rms_norm": "lmcore_triton.norm:rms_norm",
        "bias_gelu": "lmcore_triton.activation:bias_gelu",
        "swiglu": "lmcore_triton.activation:swiglu",
        "bias_dropout_add": "lmcore_triton.dropout:bias_dropout_add",
        "scaled_masked_softmax": "lmcore_triton.softmax:scaled_masked_softmax",
        "rotary_embedding": "lmcore_triton.rotary:rotary_embedding",
        "cross_entropy": "lmcore_triton.cross_entropy:cross_entropy",
        "linear_cross_entropy": "lmcore_triton.linear_cross_entropy:linear_cross_entropy",
    }
)

_ROW_OF = MappingProxyType(
    {
        "layer_norm": ("hidden_size", WIDEST_NORM, "channels"),
        "rms_norm": ("hidden_size", WIDEST_NORM, "channels"),
        "scaled_masked_softmax": ("seq_length", WIDEST_SOFTMAX, "scores"),
    }
)
"""For the kernels that keep a row in registers: the attribute that has its length, the most of
that, and what it counts."""

_DTYPES = ("float32", "bfloat16", "float16")


def op_impls(
    device_type: str,
    *,
    dtypes: Collection[str] = _DTYPES,
    capability: tuple[int, int] | None = None,
    in_compiled: Collection[str] = IN_COMPILED,
    priority: int = 10,
) -> list[OpImpl]:
    """Return the kernels for a device, for that device's plugin.

    Args:
        device_type: torch's device type; other ones are rejected.
        dtypes: Names of the dtypes that the device computes in itself.
        capability: Compute capability, if the vendor has such a number.
        in_compiled: Ops whose kernel is offered to compiled blocks too.
        priority: Priority of all kernels; `linear_cross_entropy` has ten more.
    """

    def supports(op: str) -> Callable[[OpContext], Reject | None]:
        def verdict(context: OpContext) -> Reject | None:
            reason = _device_problem(context, device_type, dtypes, capability)
            reason = reason or _case_problem(op, context, in_compiled)
            return None if reason is None else Reject(reason)

        return verdict

    return [
        OpImpl(
            op,
            ID,
            target,
            priority=priority + (10 if op == "linear_cross_entropy" else 0),
            requires=("triton",),
            supports=supports(op),
            traits=frozenset({"deterministic", "fused"}),
        )
        for op, target in _TARGETS.items()
    ]


def _device_problem(
    context: OpContext,
    device_type: str,
    dtypes: Collection[str],
    capability: tuple[int, int] | None,
) -> str | None:
    """Return why nothing can be launched for this device and dtype."""
    if context.device_type != device_type:
        return f"is for `{device_type}`, not `{context.device_type}`"
    if context.dtype not in _DTYPES:
        return f"computes in float32, which {context.dtype} is not for"
    if context.dtype not in dtypes:
        return f"this device does not compute in {context.dtype}"
    if capability is not None and capability < OLDEST_CAPABILITY:
        found, oldest = (f"{major}.{minor}" for major, minor in (capability, OLDEST_CAPABILITY))
        return f"Triton compiles for compute capability {oldest} and newer, this device has {found}"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler: neither `$CC` nor `gcc` nor `clang` is there"
    return None


def _case_problem(op: str, context: OpContext, in_compiled: Collection[str]) -> str | None:
    """Return why the kernel of *op* does not do this case, or should not."""
    if op in _ROW_OF:
        name, most, what = _ROW_OF[op]
        length = context.attributes.get(name, 0)
        if length > most:
            return f"keeps a row in registers, at most {most} {what}; here are {length}"
    if context.attributes.get("compile") and op not in in_compiled:
        return "is not for compiled blocks: the compiler fuses the reference with what is around it"
    return None
