"""`cross_entropy`: one pass over the logits forward, one backward; probabilities are not kept.

A target outside the vocabulary gives a loss of NaN: it reads no memory outside.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import wrap_triton

from lmcore_triton.kernel.cross_entropy import cross_entropy_backward, cross_entropy_forward
from lmcore_triton.launching import is_traced, kernel_op, matrix_of, power_of_two, warps_for

__all__ = ["cross_entropy", "vocabulary_block"]


def vocabulary_block(vocab: int, most: int = 4096) -> int:
    """Return how many logits of a row are in registers at a time."""
    return min(most, power_of_two(vocab))


@kernel_op("cross_entropy_forward")
def _forward(logits_TV: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return the losses, and the values that the backward pass needs besides the logits."""
    logits_TV = matrix_of(logits_TV)
    tokens, vocab = logits_TV.shape
    loss_T = torch.empty(tokens, dtype=torch.float32, device=logits_TV.device)
    log_sum_T = torch.empty_like(loss_T)
    if not tokens:
        return loss_T, log_sum_T
    block = vocabulary_block(vocab)
    kernel = wrap_triton(cross_entropy_forward) if is_traced(logits_TV) else cross_entropy_forward
    kernel[(tokens,)](
        logits_TV,
        target_T.contiguous(),
        loss_T,
        log_sum_T,
        logits_TV.stride(0),
        WIDTH=vocab,
        BLOCK=block,
        num_warps=warps_for(block),
    )
    return loss_T, log_sum_T


@kernel_op("cross_entropy_backward")
def _backward(grad_T: Tensor, logits_TV: Tensor, target_T: Tensor, log_sum_T: Tensor) -> Tensor:
    logits_TV = matrix_of(logits_TV)
    tokens, vocab = logits_TV.shape
    grad_logits_TV = torch.empty_like(logits_TV, memory_format=torch.contiguous_format)
    if not tokens:
        return grad_logits_TV
    block = vocabulary_block(vocab)
    kernel = wrap_triton(cross_entropy_backward) if is_traced(logits_TV) else cross_entropy_backward
    kernel[(tokens, -(-vocab // block))](
        grad_T,
        logits_TV,
        target_T.contiguous(),
        log_sum_T,
        grad_logits_TV,
        grad_T.stride(0),
        logits_TV.stride(0),
        WIDTH=vocab,
        BLOCK=block,
        num_warps=warps_for(block),
    )
    return grad_logits_TV


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, target_T: Tensor) -> Tensor:
        loss_T, log_sum_T = _forward(logits_TV, target_T)
        ctx.save_for_backward(logits_TV, target_T, log_sum_T)
        return loss_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None]:
        return _backward(grad_T, *ctx.saved_tensors), None


def cross_entropy(logits_TV: Tensor, target_T: Tensor) -> Tensor:
    """Return log(sum(exp(logits))) - logits[target] for each token, in float32."""
    return _CrossEntropy.apply(logits_TV, target_T)  # type: ignore[no-untyped-call,no-any-return]
