"""The transformer block: attention and feed-forward, each on a residual branch, normalized first.

Shapes: B batch, S sequence, T tokens seen so far, H hidden, N heads, D head channels, F
feed-forward width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lmcore.model.layers import Linear

if TYPE_CHECKING:
    from lmcore.model.cache import LayerCache
    from lmcore.model.op_binding import OpBinding
    from lmcore.model.shape import ModelShape

__all__ = ["Attention", "Block", "FeedForward", "LayerNorm"]


class LayerNorm(nn.Module):
    """Gain and offset, applied by the bound `layer_norm`."""

    def __init__(self, shape: ModelShape, ops: OpBinding) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.hidden_size))
        self.bias = nn.Parameter(torch.zeros(shape.hidden_size))
        self.epsilon = shape.layernorm_epsilon
        self.op: Callable[..., Tensor] = ops.bind("layer_norm", hidden_size=shape.hidden_size)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Normalize the last dim."""
        return self.op(x_BSH, self.weight, self.bias, self.epsilon)


class Attention(nn.Module):
    """Causal multi-head attention; the output projection's bias is left to the residual op."""

    def __init__(
        self,
        shape: ModelShape,
        ops: OpBinding,
        run: Callable[..., Tensor] | None = None,
        *,
        masked: bool = False,
    ) -> None:
        """Build it; *run* calls the op in training, None: it is called; *masked*: with a mask."""
        super().__init__()
        self.run = run
        self.num_heads = shape.num_attention_heads
        self.head_dim = shape.head_dim
        self.dropout = shape.attention_dropout
        self.qkv = Linear(shape.hidden_size, 3 * shape.attention_size, ops)
        self.output = Linear(shape.attention_size, shape.hidden_size, ops, bias=False)
        self.output_bias = nn.Parameter(torch.zeros(shape.hidden_size))
        self.op: Callable[..., Tensor] = ops.bind(
            "attention",
            head_dim=shape.head_dim,
            num_attention_heads=shape.num_attention_heads,
            num_query_groups=shape.num_attention_heads,
            seq_length=shape.max_position_embeddings,
            causal=True,
            masked=masked,
            dropout=shape.attention_dropout,
        )

    def forward(
        self,
        x_BSH: Tensor,
        cache: LayerCache | None = None,
        mask_B1SS: Tensor | None = None,
    ) -> Tensor:
        """Attend to this and earlier tokens, but for those that the mask hides by True.

        Those in *cache* come before x_BSH's.
        """
        packed_BSQ = self.qkv(x_BSH)  # Q = 3 * N * D
        batch, length, _ = packed_BSQ.shape
        qkv_3BNSD = packed_BSQ.view(batch, length, 3, self.num_heads, self.head_dim)
        q_BNSD, k_BNSD, v_BNSD = qkv_3BNSD.permute(2, 0, 3, 1, 4).unbind(0)
        if cache is not None:
            k_BNSD, v_BNSD = cache.extend(k_BNSD, v_BNSD)
        dropout = self.dropout if self.training else 0.0
        how: dict[str, Any] = {"causal": True, "dropout": dropout}
        if mask_B1SS is not None:
            how["mask"] = mask_B1SS
        if self.run is None or not self.training or cache is not None:
            out_BNSD = self.op(q_BNSD, k_BNSD, v_BNSD, **how)
        else:
            core = functools.partial(self.op, **how)
            out_BNSD = self.run(core, q_BNSD, k_BNSD, v_BNSD)
        return self.output(out_BNSD.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """Two projections with GELU between; biases are left to the fused ops."""

    def __init__(self, shape: ModelShape, ops: OpBinding) -> None:
        super().__init__()
        self.up = Linear(shape.hidden_size, shape.ffn_hidden_size, ops, bias=False)
        self.up_bias = nn.Parameter(torch.zeros(shape.ffn_hidden_size))
        self.down = Linear(shape.ffn_hidden_size, shape.hidden_size, ops, bias=False)
        self.down_bias = nn.Parameter(torch.zeros(shape.hidden_size))
        self.op: Callable[..., Tensor] = ops.bind(
            "bias_gelu", ffn_hidden_size=shape.ffn_hidden_size
        )

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Return the branch without its last bias."""
        return self.down(self.op(self.up(x_BSH), self.up_bias))  # type: ignore[no-any-return]


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(
        self,
        shape: ModelShape,
        ops: OpBinding,
        run_attention: Callable[..., Tensor] | None = None,
        *,
        masked: bool = False,
    ) -> None:
        """Build it; *run_attention* and *masked* are for `Attention`."""
        super().__init__()
        self.attention_norm = LayerNorm(shape, ops)
        self.attention = Attention(shape, ops, run_attention, masked=masked)
        self.feed_forward_norm = LayerNorm(shape, ops)
        self.feed_forward = FeedForward(shape, ops)
        self.dropout = shape.hidden_dropout
        self.add: Callable[..., Tensor] = ops.bind(
            "bias_dropout_add",
            hidden_size=shape.hidden_size,
            bias=True,
            dropout=shape.hidden_dropout,
        )

    def forward(
        self,
        x_BSH: Tensor,
        cache: LayerCache | None = None,
        mask_B1SS: Tensor | None = None,
    ) -> Tensor:
        """Return the residual stream after both branches; the arguments are those of attention."""
        branch_BSH = self.attention(self.attention_norm(x_BSH), cache, mask_B1SS)
        x_BSH = self.add(
            branch_BSH,
            self.attention.output_bias,
            x_BSH,
            dropout=self.dropout,
            training=self.training,
        )
        branch_BSH = self.feed_forward(self.feed_forward_norm(x_BSH))
        return self.add(
            branch_BSH,
            self.feed_forward.down_bias,
            x_BSH,
            dropout=self.dropout,
            training=self.training,
        )


def output_std(shape: ModelShape) -> float:
    """Standard deviation of projections that write to the residual stream: sigma / sqrt(2 l)."""
    return shape.init_method_std / math.sqrt(2.0 * shape.num_layers)
