"""Attention of one new token of each sequence over its whole slot of a key-value cache.

Its shapes depend on the slots alone, not on the lengths of the sequences: all tokens of a text run
the same compiled program, where attention to a slice of the cache would be compiled for each.

Shapes: B sequences, N heads, K heads of keys and values, R = N / K queries of each, D head
channels, L slots, C positions of a slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["attend"]


def attend(
    q_BND: Tensor,
    k_BKD: Tensor,
    v_BKD: Tensor,
    k_LKCD: Tensor,
    v_LKCD: Tensor,
    length_B: Tensor,
    longest: int,
) -> Tensor:
    """Write the new key and value into each slot, and return the attention to it, [B, N, D].

    See `NextTokenAttention`; *longest* is not used, as it would be a constant of the program.
    """
    num_sequences, num_heads, channels = q_BND.shape
    groups = k_BKD.shape[1]
    position_C = torch.arange(k_LKCD.shape[2], device=q_BND.device)
    new_B1C1 = (position_C == length_B[:, None])[:, None, :, None]
    read_B1C1 = (position_C <= length_B[:, None])[:, None, :, None]
    k_BKCD = torch.where(new_B1C1, k_BKD[:, :, None], k_LKCD[:num_sequences])
    v_BKCD = torch.where(new_B1C1, v_BKD[:, :, None], v_LKCD[:num_sequences])
    k_LKCD[:num_sequences], v_LKCD[:num_sequences] = k_BKCD, v_BKCD

    wide = torch.promote_types(q_BND.dtype, torch.float32)
    q_BKRD = q_BND.reshape(num_sequences, groups, -1, channels).to(wide) * channels**-0.5
    scores_BKRC = q_BKRD @ k_BKCD.to(wide).transpose(2, 3)
    scores_BKRC = scores_BKRC.masked_fill(~read_B1C1.transpose(2, 3), -torch.inf)
    # Beyond the new token there may be anything, NaN too, which a weight of zero would keep.
    v_BKCD = torch.where(
        read_B1C1, v_BKCD, torch.zeros((), dtype=v_BKCD.dtype, device=v_BKCD.device)
    )
    out_BKRD: Tensor = scores_BKRC.softmax(-1) @ v_BKCD.to(wide)
    return out_BKRD.reshape(num_sequences, num_heads, channels).to(q_BND.dtype)
