"""Attention of one stack's tokens to the states of another.

Shapes: B batch, S queries, T keys, H hidden, N heads, K heads of keys and values, D head channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lmcore.families.layers.projection import Linear
from lmcore.families.layers.transformer import Attention, output_bias

if TYPE_CHECKING:
    from lmcore.families.op_binding import OpBinding
    from lmcore.model.shape import ModelShape

__all__ = ["CrossAttention"]


class CrossAttention(Attention):
    """Attention to the states of another stack; biases as in `Attention`."""

    def __init__(
        self,
        shape: ModelShape,
        ops: OpBinding,
        run: Callable[..., Tensor] | None = None,
    ) -> None:
        """Build the module and bind its ops; see `Attention`."""
        nn.Module.__init__(self)
        self.run, self.causal = run, False
        self.num_heads, self.num_groups = shape.num_attention_heads, shape.num_query_groups
        self.head_dim, self.dropout = shape.head_dim, shape.attention_dropout
        hidden, queries, biased = shape.hidden_size, shape.attention_size, shape.qkv_bias
        self.query = Linear(hidden, queries, ops, bias=biased)
        self.key_value = Linear(hidden, 2 * shape.key_size, ops, bias=biased)
        self.output = Linear(queries, hidden, ops, bias=False)
        self.output_bias = output_bias(hidden, shape)
        self.op = self.attention_op(shape, ops, masked=True, causal=False)

    def forward(  # type: ignore[override]  # the keys are another stack's
        self, x_BSH: Tensor, memory_BTH: Tensor, mask_B1ST: Tensor | None = None
    ) -> Tensor:
        """Return the attention branch without its last bias.

        Args:
            x_BSH: Normalized hidden states.
            memory_BTH: States of the other stack.
            mask_B1ST: True at its tokens that are hidden, such as padding; None: none is.
        """
        return self.read(x_BSH, self.keys(memory_BTH), mask_B1ST, self.run)

    def keys(self, memory_BTH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the other stack's states, [B, K, T, D] each."""
        both_BTPD = self.key_value(memory_BTH).unflatten(-1, (2 * self.num_groups, self.head_dim))
        k_BTKD, v_BTKD = both_BTPD.chunk(2, dim=2)
        return k_BTKD.transpose(1, 2), v_BTKD.transpose(1, 2)

    def read(
        self,
        x_BSH: Tensor,
        keys: tuple[Tensor, Tensor],
        mask_B1ST: Tensor | None = None,
        run: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """Return the attention branch for the result of `keys`; see `forward`.

        Args:
            x_BSH: Normalized hidden states.
            keys: Keys and values of the other stack's states.
            mask_B1ST: True at tokens that are hidden; None: none is.
            run: Recompute policy that calls the op in training; None: called directly.
        """
        query_BSND = self.query(x_BSH).unflatten(-1, (self.num_heads, self.head_dim))
        q_BNSD = query_BSND.transpose(1, 2)
        k_BKTD, v_BKTD = (one.to(q_BNSD.dtype) for one in keys)
        return self.combine((q_BNSD, k_BKTD, v_BKTD), mask_B1ST, run)
