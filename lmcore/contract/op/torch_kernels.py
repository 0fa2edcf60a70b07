"""Kernels in torch's own fused functions, for every device that torch has them for.

A plugin offers the faster ones: `load="lmcore.contract.op.torch_kernels:adamw"`.

A result has the dtype of the op's input, whatever autocast does to torch's function.

Shapes: B batch, S sequence or queries, T tokens or keys, H hidden, I inputs, O outputs, N heads, K
key/value heads, D head channels, R rotated pairs, F feed-forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

__all__ = [
    "adamw",
    "attention",
    "attention_expanded",
    "bias_dropout_add",
    "bias_gelu",
    "contiguous_as",
    "contiguous_in_place",
    "cross_entropy",
    "grad_norm",
    "layer_norm",
    "linear",
    "rms_norm",
    "rotary_embedding",
    "scaled_masked_softmax",
    "swiglu",
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
    """Softmax attention by torch's fused kernel; as the reference, also where S differs from T.

    torch lines the causal triangle up with the first key; with a cache it belongs at the last one.
    """
    queries, keys = q_BNSD.shape[-2], k_BKTD.shape[-2]
    square = causal and mask is None and queries == keys
    is_bias = mask is not None and mask.is_floating_point()
    visible = mask if mask is None else mask.to(q_BNSD.dtype) if is_bias else ~mask
    if causal and not square and queries > 1:
        ones = torch.ones(queries, keys, dtype=torch.bool, device=q_BNSD.device)
        earlier = ones.tril(diagonal=keys - queries)
        if visible is None:
            visible = earlier
        else:
            visible = visible.masked_fill(~earlier, -torch.inf if is_bias else False)
    return functional.scaled_dot_product_attention(
        q_BNSD,
        k_BKTD,
        v_BKTD,
        attn_mask=visible,
        dropout_p=dropout,
        is_causal=square,
        enable_gqa=q_BNSD.shape[1] != k_BKTD.shape[1],
    )


def attention_expanded(
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    *,
    causal: bool,
    dropout: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Do the same with shared keys and values written out first, one for each query head."""
    shared = q_BNSD.shape[1] // max(k_BKTD.shape[1], 1)
    if shared > 1:
        k_BKTD = k_BKTD.repeat_interleave(shared, dim=1)
        v_BKTD = v_BKTD.repeat_interleave(shared, dim=1)
    return attention(q_BNSD, k_BKTD, v_BKTD, causal=causal, dropout=dropout, mask=mask)


def linear(x_BSI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias by the device's library; under autocast in its dtype."""
    return functional.linear(x_BSI, weight_OI, bias_O)


def layer_norm(x_BSH: Tensor, weight_H: Tensor, bias_H: Tensor, epsilon: float) -> Tensor:
    """Normalize the last dim to mean 0 and variance 1, then apply gain and offset.

    torch's kernel for the CPU sums the gradients of gain and offset over all rows in their dtype:
    in bfloat16 they are wrong by a third after 16,384 rows.  There the op computes in float32.
    """
    half = weight_H.dtype in (torch.bfloat16, torch.float16)
    if half and x_BSH.device.type == "cpu" and torch.is_grad_enabled():
        weight_H, bias_H = weight_H.float(), bias_H.float()
    wide = _widened(x_BSH, weight_H)
    return functional.layer_norm(wide, weight_H.shape, weight_H, bias_H, epsilon).to(x_BSH.dtype)


def rms_norm(x_BSH: Tensor, weight_H: Tensor, epsilon: float) -> Tensor:
    """Divide the last dim by its root mean square, then apply the gain."""
    wide = _widened(x_BSH, weight_H)
    return functional.rms_norm(wide, weight_H.shape, weight_H, epsilon).to(x_BSH.dtype)


def _widened(x_BSH: Tensor, weight_H: Tensor) -> Tensor:
    """Return x in the gain's dtype: the kernels read both as one type."""
    return x_BSH if x_BSH.dtype == weight_H.dtype else x_BSH.to(weight_H.dtype)


def swiglu(x_BS2F: Tensor) -> Tensor:
    """Return silu(gate) * up; the last dim holds gate, then up."""
    gate_BSF, up_BSF = x_BS2F.chunk(2, dim=-1)
    return functional.silu(gate_BSF) * up_BSF


def bias_dropout_add(
    x_BSH: Tensor,
    bias_H: Tensor | None,
    residual_BSH: Tensor,
    *,
    dropout: float,
    training: bool,
) -> Tensor:
    """Return residual + dropout(x + bias), in the residual's dtype."""
    y_BSH = x_BSH if bias_H is None else x_BSH + bias_H.to(x_BSH.dtype)
    y_BSH = functional.dropout(y_BSH, dropout, training=training)
    return residual_BSH + y_BSH.to(residual_BSH.dtype)


def scaled_masked_softmax(x_BNST: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Softmax over the last dim of ``x * scale``; True in *mask* (broadcastable) hides an entry."""
    wide = torch.promote_types(x_BNST.dtype, torch.float32)
    scores = x_BNST.to(wide) * scale
    if mask is None:
        return torch.softmax(scores, dim=-1).to(x_BNST.dtype)
    # The lowest number in place of minus infinity: a row that is hidden whole makes no NaN.
    scores = scores.masked_fill(mask, torch.finfo(wide).min)
    return torch.softmax(scores, dim=-1).masked_fill(mask, 0.0).to(x_BNST.dtype)


def rotary_embedding(x_BNSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """Rotate channel i and channel i + R by the angle of the position, for i < R; R <= D / 2."""
    half = cos_SR.shape[-1]
    wide = x_BNSD.to(torch.promote_types(x_BNSD.dtype, torch.float32))
    first, second, tail = wide.split([half, half, x_BNSD.shape[-1] - 2 * half], dim=-1)
    turned = [first * cos_SR - second * sin_SR, second * cos_SR + first * sin_SR, tail]
    return torch.cat(turned, dim=-1).to(x_BNSD.dtype)


def bias_gelu(x_BSF: Tensor, bias_F: Tensor) -> Tensor:
    """Return GELU of x + bias, tanh form, in x's dtype."""
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
        counts = [steps[at] for at in places]
        torch._foreach_add_(counts, 1)
        written = [[tensors[at] for at in places] for tensors in (params, exp_avgs, exp_avg_sqs)]
        with contiguous_in_place(written, dtype) as (weights, firsts, seconds):
            torch._fused_adamw_(
                weights,
                [contiguous_as(grads[at], dtype) for at in places],
                firsts,
                seconds,
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


@contextmanager
def contiguous_in_place(
    lists: Sequence[Sequence[Tensor]], dtype: torch.dtype
) -> Iterator[list[list[Tensor]]]:
    """Yield the tensors as `contiguous_as` returns them; at the end, write changed copies back."""
    dense = [[contiguous_as(tensor, dtype) for tensor in tensors] for tensors in lists]
    yield dense
    for tensors, copies in zip(lists, dense, strict=True):
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
