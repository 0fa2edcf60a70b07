"""Table of the kernels for an Intel GPU; torch-free until a case is resolved.

The priorities are estimates, not measurements; see docs/reference/xpu-kernels.md.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence

from lmcore.contract import Device, OpContext, OpImpl, Reject
from lmcore.contract.op.packages import UsablePackages
from lmcore.contract.op.rules import HALF, dtypes, eager, package, supports
from lmcore_xpu.packages import EXTENSION, PACKAGES, TRITON, packages_of

__all__ = ["compiler_problem", "kernels_for", "op_impls", "triton_kernels"]

_TORCH = "lmcore.contract.op.torch_kernels"
_EXTENSION = "lmcore_xpu.kernel.ipex"
_PLAIN = frozenset({"deterministic"})
_FUSED = frozenset({"deterministic", "fused"})
_TRITON_PRIORITY = 16
"""Before torch's own kernels (10), as on other GPUs."""

_COMPILERS = ("icpx", "clang++", "g++")
"""Compilers, besides `$CXX`, with which Triton builds the launchers of its kernels."""


def op_impls(device: Device) -> list[OpImpl]:
    """Return every kernel on offer for a device, the Triton ones where their package is there."""
    usable = UsablePackages(packages_of(device), lambda name: PACKAGES[name].import_problem())
    return [*kernels_for(usable), *triton_kernels(device, usable)]


def kernels_for(usable: UsablePackages) -> list[OpImpl]:
    """Return the kernels of torch and of Intel's extension for it."""
    return [*_of_torch(), *_of_extension(usable)]


def _of_torch() -> list[OpImpl]:
    names = ("layer_norm", "rms_norm", "cross_entropy")
    plain = ("bias_gelu", "swiglu", "bias_dropout_add", "scaled_masked_softmax", "rotary_embedding")
    return [
        # While deterministic algorithms are on, torch takes none of its kernels that are not.
        OpImpl(
            "attention",
            "sdpa",
            "lmcore_xpu.kernel.attention_sdpa:attention",
            traits=_FUSED | {"score_bias", "score_bias_gradient"},
        ),
        OpImpl("linear", "onednn", f"{_TORCH}:linear", traits=_PLAIN),
        *(OpImpl(name, "torch", f"{_TORCH}:{name}", traits=_FUSED) for name in names),
        *(OpImpl(name, "torch", f"{_TORCH}:{name}", traits=_PLAIN) for name in plain),
        OpImpl("adamw", "fused", f"{_TORCH}:adamw", traits=_FUSED),
        OpImpl("grad_norm", "foreach", f"{_TORCH}:grad_norm", traits=_PLAIN),
    ]


def _of_extension(usable: UsablePackages) -> list[OpImpl]:
    # Its import replaces ops of torch's for the whole process, and so is no way to ask about it.
    rules = (dtypes(*HALF, "float32"), eager, package(usable, EXTENSION, load=False))
    return [
        OpImpl(
            op,
            "ipex",
            f"{_EXTENSION}:{op}",
            priority=5,  # after torch's: none of them has run on a GPU
            requires=("intel_extension_for_pytorch",),
            supports=supports(*rules),
        )
        for op in ("layer_norm", "rms_norm", "rotary_embedding", "swiglu")
    ]


def triton_kernels(device: Device, usable: UsablePackages) -> list[OpImpl]:
    """Return the kernels of the sister package `lmcore_triton`, where it is installed."""
    if importlib.util.find_spec("lmcore_triton") is None:
        return []
    offers: Callable[..., Sequence[OpImpl]]
    offers = importlib.import_module("lmcore_triton.offers").op_impls
    offered = offers("xpu", dtypes=device.dtypes, priority=_TRITON_PRIORITY)
    further = supports(_compiler, package(usable, TRITON))
    return [_also(impl, further) for impl in offered]


def _also(impl: OpImpl, further: Callable[[OpContext], Reject | None]) -> OpImpl:
    """Return a kernel with a further rule, after its own."""
    own = impl.supports
    assert own is not None

    def both(context: OpContext) -> Reject | None:
        return own(context) or further(context)

    return dataclasses.replace(impl, supports=both)


def _compiler(context: OpContext) -> str | None:
    """Refuse hosts on which Triton cannot build what launches its kernels."""
    return compiler_problem()


def compiler_problem() -> str | None:
    """Return why Triton cannot build what launches its kernels; None if it can."""
    if any(shutil.which(name) for name in (os.environ.get("CXX"), *_COMPILERS) if name):
        return None
    names = ", ".join(f"`{name}`" for name in _COMPILERS)
    return f"Triton needs a C++ compiler: there is none of `$CXX`, {names}"
