"""Attention with a bias for each score, and ALiBi, the bias that is linear in the distance.

Source: Press et al. 2021 (https://arxiv.org/abs/2108.12409).

Shapes: B batch, N heads, K heads of keys and values, S queries, T keys, D head channels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Alibi", "alibi_attention", "alibi_slopes", "biased_attention"]


def biased_attention(
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    *,
    op: Callable[..., Tensor],
    mask: Tensor,
    causal: bool = False,  # noqa: ARG001 - the addend hides later keys
    dropout: float = 0.0,
) -> Tensor:
    """Return attention by a kernel of the op that was bound with `score_bias`.

    Args:
        q_BNSD: Queries.
        k_BKTD: Keys, each head for N / K query heads.
        v_BKTD: Values.
        op: The kernel.
        mask: Addend of the scores, broadcastable to [B, N, S, T]; -inf where a key is hidden, a
            later one as well.
        causal: Not used.
        dropout: Probability that an attention weight is dropped.
    """
    return op(q_BNSD, k_BKTD, v_BKTD, causal=False, dropout=dropout, mask=mask)


def alibi_slopes(
    num_heads: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    """Return the slope of each head of a model, [N]; computed on the device.

    For a power of two n they are 2^(-8/n), 2^(-16/n), ...  Otherwise the slopes of the next lower
    power of two are followed by every second one of the next higher, as in BLOOM.

    Args:
        num_heads: Number of query heads of the whole model.
        dtype: Dtype of the slopes.
        device: Device of the slopes; None: torch's default.
    """
    lower = 1 << (num_heads.bit_length() - 1)
    head_N = torch.arange(num_heads, dtype=dtype, device=device)
    exponent_N = torch.where(head_N < lower, head_N + 1, head_N - lower + 0.5)
    return torch.exp2(exponent_N * (-8.0 / lower))


class Alibi:
    """Bias of one forward pass: each head's slope times the distance from query to key.

    The distance is negative for earlier keys.  All layers share it: without a mask it is computed
    once for each number of queries and keys.
    """

    def __init__(
        self,
        slope_N: Tensor,
        query_positions: Tensor | None = None,
        key_positions_BT: Tensor | None = None,
    ) -> None:
        """Set the positions.

        Args:
            slope_N: Slope of each head of this rank, in at least float32.
            query_positions: Position of each query, [S] or [B, S]; None: the queries are the last
                tokens of the keys.
            key_positions_BT: Position of each key; None: its index.
        """
        self._slope_N = slope_N
        self._queries, self._keys = query_positions, key_positions_BT
        self._made: dict[tuple[int, int, bool, torch.dtype], Tensor] = {}

    def addend(
        self, queries: int, keys: int, dtype: torch.dtype, *, causal: bool, mask: Tensor | None
    ) -> Tensor:
        """Return what attention adds to its scores, [B or 1, N, S, T]; -inf where a key is hidden.

        Args:
            queries: Number of queries, S.
            keys: Number of keys, T.
            dtype: Dtype of the result.
            causal: True if query i sees keys up to i + (T - S).
            mask: True where a key is hidden, broadcastable to the result; None: no further ones.
        """
        case = (queries, keys, causal, dtype)
        bias = self._made.get(case)
        if bias is None:
            bias = self._bias(queries, keys, causal=causal).to(dtype)
            if not torch.compiler.is_compiling():
                self._made[case] = bias
        return bias if mask is None else bias.masked_fill(mask, -torch.inf)

    def _bias(self, queries: int, keys: int, *, causal: bool) -> Tensor:
        device = self._slope_N.device
        index_T = torch.arange(keys, device=device)
        query = index_T[keys - queries :] if self._queries is None else self._queries
        key = index_T if self._keys is None else self._keys
        distance = (key.unsqueeze(-2) - query.unsqueeze(-1)).to(self._slope_N.dtype)
        bias = self._slope_N[:, None, None] * distance.unsqueeze(-3)
        if causal and queries > 1:
            later = torch.ones(queries, keys, dtype=torch.bool, device=device)
            bias = bias.masked_fill(later.triu(diagonal=keys - queries + 1), -torch.inf)
        return bias if bias.ndim == 4 else bias.unsqueeze(0)


def alibi_attention(
    q_BNSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    *,
    op: Callable[..., Tensor],
    alibi: Alibi,
    causal: bool,
    dropout: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Return attention by a kernel of the op that was bound with `score_bias`; see `Alibi`."""
    queries, keys = q_BNSD.shape[2], k_BKTD.shape[2]
    addend = alibi.addend(queries, keys, q_BNSD.dtype, causal=causal, mask=mask)
    return op(q_BNSD, k_BKTD, v_BKTD, causal=False, dropout=dropout, mask=addend)
