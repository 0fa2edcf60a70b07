"""Attention of one new token of each sequence over the slots of a key-value cache.

The C++ of `native/cpu/attention.hpp` writes the new key and value into the slot and reads the
positions that the sequence has: sequences of different lengths need no mask, and nothing is copied.

Shapes: B sequences, N heads, K heads of keys and values, D head channels, L slots, C positions of a
slot.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lmcore_cpu.kernel.processor import facts

__all__ = ["next_token_attention"]

_DTYPES = frozenset({torch.float32, torch.bfloat16})
_MOST_CHANNELS = 256


def next_token_attention(
    dtype: torch.dtype, head_dim: int, *, instructions: str | None = None
) -> Callable[..., Tensor] | None:
    """Return the attention of new tokens; None if there is no kernel for them.

    Args:
        dtype: Dtype of queries and cache.
        head_dim: Channels of a head.
        instructions: Instruction set, one of `Facts.instructions`; None: the fastest.
    """
    kernels = facts().kernels
    if kernels is None or dtype not in _DTYPES or head_dim > _MOST_CHANNELS:
        return None
    chosen = instructions or facts().instructions[0]
    is_bfloat16, scale = dtype == torch.bfloat16, head_dim**-0.5

    def attend(
        q_BND: Tensor,
        k_BKD: Tensor,
        v_BKD: Tensor,
        k_LKCD: Tensor,
        v_LKCD: Tensor,
        length_B: Tensor,
        longest: int,
    ) -> Tensor:
        q_BND, k_BKD, v_BKD = (_with_adjacent_channels(one) for one in (q_BND, k_BKD, v_BKD))
        sequences, heads, channels = q_BND.shape
        _require_room(k_LKCD, v_LKCD, sequences, longest)
        out_BND = q_BND.new_empty(q_BND.shape)
        kernels.attend_next_token(
            *(chosen, is_bfloat16),
            *(q_BND.data_ptr(), q_BND.stride()[:2]),
            *(k_BKD.data_ptr(), k_BKD.stride()[:2]),
            *(v_BKD.data_ptr(), v_BKD.stride()[:2]),
            *(k_LKCD.data_ptr(), v_LKCD.data_ptr(), k_LKCD.stride()[:2]),
            *(length_B.data_ptr(), out_BND.data_ptr()),
            *(sequences, heads, k_BKD.shape[1], channels),
            *(longest, scale, torch.get_num_threads()),
        )
        return out_BND

    return attend


def _require_room(k_LKCD: Tensor, v_LKCD: Tensor, sequences: int, longest: int) -> None:
    """Raise a ValueError for slots that the kernel would write beyond."""
    slots, _groups, positions, channels = k_LKCD.shape
    strides = k_LKCD.stride()
    alike = v_LKCD.shape == k_LKCD.shape and v_LKCD.stride() == strides
    if sequences > slots or longest >= positions or not alike or strides[2:] != (channels, 1):
        raise ValueError(
            f"no room for {sequences} sequences of {longest + 1} tokens in keys {(*k_LKCD.shape,)} "
            f"and values {(*v_LKCD.shape,)} with strides {strides} and {v_LKCD.stride()}"
        )


def _with_adjacent_channels(x_BND: Tensor) -> Tensor:
    return x_BND if x_BND.stride(2) == 1 else x_BND.contiguous()
