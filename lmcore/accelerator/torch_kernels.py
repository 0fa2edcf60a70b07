"""Kernels in torch's own fused functions, for every device that torch has them for.

A plugin offers those that win on its device: `load="lmcore.accelerator.torch_kernels:adamw"`.

Shapes: B batch, S sequence, T tokens, F feed-forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["adamw", "bias_gelu", "contiguous_as", "cross_entropy", "grad_norm"]

_NO_TARGET_IGNORED = torch.iinfo(torch.int64).min


def bias_gelu(x_BSF: Tensor, bias_F: Tensor) -> Tensor:
    """GELU of x + bias, tanh form, in x's dtype."""
    return functional.gelu(x_BSF + bias_F.to(x_BSF.dtype), approximate="tanh")


def cross_entropy(logits_TV: Tensor, target_T: Tensor) -> Tensor:
    """Negative log-likelihood of each target, in at least float32; no target is passed over."""
    logits = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
    return functional.cross_entropy(
        logits, target_T, reduction="none", ignore_index=_NO_TARGET_IGNORED
    )


def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
) -> None:
    """Update params and moments in place by torch's fused step, all of them in few calls.

    torch's kernel walks all four tensors of a weight in memory order and reads them as one dtype
    without a check, so gradients of another layout or dtype are brought into line first.
    """
    groups: dict[torch.dtype, list[int]] = {}
    for place, param in enumerate(params):
        groups.setdefault(param.dtype, []).append(place)
    for dtype, places in groups.items():
        written = [[tensors[at] for at in places] for tensors in (params, exp_avgs, exp_avg_sqs)]
        dense = [[contiguous_as(tensor, dtype) for tensor in tensors] for tensors in written]
        counts = [steps[at] for at in places]
        torch._foreach_add_(counts, 1)
        torch._fused_adamw_(
            dense[0],
            [contiguous_as(grads[at], dtype) for at in places],
            dense[1],
            dense[2],
            [],
            counts,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=epsilon,
            amsgrad=False,
            maximize=False,
        )
        for tensors, copies in zip(written, dense, strict=True):
            for tensor, copy in zip(tensors, copies, strict=True):
                if copy is not tensor:
                    tensor.copy_(copy)


def contiguous_as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return *tensor* itself where it is contiguous and of *dtype*, else a copy that is."""
    return tensor.to(dtype).contiguous()


def grad_norm(grads: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm over all tensors, summed in at least float32."""
    if not grads:
        return torch.zeros(())
    narrow = any(grad.dtype not in {torch.float32, torch.float64} for grad in grads)
    norms = torch._foreach_norm(list(grads), 2, dtype=torch.float32 if narrow else None)  # noqa: SLF001
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total
