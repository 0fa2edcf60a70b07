"""Table of attention kernels: supported cases and priorities; torch-free.

No figure here was measured on a GPU: the order follows what the authors of the kernels
published for each generation, and docs/reference/cuda-kernels.md says so.
"""

from __future__ import annotations

from lmcore.contract import OpContext, OpImpl
from lmcore.contract.op.rules import (
    HALF,
    Rule,
    dtypes,
    eager,
    head_dim,
    no_dropout,
    supports,
    unmasked,
)
from lmcore.contract.torch_versions import ATTENTION_KERNELS, ATTENTION_RESULTS
from lmcore_cuda.kernel.rules import Gpu, capability, is_older, least_version, package

__all__ = ["attention_impls"]

_SDPA = "lmcore_cuda.attention.sdpa"
_FUSED = frozenset({"fused"})
_REPEATABLE = frozenset({"deterministic", "fused"})
_AMPERE = (8, 0)
_HOPPER = (9, 0)
_FLASH4_LEAST = "4.0.0b12"
_FLASH4_MORE_RESULTS = "4.0.0b19"
"""First version whose `_flash_attn_fwd`, which torch calls, returns more than output and lse."""


def _compiled(context: OpContext) -> str | None:
    """Refuse uncompiled blocks, for which the package's own function has less overhead."""
    if context.attributes.get("compile"):
        return None
    return "is for compiled blocks; in others the package's own function has less overhead"


def _masked(context: OpContext) -> str | None:
    """Refuse cases without a mask, which simpler kernels do faster."""
    return None if context.attributes.get("masked") else "is for masks; this case has none"


def _activates(name: str) -> str | None:
    """Return why torch cannot take a flash-attention of another version; None if it can."""
    from torch.nn import attention

    if not ATTENTION_KERNELS:
        return f"needs torch {ATTENTION_KERNELS.since} or newer"
    known = attention.list_flash_attention_impls()
    return None if name in known else f"this torch knows no `{name}`, only {', '.join(known)}"


def _fa3(context: OpContext) -> str | None:
    return _activates("FA3")


def _fa4(gpu: Gpu) -> Rule:
    """Refuse versions whose `_flash_attn_fwd` has more results than torch takes."""

    def rule(context: OpContext) -> str | None:
        problem = _activates("FA4")
        if problem or ATTENTION_RESULTS or is_older(gpu, "flash-attn-4", _FLASH4_MORE_RESULTS):
            return problem
        return (
            f"needs torch {ATTENTION_RESULTS.since} or newer, or `flash-attn-4` before "
            f"{_FLASH4_MORE_RESULTS}"
        )

    return rule


def _flash4_head_dim(gpu: Gpu) -> Rule:
    """Refuse head sizes that version 4 does not support forward and backward on this generation."""
    return head_dim(256 if gpu.capability[0] == 9 else 128)


def attention_impls(gpu: Gpu) -> list[OpImpl]:
    """Return the attention kernels for a GPU."""
    return [*_of_torch(gpu), *_of_packages(gpu), *_activated(gpu)]


def _of_torch(gpu: Gpu) -> list[OpImpl]:
    # Before 8.0 torch has no flash kernel, and the other one takes no shared keys and values.
    own = "attention" if gpu.capability >= _AMPERE else "attention_expanded"
    return [
        OpImpl(
            "attention",
            "sdpa",
            f"{_SDPA}:{own}",
            priority=10,
            traits=_REPEATABLE | {"score_bias", "score_bias_gradient"},
        ),
        OpImpl(
            "attention",
            "sdpa-cudnn",
            f"{_SDPA}:attention_cudnn",
            priority=5,
            supports=supports(
                dtypes(*HALF), capability(gpu, _AMPERE), no_dropout, head_dim(128), unmasked
            ),
            traits=_FUSED,
        ),
        OpImpl(
            "attention",
            "flex",
            "lmcore_cuda.attention.flex:attention",
            priority=30,
            requires=("triton",),
            supports=supports(
                _masked,
                dtypes(*HALF, "float32"),
                no_dropout,
                capability(gpu, _AMPERE),
                head_dim(256, least=16),
            ),
            traits=_FUSED,
        ),
    ]


def _of_packages(gpu: Gpu) -> list[OpImpl]:
    """Return the kernels of the flash-attn packages, called by their own functions."""
    return [
        OpImpl(
            "attention",
            "flash-attn-4",
            "lmcore_cuda.attention.flash4:attention",
            # Written for 10.x; on 9.0 the third version has been tuned for longer.
            priority=50 if gpu.capability[0] >= 10 else 35,
            requires=("flash_attn", "cutlass"),
            supports=supports(
                dtypes(*HALF),
                no_dropout,
                unmasked,
                eager,
                capability(gpu, _HOPPER, majors=(9, 10)),
                _flash4_head_dim(gpu),
                least_version(gpu, "flash-attn-4", _FLASH4_LEAST),
                package(gpu, "flash-attn-4"),
            ),
            traits=_FUSED,
        ),
        OpImpl(
            "attention",
            "flash-attn-3",
            "lmcore_cuda.attention.flash3:attention",
            priority=40,
            requires=("flash_attn_interface",),
            supports=supports(
                dtypes(*HALF),
                no_dropout,
                unmasked,
                eager,
                capability(gpu, _HOPPER, majors=(9,)),
                head_dim(256),
                package(gpu, "flash-attn-3"),
            ),
            traits=_FUSED,
        ),
        OpImpl(
            "attention",
            "flash-attn-2",
            "lmcore_cuda.attention.flash2:attention",
            # torch's own flash kernel is this one; two kernels alike need no second package.
            priority=8,
            requires=("flash_attn", "flash_attn_2_cuda"),
            supports=supports(
                dtypes(*HALF),
                unmasked,
                capability(gpu, _AMPERE),
                head_dim(256),
                least_version(gpu, "flash-attn", "2.4.1"),
                package(gpu, "flash-attn"),
            ),
            traits=_REPEATABLE,
        ),
    ]


def _activated(gpu: Gpu) -> list[OpImpl]:
    """Return the kernels of those packages as parts of torch's own attention."""
    return [
        OpImpl(
            "attention",
            "sdpa-fa4",
            "lmcore_cuda.attention.activated:flash4",
            priority=48 if gpu.capability[0] >= 10 else 33,
            requires=("flash_attn", "cutlass"),
            supports=supports(
                _compiled,
                dtypes(*HALF),
                no_dropout,
                unmasked,
                capability(gpu, _HOPPER, majors=(9, 10)),
                _flash4_head_dim(gpu),
                least_version(gpu, "flash-attn-4", _FLASH4_LEAST),
                package(gpu, "flash-attn-4"),
                _fa4(gpu),
            ),
            traits=_FUSED,
        ),
        OpImpl(
            "attention",
            "sdpa-fa3",
            "lmcore_cuda.attention.activated:flash3",
            priority=38,
            requires=("flash_attn_interface",),
            supports=supports(
                _compiled,
                dtypes(*HALF),
                no_dropout,
                unmasked,
                capability(gpu, _HOPPER, majors=(9,)),
                head_dim(256),
                package(gpu, "flash-attn-3"),
                _fa3,
            ),
            traits=_FUSED,
        ),
    ]
