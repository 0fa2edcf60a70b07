"""`linear_cross_entropy`: the vocabulary head and its loss, a block of tokens at a time.

A block's logits are computed, and one kernel turns them into losses and, in the same memory, into
gradients; two products take those to the hidden states and to the weights.  Only one block's logits
are in memory, nothing is computed twice, and the loss has the three products that it has unfused.
Products are the device library's own.

The gradient of a token is multiplied by its loss weight over the largest of them, and by that only
at the end and in float32: a loss weight of 1 / tokens would push it under float16's range.

Shapes: T tokens, C tokens of a block, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmcore_triton.cross_entropy import vocabulary_block
from lmcore_triton.kernel.cross_entropy import cross_entropy_in_place
from lmcore_triton.launching import is_traced, warps_for

__all__ = ["linear_cross_entropy"]

_BLOCK_BYTES = 512 * 2**20
_ROW_MULTIPLE = 128


def _block_rows(tokens: int, vocab: int, element: int, most_bytes: int) -> int:
    """Return the tokens of a block: blocks of one size, a multiple of a product's own tiles."""
    blocks = max(1, -(-tokens * vocab * element // most_bytes))
    rows = -(-tokens // blocks)
    return max(1, min(tokens, -(-rows // _ROW_MULTIPLE) * _ROW_MULTIPLE))


def _accumulates_wide(device: torch.device) -> bool:
    """Return True if the device adds products of half precision to float32."""
    has: bool = torch._C._dispatch_has_kernel_for_dispatch_key(  # noqa: SLF001  # no public name
        "aten::addmm.dtype_out", device.type.upper()
    )
    return has


def _add_product(total_VH: Tensor, grad_CV: Tensor, hidden_CH: Tensor, *, first: bool) -> None:
    """Add grad.T @ hidden to *total_VH*, which has no values yet if *first*."""
    beta = 0 if first else 1
    if grad_CV.dtype == total_VH.dtype:
        torch.addmm(total_VH, grad_CV.t(), hidden_CH, beta=beta, out=total_VH)
    elif _accumulates_wide(total_VH.device):
        torch.addmm(
            total_VH,
            grad_CV.t(),
            hidden_CH,
            beta=beta,
            out_dtype=total_VH.dtype,
            out=total_VH,
        )
    elif first:
        total_VH.copy_(grad_CV.t() @ hidden_CH)
    else:
        total_VH.add_(grad_CV.t() @ hidden_CH)


def _forward(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    loss_weight_T: Tensor,
    *,
    wants_hidden: bool,
    wants_weight: bool,
    block_bytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, the gradients that are wanted, and the factor that they still lack.

    A gradient that is not wanted is empty; the weights' is in float32.
    """
    tokens, vocab = hidden_TH.shape[0], weight_VH.shape[0]
    grad_hidden_TH = hidden_TH.new_empty(hidden_TH.shape if wants_hidden else (0,))
    grad_weight_VH = weight_VH.new_empty(
        weight_VH.shape if wants_weight else (0,), dtype=torch.float32
    )
    loss_T = hidden_TH.new_empty(tokens, dtype=torch.float32)
    wide_T = loss_weight_T.to(torch.float32)
    if not tokens:
        return loss_T.sum(), grad_hidden_TH, grad_weight_VH.zero_(), loss_T.new_ones(())
    largest = wide_T.abs().amax()
    largest = torch.where(largest > 0, largest, 1.0)
    share_T = wide_T / largest
    rows = _block_rows(tokens, vocab, hidden_TH.element_size(), block_bytes)
    logits_CV = hidden_TH.new_empty(rows, vocab)
    vocab_block = vocabulary_block(vocab)
    target_T = target_T.contiguous()
    for start in range(0, tokens, rows):
        block = slice(start, min(start + rows, tokens))
        hidden_CH = hidden_TH[block]
        grad_CV = logits_CV[: hidden_CH.shape[0]]
        torch.mm(hidden_CH, weight_VH.t(), out=grad_CV)
        cross_entropy_in_place[(hidden_CH.shape[0],)](
            grad_CV,
            target_T[block],
            share_T[block],
            loss_T[block],
            WIDTH=vocab,
            GRADIENT=wants_hidden or wants_weight,
            BLOCK=vocab_block,
            num_warps=warps_for(vocab_block),
        )
        if wants_hidden:
            torch.mm(grad_CV, weight_VH, out=grad_hidden_TH[block])
        if wants_weight:
            _add_product(grad_weight_VH, grad_CV, hidden_CH, first=start == 0)
    return (loss_T * wide_T).sum(), grad_hidden_TH, grad_weight_VH, largest


_op = torch.library.custom_op("lmcore_triton::linear_cross_entropy", _forward, mutates_args=())


@_op.register_fake
def _described(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    loss_weight_T: Tensor,
    *,
    wants_hidden: bool,
    wants_weight: bool,
    block_bytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        hidden_TH.new_empty((), dtype=torch.float32),
        hidden_TH.new_empty(hidden_TH.shape if wants_hidden else (0,)),
        weight_VH.new_empty(weight_VH.shape if wants_weight else (0,), dtype=torch.float32),
        hidden_TH.new_empty((), dtype=torch.float32),
    )


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        target_T: Tensor,
        loss_weight_T: Tensor,
        dtype: torch.dtype,
        block_bytes: int,
    ) -> Tensor:
        ctx.wanted = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        ctx.dtypes = hidden_TH.dtype, weight_VH.dtype
        run = _op if is_traced(hidden_TH, weight_VH) else _forward
        loss, *kept = run(
            hidden_TH.to(dtype).contiguous(),
            weight_VH.to(dtype),
            target_T,
            loss_weight_T,
            wants_hidden=ctx.wanted[0],
            wants_weight=ctx.wanted[1],
            block_bytes=block_bytes,
        )
        ctx.save_for_backward(*kept)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        *kept, largest = ctx.saved_tensors
        factor = grad_loss * largest
        grads = [
            (grad.float() * factor).to(dtype) if wanted else None
            for grad, wanted, dtype in zip(kept, ctx.wanted, ctx.dtypes, strict=True)
        ]
        return (*grads, None, None, None, None)


def _product_dtype(hidden_TH: Tensor, weight_VH: Tensor) -> torch.dtype:
    """Return the dtype of a projection of the two here: autocast's dtype, or the wider one."""
    device = hidden_TH.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(hidden_TH.dtype, weight_VH.dtype)


def linear_cross_entropy(
    hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, loss_weight_T: Tensor
) -> Tensor:
    """Return the sum of loss_weight times the cross entropy of hidden @ weight.T, in float32.

    Gradients flow to *hidden_TH* and *weight_VH*.  They are computed in the forward pass, unless
    gradients are off.  Gradients of the weights are summed in float32.
    """
    if not torch.is_grad_enabled():  # an input that requires a gradient would still get one
        hidden_TH, weight_VH = hidden_TH.detach(), weight_VH.detach()
    dtype = _product_dtype(hidden_TH, weight_VH)
    return _ChunkedLoss.apply(  # type: ignore[no-untyped-call,no-any-return]
        hidden_TH, weight_VH, target_T, loss_weight_T, dtype, _BLOCK_BYTES
    )
