"""Kernels for the simulated device: torch's functions under the signatures of the references.

T tokens, V vocabulary, B batch, S sequence, H hidden, F feed-forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["bias_gelu", "cross_entropy", "grad_norm", "layer_norm"]

_NO_TARGET_IGNORED = torch.iinfo(torch.int64).min


def layer_norm(x_BSH: Tensor, weight_H: Tensor, bias_H: Tensor, epsilon: float) -> Tensor:
    """Normalize the last dim to mean 0 and variance 1, then apply gain and offset.

    With a gain in half precision it computes in float32: the CPU's function, which computes for the
    device, sums the gradients of gain and offset over all rows in their dtype.
    """
    if weight_H.dtype in (torch.bfloat16, torch.float16):
        out_BSH = layer_norm(x_BSH.float(), weight_H.float(), bias_H.float(), epsilon)
        return out_BSH.to(x_BSH.dtype)
    # Autocast, or a wider gain, would widen the output.
    return functional.layer_norm(x_BSH, weight_H.shape, weight_H, bias_H, epsilon).to(x_BSH.dtype)


def bias_gelu(x_BSF: Tensor, bias_F: Tensor) -> Tensor:
    """Return GELU(x + bias), tanh form, in x's dtype."""
    return functional.gelu(x_BSF + bias_F.to(x_BSF.dtype), approximate="tanh")


def cross_entropy(logits_TV: Tensor, target_T: Tensor) -> Tensor:
    """Negative log-likelihood of each target, in at least float32; no target is passed over."""
    logits = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
    return functional.cross_entropy(
        logits, target_T, reduction="none", ignore_index=_NO_TARGET_IGNORED
    )


def grad_norm(grads: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm over all tensors, summed in at least float32."""
    if not grads:
        return torch.zeros(())
    parts = []
    for grad in grads:
        dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
        parts.append(torch.linalg.vector_norm(grad, dtype=dtype))
    total: Tensor = torch.linalg.vector_norm(torch.stack(parts))
    return total
