"""Kernels for the CPU: torch's fused functions under the signatures of the ops' references.

Shapes: B batch, S queries, T keys, H hidden, N heads, K key/value heads, D head channels,
F feed-forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

__all__ = [
    "adamw",
    "attention",
    "bias_gelu",
    "cross_entropy",
    "grad_norm",
    "layer_norm",
]

_NO_TARGET_IGNORED = torch.iinfo(torch.int64).min


def attention(
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    *,
    causal: bool,
    dropout: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Softmax attention by torch's fused kernel; as the reference, also where S differs from T."""
    queries, keys = q_BNSD.shape[-2], k_BKTD.shape[-2]
    # torch lines the causal triangle up with the first key; with a cache it belongs at the last.
    square = causal and mask is None and queries == keys
    visible = None if mask is None else ~mask
    if causal and not square and queries > 1:
        ones = torch.ones(queries, keys, dtype=torch.bool, device=q_BNSD.device)
        earlier = ones.tril(diagonal=keys - queries)
        visible = earlier if visible is None else visible & earlier
    return functional.scaled_dot_product_attention(
        q_BNSD,
        k_BKTD,
        v_BKTD,
        attn_mask=visible,
        dropout_p=dropout,
        is_causal=square,
        enable_gqa=q_BNSD.shape[1] != k_BKTD.shape[1],
    )


def layer_norm(x_BSH: Tensor, weight_H: Tensor, bias_H: Tensor, epsilon: float) -> Tensor:
    """Normalize the last dim to mean 0 and variance 1, then apply gain and offset."""
    return functional.layer_norm(x_BSH, weight_H.shape, weight_H, bias_H, epsilon)


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
    """Update params and moments in place by torch's fused step.

    torch's kernel walks all four tensors of a weight in memory order and reads them as one dtype
    without a check, so gradients of another layout or dtype are brought into line first.
    """
    groups: dict[torch.dtype, list[int]] = {}
    for place, param in enumerate(params):
        groups.setdefault(param.dtype, []).append(place)
    for dtype, places in groups.items():
        written = [[tensors[at] for at in places] for tensors in (params, exp_avgs, exp_avg_sqs)]
        dense = [[_dense(tensor, dtype) for tensor in tensors] for tensors in written]
        counts = [steps[at] for at in places]
        torch._foreach_add_(counts, 1)
        torch._fused_adamw_(
            dense[0],
            [_dense(grads[at], dtype) for at in places],
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


def _dense(tensor: Tensor, dtype: torch.dtype) -> Tensor:
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
