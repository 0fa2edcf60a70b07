"""The meaning of every op, in plain torch: the default where no kernel is better, and the oracle.

Written for clarity and for any dtype; a reduction is computed in at least float32.  Shapes are
listed in `lmcore.contract.op.spec`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

__all__ = [
    "adamw",
    "attention",
    "bias_dropout_add",
    "bias_gelu",
    "cross_entropy",
    "grad_norm",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "rms_norm",
    "rotary_embedding",
    "scaled_masked_softmax",
    "swiglu",
]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def scaled_masked_softmax(x_BNST: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax over the last dim of ``x * scale``; True in *mask* (broadcastable) hides an entry."""
    scores = _wide(x_BNST) * scale
    if mask is None:
        return torch.softmax(scores, dim=-1).to(x_BNST.dtype)
    scores = scores.masked_fill(mask, float("-inf"))
    hidden_rows = mask.expand(scores.shape).all(dim=-1, keepdim=True)
    probabilities = torch.softmax(scores.masked_fill(hidden_rows, 0.0), dim=-1)
    return probabilities.masked_fill(hidden_rows, 0.0).to(x_BNST.dtype)


def attention(
    q_BNSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    *,
    causal: bool,
    dropout: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Softmax attention; query i of S sees keys up to i + (T - S) when *causal*.

    Args:
        q_BNSD: Queries.
        k_BKSD, v_BKSD: Keys and values; each serves N / K query heads.
        causal: True if later keys are hidden.
        dropout: Probability that an attention weight is dropped.
        mask: Broadcastable to [B, N, S, T].  Boolean: True hides.  Floating-point: added to the
            scores after the scale, -inf hides, and it may require a gradient.
    """
    groups = q_BNSD.shape[1] // k_BKSD.shape[1]
    k_BNTD = k_BKSD.repeat_interleave(groups, dim=1)
    v_BNTD = v_BKSD.repeat_interleave(groups, dim=1)
    scores = _wide(q_BNSD) @ _wide(k_BNTD).transpose(-1, -2)
    scale = 1.0 / math.sqrt(q_BNSD.shape[-1])
    if mask is not None and mask.is_floating_point():
        bias = _wide(mask)
        mask = bias == -math.inf
        scores = scores + bias.masked_fill(mask, 0.0) / scale
    hidden = mask
    if causal:
        queries, keys = scores.shape[-2:]
        later = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
        later = later.triu(diagonal=keys - queries + 1)
        hidden = later if mask is None else mask | later
    weights = scaled_masked_softmax(scores, hidden, scale)
    weights = functional.dropout(weights, dropout, training=dropout > 0)
    return (weights @ _wide(v_BNTD)).to(q_BNSD.dtype)


def layer_norm(x_BSH: Tensor, weight_H: Tensor, bias_H: Tensor, epsilon: float) -> Tensor:
    """Normalize the last dim to mean 0 and variance 1, then apply gain and offset."""
    x = _wide(x_BSH)
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = centred.square().mean(dim=-1, keepdim=True)
    normal = centred * torch.rsqrt(variance + epsilon)
    return (normal * weight_H + bias_H).to(x_BSH.dtype)


def rms_norm(x_BSH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """Divide the last dim by its root mean square, then apply the gain."""
    x = _wide(x_BSH)
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + epsilon)
    return (x * scale * weight_H).to(x_BSH.dtype)


def linear(x_BSI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias; under autocast in its dtype."""
    return functional.linear(x_BSI, weight_OI, bias_O)


def bias_gelu(x_BSF: Tensor, bias_F: Tensor) -> Tensor:
    """Return 0.5 y (1 + tanh(sqrt(2/pi) (y + 0.044715 y^3))) for y = x + bias."""
    y = _wide(x_BSF) + bias_F
    inner = math.sqrt(2.0 / math.pi) * (y + 0.044715 * y.pow(3))
    return (0.5 * y * (1.0 + torch.tanh(inner))).to(x_BSF.dtype)


def swiglu(x_BS2F: Tensor) -> Tensor:
    """Return silu(gate) * up; the last dim holds gate, then up."""
    gate, up = _wide(x_BS2F).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(x_BS2F.dtype)


def bias_dropout_add(
    x_BSH: Tensor,
    bias_H: Tensor | None,
    residual_BSH: Tensor,
    *,
    dropout: float,
    training: bool,
) -> Tensor:
    """Return residual + dropout(x + bias), in the residual's dtype."""
    y = x_BSH if bias_H is None else x_BSH + bias_H
    return residual_BSH + functional.dropout(y, dropout, training=training).to(residual_BSH.dtype)


def rotary_embedding(x_BNSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """Rotate channel i and channel i + R by the angle of the position, for i < R; R <= D / 2."""
    rotated = 2 * cos_SR.shape[-1]
    x = _wide(x_BNSD)
    first, second = x[..., :rotated].chunk(2, dim=-1)
    turned = (first * cos_SR - second * sin_SR, second * cos_SR + first * sin_SR)
    return torch.cat([*turned, x[..., rotated:]], dim=-1).to(x_BNSD.dtype)


def cross_entropy(logits_TV: Tensor, target_T: Tensor) -> Tensor:
    """Return log(sum(exp(logits))) - logits[target] for each token."""
    logits = _wide(logits_TV)
    if not len(logits):
        return logits.sum(-1)  # compilers may refuse to gather from nothing
    chosen = logits.gather(-1, target_T.unsqueeze(-1)).squeeze(-1)
    return torch.logsumexp(logits, dim=-1) - chosen


def linear_cross_entropy(
    hidden_TH: Tensor, weight_VH: Tensor, target_T: Tensor, loss_weight_T: Tensor
) -> Tensor:
    """Return the sum of loss_weight times the cross entropy of hidden @ weight.T."""
    logits = functional.linear(hidden_TH, weight_VH)
    return (cross_entropy(logits, target_T) * loss_weight_T).sum()


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
    """Update params and moments in place by AdamW (Loshchilov and Hutter, 2019, algorithm 2).

    Args:
        params, grads: Weights and their gradients.
        exp_avgs, exp_avg_sqs: First and second moments.
        steps: Float32 scalars, the number of updates so far.
        lr: Learning rate; the decay of a step is lr * weight_decay * param.
        beta1, beta2: Decay of the moments.
        epsilon: Added to the root of the second moment, after bias correction.
        weight_decay: Decoupled decay.
    """
    for param, grad, exp_avg, exp_avg_sq, step in zip(
        params, grads, exp_avgs, exp_avg_sqs, steps, strict=True
    ):
        step.add_(1)
        count = step.double() if param.dtype == torch.float64 else step
        param.mul_(1 - lr * weight_decay)
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (exp_avg_sq / _weight_so_far(beta2, count)).sqrt_().add_(epsilon)
        param.addcdiv_(exp_avg, root.mul_(_weight_so_far(beta1, count)), value=-lr)


def _weight_so_far(beta: float, count: Tensor) -> Tensor:
    """Return 1 - beta**count, accurate for small results too; does not synchronize."""
    return -torch.expm1(count * (math.log(beta) if beta > 0 else -math.inf))


def grad_norm(grads: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm over all tensors, summed in at least float32."""
    if not grads:
        return torch.zeros(())
    return torch.stack([_wide(grad).square().sum() for grad in grads]).sum().sqrt()
