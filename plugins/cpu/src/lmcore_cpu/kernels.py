"""Table of the kernels that the CPU plugin offers; torch-free, so that it can be read anywhere.

All of them give the same bits in each run with the same number of threads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from lmcore.contract import OpContext, OpImpl, Reject
from lmcore.contract.torch_versions import GROUPED_CPU_ATTENTION
from lmcore_cpu import ipex
from lmcore_cpu.kernel.native import ACTIVATION_COLUMNS, SEQUENCE_CHANNELS
from lmcore_cpu.kernel.processor import facts

__all__ = ["IPEX_KERNELS", "KERNELS", "kernels"]

Supports = Callable[[OpContext], Reject | None]
_DETERMINISTIC = frozenset({"deterministic"})
_FUSED = frozenset({"deterministic", "fused"})
_OPS = "lmcore.contract.op.torch_kernels"
_ELEMENTWISE = "lmcore_cpu.kernel.elementwise"


def _one_dtype(context: OpContext) -> Reject | None:
    """Refuse half precision: the fused step reads weights, gradients and moments as one type."""
    if context.dtype in {"float32", "float64"}:
        return None
    return Reject(f"updates float32 and float64 weights, not {context.dtype}")


def _float32(context: OpContext) -> Reject | None:
    """Refuse other dtypes, for which the reference is torch's function, too."""
    if context.dtype == "float32":
        return None
    return Reject(f"computes in float32, not {context.dtype}")


def _onednn(context: OpContext) -> Reject | None:
    """Refuse other dtypes, and a build of torch without oneDNN's product."""
    if (reject := _float32(context)) is not None:
        return reject
    return None if facts().onednn else Reject("this build of torch has no oneDNN product")


def _blas(context: OpContext) -> Reject | None:
    """Refuse other dtypes, and a build of torch without MKL on processors on which MKL is first."""
    if (reject := _float32(context)) is not None or not facts().prefers_mkl:
        return reject
    return None if facts().mkl else Reject("this build of torch has no MKL")


def _eager(supports: Supports, other: str) -> Supports:
    """Return a function that refuses compiled blocks, which have the variant *other*."""

    def check(context: OpContext) -> Reject | None:
        if context.attributes.get("compile"):
            return Reject(f"is not for compiled blocks; `{other}` is")
        return supports(context)

    return check


def _compiled(supports: Supports, other: str) -> Supports:
    """Return a function that refuses blocks that are not compiled, which have *other*."""

    def check(context: OpContext) -> Reject | None:
        if not context.attributes.get("compile"):
            return Reject(f"is for compiled blocks; `{other}` is the same without a compiler")
        return supports(context)

    return check


def _narrow(context: OpContext) -> Reject | None:
    """Refuse other dtypes, and processors that emulate them."""
    if context.dtype != "bfloat16":
        return Reject(f"computes in bfloat16, not {context.dtype}")
    if not facts().bfloat16_products:
        return Reject("this processor has no products of bfloat16")
    return None


def _blocked(context: OpContext) -> Reject | None:
    """Refuse cases that torch's fused attention is as fast for."""
    attributes = context.attributes
    plain = attributes.get("causal", True) and not attributes.get("masked")
    if not attributes.get("dropout") and not (plain and context.dtype == "float32"):
        return Reject("is for dropout, and for causal attention in float32 without a mask")
    return _uncompiled(context)


def _sequences(context: OpContext) -> Reject | None:
    """Refuse what the kernel of whole sequences does not compute."""
    attributes = context.attributes
    if context.dtype not in {"float32", "bfloat16"}:
        return Reject(f"computes in float32 and bfloat16, not {context.dtype}")
    if attributes.get("dropout") or attributes.get("masked"):
        return Reject("is for attention without dropout and without a mask")
    if attributes.get("head_dim", SEQUENCE_CHANNELS) % SEQUENCE_CHANNELS:
        return Reject(f"is for heads of a multiple of {SEQUENCE_CHANNELS} channels")
    if not facts().attends_sequences(context.dtype):
        return Reject(f"there is no compiled kernel for {context.dtype} on this processor")
    return None


def _activation(context: OpContext) -> Reject | None:
    """Refuse other dtypes, sizes that leave a vector in part, and no kernel."""
    if context.dtype not in {"float32", "bfloat16"}:
        return Reject(f"computes in float32 and bfloat16, not {context.dtype}")
    if context.attributes.get("ffn_hidden_size", ACTIVATION_COLUMNS) % ACTIVATION_COLUMNS:
        return Reject(f"is for a multiple of {ACTIVATION_COLUMNS} channels")
    if facts().kernels is None:
        return Reject("there is no compiled kernel for this processor")
    return None


def _uncompiled(context: OpContext) -> Reject | None:
    """Refuse compiled blocks, whose compiler fuses the reference with the surrounding code."""
    if context.attributes.get("compile"):
        return Reject("is not for compiled blocks: the compiler fuses the reference itself")
    return None


KERNELS: tuple[OpImpl, ...] = (
    OpImpl(
        "attention",
        "native",
        "lmcore_cpu.kernel.sequence_attention:attention",
        priority=16,
        supports=_eager(_sequences, "native-compile"),
        traits=_FUSED,
    ),
    OpImpl(
        "attention",
        "native-compile",
        "lmcore_cpu.kernel.beside_compiled:attention",
        priority=16,
        supports=_compiled(_sequences, "native"),
        traits=_FUSED,
    ),
    OpImpl(
        "attention",
        "blocked",
        "lmcore_cpu.kernel.attention:attention",
        priority=15,
        supports=_blocked,
        traits=_FUSED,
    ),
    OpImpl(
        "attention",
        "sdpa",
        f"{_OPS}:attention" if GROUPED_CPU_ATTENTION else f"{_OPS}:attention_expanded",
        traits=_FUSED | {"score_bias", "score_bias_gradient"},
    ),
    OpImpl("layer_norm", "torch", f"{_OPS}:layer_norm", traits=_FUSED),
    OpImpl(
        "rms_norm",
        "closed-form",
        "lmcore_cpu.kernel.rms_norm:rms_norm",
        supports=_uncompiled,
        traits=_FUSED,
    ),
    OpImpl(
        "linear",
        "onednn",
        "lmcore_cpu.kernel.linear:linear",
        supports=_eager(_onednn, "onednn-compile"),
        traits=_DETERMINISTIC,
    ),
    OpImpl(
        "linear",
        "onednn-compile",
        "lmcore_cpu.kernel.beside_compiled:linear",
        supports=_compiled(_onednn, "onednn"),
        traits=_DETERMINISTIC,
    ),
    OpImpl(
        "linear",
        "torch",
        f"{_OPS}:linear",
        priority=5,
        supports=_blas,
        traits=_DETERMINISTIC,
    ),
    OpImpl(
        "linear",
        "bfloat16",
        "lmcore_cpu.kernel.linear:narrow_linear",
        supports=_eager(_narrow, "bfloat16-compile"),
        traits=_DETERMINISTIC,
    ),
    OpImpl(
        "linear",
        "bfloat16-compile",
        "lmcore_cpu.kernel.beside_compiled:narrow_linear",
        supports=_compiled(_narrow, "bfloat16"),
        traits=_DETERMINISTIC,
    ),
    OpImpl(
        "bias_gelu",
        "native",
        "lmcore_cpu.kernel.activation:bias_gelu",
        priority=15,
        supports=_eager(_activation, "native-compile"),
        traits=_FUSED,
    ),
    OpImpl(
        "bias_gelu",
        "native-compile",
        "lmcore_cpu.kernel.beside_compiled:bias_gelu",
        priority=15,
        supports=_compiled(_activation, "native"),
        traits=_FUSED,
    ),
    OpImpl("bias_gelu", "torch", f"{_OPS}:bias_gelu", traits=_DETERMINISTIC),
    OpImpl(
        "swiglu",
        "native",
        "lmcore_cpu.kernel.activation:swiglu",
        priority=15,
        supports=_eager(_activation, "native-compile"),
        traits=_FUSED,
    ),
    OpImpl(
        "swiglu",
        "native-compile",
        "lmcore_cpu.kernel.beside_compiled:swiglu",
        priority=15,
        supports=_compiled(_activation, "native"),
        traits=_FUSED,
    ),
    OpImpl("swiglu", "in-place", f"{_ELEMENTWISE}:swiglu", supports=_uncompiled, traits=_FUSED),
    OpImpl(
        "bias_dropout_add",
        "in-place",
        f"{_ELEMENTWISE}:bias_dropout_add",
        supports=_uncompiled,
        traits=_DETERMINISTIC,
    ),
    OpImpl(
        "rotary_embedding",
        "in-place",
        f"{_ELEMENTWISE}:rotary_embedding",
        supports=_uncompiled,
        traits=_FUSED,
    ),
    OpImpl(
        "scaled_masked_softmax",
        "in-place",
        "lmcore_cpu.kernel.softmax:scaled_masked_softmax",
        supports=_uncompiled,
        traits=_FUSED,
    ),
    OpImpl("cross_entropy", "torch", f"{_OPS}:cross_entropy", traits=_FUSED),
    OpImpl(
        "linear_cross_entropy",
        "chunked",
        "lmcore_cpu.kernel.linear_cross_entropy:linear_cross_entropy",
        priority=20,
        traits=_FUSED,
    ),
    OpImpl("adamw", "fused", "lmcore_cpu.kernel.adamw:adamw", supports=_one_dtype, traits=_FUSED),
    OpImpl("grad_norm", "foreach", f"{_OPS}:grad_norm", traits=_DETERMINISTIC),
)


def _ipex(context: OpContext) -> Reject | None:
    """Refuse other dtypes, compiled blocks, and a package that does not fit; loads nothing."""
    if context.dtype not in {"float32", "bfloat16"}:
        return Reject(f"computes in float32 and bfloat16, not {context.dtype}")
    if context.attributes.get("compile"):
        return Reject("is not for compiled blocks: the compiler cannot follow it")
    problem = ipex.misfit()
    return None if problem is None else Reject(problem)


IPEX_KERNELS = tuple(
    OpImpl(op, "ipex", f"lmcore_cpu.kernel.ipex:{op}", priority=12, supports=_ipex, traits=_FUSED)
    for op in ("rms_norm", "rotary_embedding")
)
"""Kernels of Intel's extension for PyTorch, where it is installed: faster than the others."""


def kernels() -> list[OpImpl]:
    """Return the tables with the priorities of this processor, and of the installed packages."""
    own = [
        dataclasses.replace(kernel, priority=15)
        if kernel.supports is _blas and facts().prefers_mkl
        else kernel
        for kernel in KERNELS
    ]
    return [*own, *(IPEX_KERNELS if ipex.package() is not None else ())]
