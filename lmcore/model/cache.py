"""Key-value cache of the tokens so far, for generation of one token at a time.

Shapes: B batch, N heads of keys, S new tokens, T all tokens so far, D head channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["KeyValueCache", "LayerCache"]


@dataclass
class LayerCache:
    """Keys and values of one layer, in memory for all positions.

    Attributes:
        length: Number of positions filled.
    """

    k_BNTD: Tensor
    v_BNTD: Tensor
    length: int = 0

    def extend(self, k_BNSD: Tensor, v_BNSD: Tensor) -> tuple[Tensor, Tensor]:
        """Append S positions and return all keys and values so far, [B, N, T, D] each."""
        end = self.length + k_BNSD.shape[2]
        self.k_BNTD[:, :, self.length : end] = k_BNSD
        self.v_BNTD[:, :, self.length : end] = v_BNSD
        self.length = end
        return self.k_BNTD[:, :, :end], self.v_BNTD[:, :, :end]


class KeyValueCache:
    """Key-value cache of every layer of a model."""

    def __init__(
        self,
        *,
        num_layers: int,
        batch: int,
        num_heads: int,
        capacity: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Allocate the cache.

        Args:
            num_layers: Number of layers.
            batch: Number of sequences.
            num_heads: Number of heads of keys and values.
            capacity: Number of positions.
            head_dim: Channels of a head.
            device: Device of the cache.
            dtype: Dtype of keys and values.
        """
        shape = (batch, num_heads, capacity, head_dim)
        self.capacity = capacity
        self.layers = [
            LayerCache(
                torch.empty(shape, device=device, dtype=dtype),
                torch.empty(shape, device=device, dtype=dtype),
            )
            for _ in range(num_layers)
        ]

    @property
    def length(self) -> int:
        """Number of positions filled."""
        return self.layers[0].length
