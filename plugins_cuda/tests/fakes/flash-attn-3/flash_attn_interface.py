"""Stand-in for flash-attn 3.0.0: its signature, with torch's attention behind it."""

import flash_attn_3._C  # noqa: F401  # the real one registers its kernels by this
import torch
from torch.nn import functional


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    """Take [B, S, N, D]; the triangle ends at the last key, and a head's channels lie together."""
    assert q.dtype in {torch.bfloat16, torch.float16}
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    visible = visible.tril(k.shape[2] - q.shape[2]) if causal else visible
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, scale=softmax_scale, enable_gqa=True
    )
    return out.transpose(1, 2)
