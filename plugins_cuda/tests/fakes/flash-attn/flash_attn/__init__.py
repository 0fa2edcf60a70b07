"""Stand-in for flash-attn 2.8.3: its signature, with torch's attention behind it."""

import torch
from torch.nn import functional

calls: list[dict[str, object]] = []


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """Take [B, S, N, D]; the triangle ends at the last key, and a head's channels lie together."""
    assert q.dtype in {torch.bfloat16, torch.float16}
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    calls.append({"dropout_p": dropout_p, "deterministic": deterministic, "q": q})
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    visible = visible.tril(k.shape[2] - q.shape[2]) if causal else visible
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, scale=softmax_scale, enable_gqa=True
    )
    return out.transpose(1, 2)
