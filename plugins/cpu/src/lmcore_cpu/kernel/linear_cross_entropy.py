"""The vocabulary head and its loss in one op, a block of tokens at a time.

The logits of a step are the largest tensor of a small model: 2048 tokens by a vocabulary of 50304
are 412 MB in float32, which an unfused loss writes and reads several times and keeps until the
backward pass.  Here a block's logits are computed, turned into a loss and at once into the two
gradients, and their memory is used again for the next block.  The matrix products are the same
three as without fusion: nothing is computed twice.

Shapes: T tokens, C tokens of a block, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmcore.contract.weight_copies import narrow_weight
from lmcore_cpu.kernel.linear import product
from lmcore_cpu.kernel.processor import facts

__all__ = ["linear_cross_entropy"]

_BLOCK_BYTES = 128 * 2**20
_SMALLEST = 1e-30  # probabilities near float32's smallest number lose digits


def _block_rows(tokens: int, vocab: int) -> int:
    blocks = max(1, -(-tokens * vocab * 4 // _BLOCK_BYTES))
    return max(1, -(-tokens // blocks))


def _product(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return x @ weight.T, by oneDNN's product where torch has it for the case."""
    here, is_narrow = facts(), x_MK.dtype != torch.float32
    if is_narrow or not x_MK.numel() or here.blas_is_faster or not here.onednn:
        return x_MK @ weight_NK.t()
    return product(x_MK, weight_NK)


def _negative_log(
    probability_CV: Tensor, target_C1: Tensor, hidden_CH: Tensor, weight_VH: Tensor
) -> Tensor:
    """Return -log(probability) of each target; if it underflows, recompute from the logits."""
    chosen_C = probability_CV.gather(-1, target_C1).squeeze(-1)
    loss_C = -chosen_C.log()
    tiny_C = chosen_C < _SMALLEST
    if tiny_C.any():
        logits_RV = (hidden_CH[tiny_C] @ weight_VH.t()).to(probability_CV.dtype)
        target_R1 = target_C1[tiny_C]
        loss_C[tiny_C] = logits_RV.logsumexp(-1) - logits_RV.gather(-1, target_R1).squeeze(-1)
    return loss_C


class _ChunkedLoss(torch.autograd.Function):
    """The loss with both gradients; products in the dtype of `weight_VH`, the weight's copy.

    *like_hidden* and *like_weight* have the dtypes of the gradients, and get them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        like_hidden: Tensor,
        like_weight: Tensor,
        weight_VH: Tensor,
        target_T: Tensor,
        loss_weight_T: Tensor,
    ) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        dtype = weight_VH.dtype
        hidden_TH = like_hidden.to(dtype)
        tokens, vocab = hidden_TH.shape[0], weight_VH.shape[0]
        rows = _block_rows(tokens, vocab)
        grad_hidden_TH = torch.empty_like(like_hidden) if wants_hidden else None
        wide = torch.promote_types(dtype, torch.float32)
        # Blocks of a narrow dtype are added in float32.
        total_VH = None
        if wants_weight:
            sums = wide if rows < tokens else like_weight.dtype
            total_VH = (torch.empty_like if tokens else torch.zeros_like)(like_weight, dtype=sums)
        losses = []
        for start in range(0, tokens, rows):
            block = slice(start, min(start + rows, tokens))
            hidden_CH, scale_C = hidden_TH[block], loss_weight_T[block]
            target_C1 = target_T[block].unsqueeze(-1)
            logits_CV = _product(hidden_CH, weight_VH)
            # The same memory holds the probabilities, and then the gradients of the logits.
            delta_CV = logits_CV.to(wide)
            torch.softmax(delta_CV, -1, out=delta_CV)
            loss_C = _negative_log(delta_CV, target_C1, hidden_CH, weight_VH)
            losses.append((loss_C * scale_C).sum())
            if not (wants_hidden or wants_weight):
                continue
            delta_CV.scatter_add_(-1, target_C1, delta_CV.new_full(target_C1.shape, -1.0))
            if delta_CV is not logits_CV:
                delta_CV = logits_CV.copy_(delta_CV)
            if grad_hidden_TH is not None:
                grad_CH = _product(delta_CV, weight_VH.t())
                torch.mul(grad_CH, scale_C.unsqueeze(-1), out=grad_hidden_TH[block])
            if total_VH is not None:
                scaled_CH = (hidden_CH * scale_C.unsqueeze(-1)).to(dtype)
                if total_VH.dtype == dtype:
                    beta = 0.0 if start == 0 else 1.0
                    torch.addmm(total_VH, delta_CV.t(), scaled_CH, beta=beta, out=total_VH)
                elif start == 0:
                    total_VH.copy_(delta_CV.t() @ scaled_CH)
                else:
                    total_VH.add_(delta_CV.t() @ scaled_CH)
        grad_weight_VH = None if total_VH is None else total_VH.to(like_weight.dtype)
        ctx.save_for_backward(grad_hidden_TH, grad_weight_VH)
        return torch.stack(losses).sum() if losses else like_hidden.new_zeros((), dtype=wide)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grads = [
            grad if grad is None or grad_loss == 1 else grad * grad_loss
            for grad in ctx.saved_tensors
        ]
        return (*grads, None, None, None)


def _dtype_of_products(hidden_TH: Tensor, weight_VH: Tensor) -> torch.dtype:
    """Return autocast's dtype if the processor multiplies it, else the wider one of the two."""
    wide = torch.promote_types(hidden_TH.dtype, weight_VH.dtype)
    if not torch.is_autocast_enabled("cpu") or wide == torch.float64:
        return wide
    narrow = torch.get_autocast_dtype("cpu")
    return narrow if narrow == torch.bfloat16 and facts().bfloat16_products else wide


def linear_cross_entropy(
    hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, loss_weight_T: Tensor
) -> Tensor:
    """Return the sum of loss_weight times the cross entropy of hidden @ weight.T, in float32.

    Gradients flow to *hidden_TH* and *weight_VH*.  They are computed in the forward pass, unless
    gradients are off.  Under autocast to bfloat16 the products are in bfloat16 if the processor has
    instructions for it; otherwise, where the two differ in dtype, the wider one is used.
    """
    narrow_VH = narrow_weight(weight_VH, _dtype_of_products(hidden_TH, weight_VH))
    if not torch.is_grad_enabled():  # an input that requires a gradient would still get one
        hidden_TH, weight_VH = hidden_TH.detach(), weight_VH.detach()
    with torch.autocast("cpu", enabled=False):
        loss: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
            hidden_TH, weight_VH, narrow_VH, target_T, loss_weight_T
        )
    return loss
