"""Table of the kernels that this plugin offers for a GPU; torch-free until a case is resolved.

Attention has a separate table, `lmcore_cuda.attention.table`.  The priorities are estimates, not
measurements; see docs/reference/cuda-kernels.md.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence

from lmcore.contract import Device, OpImpl
from lmcore.contract.op.rules import HALF, Rule, dtypes, eager, supports
from lmcore_cuda.attention.table import attention_impls
from lmcore_cuda.kernel.rules import Gpu, capability, least_version, package
from lmcore_cuda.packages import packages_of

__all__ = ["capability_of", "gpu_of", "kernels_for", "op_impls"]

_TORCH = "lmcore.contract.op.torch_kernels"
_APEX = "lmcore_cuda.kernel.apex"
_LIGER = "lmcore_cuda.kernel.liger"
_ENGINE = "lmcore_cuda.kernel.transformer_engine"
_PLAIN = frozenset({"deterministic"})
_FUSED = frozenset({"deterministic", "fused"})
_TRITON_PRIORITY = 16
"""Priority above torch's own kernels (10) and liger-kernel's (15), below apex's (20)."""


def op_impls(device: Device) -> list[OpImpl]:
    """Return all kernels for a device; Triton's if `lmcore_triton` is installed."""
    return [*kernels_for(gpu_of(device)), *_triton(device)]


def gpu_of(device: Device) -> Gpu:
    """Return the facts of a device that the rules use."""
    return Gpu(capability_of(device), packages_of(device))


def capability_of(device: Device) -> tuple[int, int]:
    """Return the compute capability, (major, minor)."""
    major, _, minor = str(device.facts["capability"]).partition(".")
    return int(major), int(minor or 0)


def _triton(device: Device) -> Sequence[OpImpl]:
    """Return the kernels of the package `lmcore_triton`, if it is installed."""
    if importlib.util.find_spec("lmcore_triton") is None:
        return ()
    offers: Callable[..., Sequence[OpImpl]]
    offers = importlib.import_module("lmcore_triton.offers").op_impls
    return offers(
        "cuda",
        dtypes=device.dtypes,
        capability=capability_of(device),
        priority=_TRITON_PRIORITY,
    )


def kernels_for(gpu: Gpu) -> list[OpImpl]:
    """Return the kernels of torch and of the kernel packages."""
    return [
        *attention_impls(gpu),
        *_of_torch(),
        *_of_apex(gpu),
        *_of_liger(gpu),
        *_of_transformer_engine(gpu),
    ]


def _of_torch() -> list[OpImpl]:
    names = ("layer_norm", "rms_norm", "cross_entropy")
    plain = ("bias_gelu", "swiglu", "bias_dropout_add", "scaled_masked_softmax", "rotary_embedding")
    return [
        OpImpl("linear", "cublas", f"{_TORCH}:linear", traits=_PLAIN),
        *(OpImpl(name, "torch", f"{_TORCH}:{name}", traits=_FUSED) for name in names),
        *(OpImpl(name, "torch", f"{_TORCH}:{name}", traits=_PLAIN) for name in plain),
        OpImpl("adamw", "fused", f"{_TORCH}:adamw", traits=_FUSED),
        OpImpl("grad_norm", "foreach", f"{_TORCH}:grad_norm", traits=_PLAIN),
    ]


def _of_apex(gpu: Gpu) -> list[OpImpl]:
    fits = package(gpu, "apex")
    single = dtypes("float32")
    any_of = dtypes(*HALF, "float32")

    def offer(op: str, name: str, traits: frozenset[str], *rules: Rule) -> OpImpl:
        check = supports(*rules, fits)
        target = f"{_APEX}:{op}"
        return OpImpl(op, name, target, 20, requires=("apex",), supports=check, traits=traits)

    return [
        offer("adamw", "apex-fused-adam", _FUSED, single),
        offer("grad_norm", "apex-l2norm", _PLAIN, any_of),
        offer("layer_norm", "apex", _FUSED, any_of, eager),
        offer("rms_norm", "apex", _FUSED, any_of, eager),
    ]


def _of_liger(gpu: Gpu) -> list[OpImpl]:
    rules = (
        dtypes(*HALF, "float32"),
        eager,
        capability(gpu, (8, 0)),
        least_version(gpu, "liger-kernel", "0.8.5"),
        package(gpu, "liger-kernel"),
    )
    # A fused swiglu against two passes of torch's; for the others torch has one kernel too, and
    # both losses here make the host wait for the device.
    priorities = {
        "swiglu": 15,
        "rms_norm": 8,
        "layer_norm": 8,
        "linear_cross_entropy": 5,
        "cross_entropy": 5,
    }
    return [
        OpImpl(
            op,
            "liger",
            f"{_LIGER}:{op}",
            priority=priority,
            requires=("liger_kernel",),
            supports=supports(*rules),
            traits=frozenset({"fused"}),
        )
        for op, priority in priorities.items()
    ]


def _of_transformer_engine(gpu: Gpu) -> list[OpImpl]:
    rules = (
        dtypes(*HALF, "float32"),
        eager,
        capability(gpu, (8, 0)),
        least_version(gpu, "transformer-engine", "2.0"),
        package(gpu, "transformer-engine"),
    )
    return [
        OpImpl(
            op,
            "transformer-engine",
            f"{_ENGINE}:{op}",
            priority=6,
            requires=("transformer_engine",),
            supports=supports(*rules),
            traits=frozenset({"fused"}),
        )
        for op in ("layer_norm", "rms_norm")
    ]
