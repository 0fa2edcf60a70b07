"""Stand-in for flash-attn-4 4.0.0b36: its signature, with torch's attention behind it."""

import torch
from torch.nn import functional


def flash_attn_func(
    q,
    k,
    v,
    qv=None,
    gather_kv_indices=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    aux_tensors=None,
    aux_scalars=None,
    block_sparse_tensors=None,
    block_sparse_tensors_bwd=None,
    return_lse=False,
    gather_bwd_recompute_p=False,
    gather_bwd_token_chunk=None,
):
    """Take [B, S, N, D]; return the output and, unless it is wanted, None for the logsumexp."""
    assert q.dtype in {torch.bfloat16, torch.float16}
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    visible = visible.tril(k.shape[2] - q.shape[2]) if causal else visible
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, scale=softmax_scale, enable_gqa=True
    )
    return out.transpose(1, 2), None
