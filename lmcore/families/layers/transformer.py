"""The transformer block: attention and feed-forward, each on a residual branch, normalized first.

Shapes: B batch, S sequence, T tokens so far, H hidden, N heads, K heads of keys and values, D head
channels, F feed-forward width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from lmcore.families.layers.attention_bias import alibi_attention
from lmcore.families.layers.projection import Linear
from lmcore.families.layers.rotary import Rotation, rotate

if TYPE_CHECKING:
    from lmcore.contract.generation_kernels import NextTokenAttention
    from lmcore.families.layers.attention_bias import Alibi
    from lmcore.families.layers.cache import LayerCache
    from lmcore.families.op_binding import OpBinding
    from lmcore.model.shape import ModelShape

__all__ = [
    "Attention",
    "Block",
    "FeedForward",
    "LayerNorm",
    "RMSNorm",
    "bound_attention",
    "norm_of",
    "output_bias",
]


class LayerNorm(nn.Module):
    """Layer normalization by the bound `layer_norm`, with gain and offset."""

    def __init__(self, shape: ModelShape, ops: OpBinding) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.hidden_size))
        self.bias = nn.Parameter(torch.zeros(shape.hidden_size))
        self.epsilon = shape.layernorm_epsilon
        self.op: Callable[..., Tensor] = ops.bind("layer_norm", hidden_size=shape.hidden_size)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Normalize the last dim."""
        return self.op(x_BSH, self.weight, self.bias, self.epsilon)


class RMSNorm(nn.Module):
    """Root-mean-square normalization by the bound `rms_norm`, with gain."""

    def __init__(self, shape: ModelShape, ops: OpBinding) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.hidden_size))
        self.epsilon = shape.layernorm_epsilon
        self.op: Callable[..., Tensor] = ops.bind("rms_norm", hidden_size=shape.hidden_size)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Divide the last dim by its root mean square."""
        return self.op(x_BSH, self.weight, self.epsilon)


def norm_of(shape: ModelShape, ops: OpBinding) -> LayerNorm | RMSNorm:
    """Return a norm of the kind that the shape names."""
    return (RMSNorm if shape.normalization == "RMSNorm" else LayerNorm)(shape, ops)


class Attention(nn.Module):
    """Multi-head attention; the bias of the output projection is left to the residual op.

    With grouped queries, each head of keys and values serves a group of query heads.

    Attributes:
        next_token: Attention of one new token over the slots of a cache, for generation; None: all
            keys and values of the cache are given to the attention op.
        standard: True if scores are divided by the root of a head's channels, and have no bias, so
            that `next_token` computes what the op does.
    """

    output_bias: nn.Parameter | None
    next_token: NextTokenAttention | None = None
    standard: bool = True

    def __init__(
        self,
        shape: ModelShape,
        ops: OpBinding,
        run: Callable[..., Tensor] | None = None,
        *,
        masked: bool = False,
        causal: bool = True,
    ) -> None:
        """Build the module and bind its ops.

        Args:
            shape: Sizes of the model.
            ops: Binding of ops to kernels.
            run: Recompute policy that calls the attention op in training; None: called directly.
            masked: True if `forward` may get a mask.
            causal: True if no token attends to later ones.
        """
        super().__init__()
        self.run, self.causal = run, causal
        self.num_heads, self.num_groups = shape.num_attention_heads, shape.num_query_groups
        self.head_dim = shape.head_dim
        self.dropout = shape.attention_dropout
        packed = shape.attention_size + 2 * shape.key_size
        self.qkv = Linear(shape.hidden_size, packed, ops, bias=shape.qkv_bias)
        self.output = Linear(shape.attention_size, shape.hidden_size, ops, bias=False)
        self.output_bias = output_bias(shape.hidden_size, shape)
        self.op = self.attention_op(shape, ops, masked=masked, causal=causal)
        if shape.rotary:
            self.rotary: Callable[..., Tensor] = ops.bind(
                "rotary_embedding",
                head_dim=shape.head_dim,
                rotary_dim=shape.rotary_dim,
                num_attention_heads=self.num_heads + self.num_groups,
                seq_length=shape.max_position_embeddings,
            )

    def attention_op(
        self, shape: ModelShape, ops: OpBinding, *, masked: bool, causal: bool
    ) -> Callable[..., Tensor]:
        """Return the op of queries, keys and values; for the arguments see the constructor."""
        if not shape.alibi:
            return bound_attention(shape, ops, masked=masked, causal=causal)
        self.standard = False
        # The bias hides later keys.
        op = bound_attention(shape, ops, masked=True, causal=False, score_bias=True)
        return functools.partial(alibi_attention, op=op)

    def forward(
        self,
        x_BSH: Tensor,
        cache: LayerCache | None = None,
        mask_B1SS: Tensor | None = None,
        rotation: Rotation | None = None,
        alibi: Alibi | None = None,
    ) -> Tensor:
        """Return the attention branch without its last bias.

        Args:
            x_BSH: Normalized hidden states.
            cache: Keys and values of the tokens before x_BSH; extended in place.
            mask_B1SS: Document-boundary mask, True if hidden.
            rotation: Rotation of queries and keys.
            alibi: Bias of the scores; given if the shape has it.
        """
        q_BNSD, k_BKSD, v_BKSD = self._heads(self.qkv(x_BSH), rotation)
        if cache is not None:
            if self.next_token is not None:
                out_BNSD = cache.attend(self.next_token, q_BNSD, k_BKSD, v_BKSD)
                if out_BNSD is not None:
                    return self.output(out_BNSD.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]
            k_BKSD, v_BKSD = cache.extend(k_BKSD, v_BKSD)
        run = self.run if cache is None else None
        return self.combine((q_BNSD, k_BKSD, v_BKSD), mask_B1SS, run, alibi)

    def combine(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        mask_B1SS: Tensor | None,
        run: Callable[..., Tensor] | None,
        alibi: Alibi | None = None,
    ) -> Tensor:
        """Return the output projection of the attention op.

        Args:
            heads: Queries, keys and values.
            mask_B1SS: Mask of the op; None: no argument.
            run: Recompute policy that calls the op in training; None: called directly.
            alibi: Bias of the scores; None: no argument.
        """
        dropout = self.dropout if self.training else 0.0
        options: dict[str, Any] = {"causal": self.causal, "dropout": dropout}
        if mask_B1SS is not None:
            options["mask"] = mask_B1SS
        if alibi is not None:
            options["alibi"] = alibi
        if run is None or not self.training:
            out_BNSD = self.op(*heads, **options)
        else:
            out_BNSD = run(functools.partial(self.op, **options), *heads)
        return self.output(out_BNSD.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _heads(
        self, packed_BSQ: Tensor, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values by heads from packed ones, Q = (N + 2 K) D."""
        heads, groups = self.num_heads, self.num_groups
        packed_BSPD = packed_BSQ.unflatten(-1, (heads + 2 * groups, self.head_dim))
        if rotation is None:
            parts = packed_BSPD.split([heads, groups, groups], dim=2)
            q_BNSD, k_BKSD, v_BKSD = (part.transpose(1, 2) for part in parts)
            return q_BNSD, k_BKSD, v_BKSD
        both_BSPD, v_BSKD = packed_BSPD.split([heads + groups, groups], dim=2)
        both_BPSD = rotate(self.rotary, both_BSPD.transpose(1, 2), rotation)
        q_BNSD, k_BKSD = both_BPSD.split([heads, groups], dim=1)
        # Copied: as a view, values would keep the unrotated queries and keys in memory.
        return q_BNSD, k_BKSD, v_BSKD.contiguous().transpose(1, 2)


def output_bias(size: int, shape: ModelShape) -> nn.Parameter | None:
    """Return a bias that a later op adds; None if the shape has none."""
    return nn.Parameter(torch.zeros(size)) if shape.add_bias_linear else None


def bound_attention(
    shape: ModelShape, ops: OpBinding, *, masked: bool, causal: bool, **bias: bool
) -> Callable[..., Tensor]:
    """Return the kernel of `attention` for a shape.

    Kernels that take no mask are often the faster ones: where the op may get a mask, another kernel
    may compute the calls without one.

    Args:
        shape: Sizes of the model.
        ops: Binding of ops to kernels.
        masked: True if the kernel may get a mask.
        causal: True if the kernel hides later keys.
        bias: `score_bias` and `score_bias_gradient`, if the mask is a bias of the scores.
    """

    def bind(*, masked: bool) -> Callable[..., Tensor]:
        op: Callable[..., Tensor] = ops.bind(
            "attention",
            head_dim=shape.head_dim,
            num_attention_heads=shape.num_attention_heads,
            num_query_groups=shape.num_query_groups,
            seq_length=shape.max_position_embeddings,
            causal=causal,
            masked=masked,
            dropout=shape.attention_dropout,
            **bias,
        )
        return op

    op = bind(masked=masked)
    if not masked or bias:
        return op
    plain = bind(masked=False)
    return op if plain is op else functools.partial(_either, masked=op, plain=plain)


def _either(
    *heads: Tensor,
    masked: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    return plain(*heads, **options) if mask is None else masked(*heads, mask=mask, **options)


class FeedForward(nn.Module):
    """Two projections with an activation between; biases are left to the fused ops.

    If the shape is `gated`, the first projection is packed, gate before up, and adds its bias
    itself; the activation is the gate's.

    Attributes:
        activation: See the constructor.
    """

    up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(self, shape: ModelShape, ops: OpBinding, *, activation: str = "") -> None:
        """Build the module.

        Args:
            shape: Sizes of the model.
            ops: Binding of ops to kernels.
            activation: Name of the activation: `gelu` (by tanh), `erf` (the exact GELU) or `relu`,
                of a gate `silu`, `gelu` or a `--glu-activation`; empty: the shape's, or the first.
        """
        super().__init__()
        hidden, width, gated = shape.hidden_size, shape.ffn_hidden_size, shape.gated
        biased, activation = shape.add_bias_linear, activation or shape.glu_activation
        self.up = Linear(hidden, 2 * width if gated else width, ops, bias=gated and biased)
        self.up_bias = None if gated else output_bias(width, shape)
        self.down = Linear(width, hidden, ops, bias=False)
        self.down_bias = output_bias(hidden, shape)
        self.gated, self.activation = gated, activation
        bound, others = ("swiglu", _GATED) if gated else ("bias_gelu", _PLAIN)
        self.op: Callable[..., Tensor] = (
            others[activation] if activation in others else ops.bind(bound, ffn_hidden_size=width)
        )

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Return the branch without its last bias."""
        x_BSF = self.up(x_BSH)
        if self.gated:
            return self.down(self.op(x_BSF))  # type: ignore[no-any-return]
        bias_F = self.up_bias
        if bias_F is None:
            bias_F = x_BSF.new_zeros(x_BSF.shape[-1])
        return self.down(self.op(x_BSF, bias_F))  # type: ignore[no-any-return]


def _exact_bias_gelu(x_BSF: Tensor, bias_F: Tensor) -> Tensor:
    return functional.gelu(x_BSF + bias_F)


def _bias_relu(x_BSF: Tensor, bias_F: Tensor) -> Tensor:
    return functional.relu(x_BSF + bias_F)


def _gated_gelu(x_BS2F: Tensor) -> Tensor:
    gate_BSF, up_BSF = x_BS2F.chunk(2, dim=-1)
    return functional.gelu(gate_BSF, approximate="tanh") * up_BSF


def _geglu(x_BS2F: Tensor) -> Tensor:
    gate_BSF, up_BSF = x_BS2F.chunk(2, dim=-1)
    return functional.gelu(gate_BSF) * up_BSF


def _reglu(x_BS2F: Tensor) -> Tensor:
    gate_BSF, up_BSF = x_BS2F.chunk(2, dim=-1)
    return functional.relu(gate_BSF) * up_BSF


def _liglu(x_BS2F: Tensor) -> Tensor:
    gate_BSF, up_BSF = x_BS2F.chunk(2, dim=-1)
    return gate_BSF * up_BSF


_PLAIN = {"erf": _exact_bias_gelu, "relu": _bias_relu}
_GATED = {"gelu": _gated_gelu, "geglu": _geglu, "reglu": _reglu, "liglu": _liglu}
"""Activations that are not in the op table."""


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)).

    Post-normalized it is norm(x + attention(x)), then norm(x + feed_forward(x)).

    Attributes:
        attention_class: Class of the attention.
    """

    attention_class: ClassVar[type[Attention]] = Attention

    def __init__(
        self,
        shape: ModelShape,
        ops: OpBinding,
        run_attention: Callable[..., Tensor] | None = None,
        *,
        masked: bool = False,
        causal: bool = True,
        post_norm: bool = False,
        activation: str = "",
    ) -> None:
        """Build the block.

        Args:
            shape: Sizes of the model.
            ops: Binding of ops to kernels.
            run_attention: See `Attention`, as for *masked* and *causal*.
            post_norm: True to normalize after each branch was added, not before it.
            activation: See `FeedForward`.
        """
        super().__init__()
        self.post_norm = post_norm
        self.attention_norm = norm_of(shape, ops)
        self.attention = self.attention_class(
            shape, ops, run_attention, masked=masked, causal=causal
        )
        self.feed_forward_norm = norm_of(shape, ops)
        self.feed_forward = FeedForward(shape, ops, activation=activation)
        self.dropout = shape.hidden_dropout
        self.add: Callable[..., Tensor] = ops.bind(
            "bias_dropout_add",
            hidden_size=shape.hidden_size,
            bias=shape.add_bias_linear,
            dropout=shape.hidden_dropout,
        )

    def forward(
        self,
        x_BSH: Tensor,
        cache: LayerCache | None = None,
        mask_B1SS: Tensor | None = None,
        rotation: Rotation | None = None,
        alibi: Alibi | None = None,
    ) -> Tensor:
        """Return the residual stream after both branches; see `Attention.forward`."""
        return self.feed(self.attend(x_BSH, cache, mask_B1SS, rotation, alibi))

    def attend(
        self,
        x_BSH: Tensor,
        cache: LayerCache | None = None,
        mask_B1SS: Tensor | None = None,
        rotation: Rotation | None = None,
        alibi: Alibi | None = None,
    ) -> Tensor:
        """Return the residual stream after attention; see `Attention.forward`."""
        before = x_BSH if self.post_norm else self.attention_norm(x_BSH)
        branch_BSH = self.attention(before, cache, mask_B1SS, rotation, alibi)
        x_BSH = self.added(branch_BSH, self.attention.output_bias, x_BSH)
        return self.attention_norm(x_BSH) if self.post_norm else x_BSH

    def feed(self, x_BSH: Tensor) -> Tensor:
        """Return the residual stream after the feed-forward layer."""
        before = x_BSH if self.post_norm else self.feed_forward_norm(x_BSH)
        branch_BSH = self.feed_forward(before)
        x_BSH = self.added(branch_BSH, self.feed_forward.down_bias, x_BSH)
        return self.feed_forward_norm(x_BSH) if self.post_norm else x_BSH

    def added(self, branch_BSH: Tensor, bias_H: Tensor | None, x_BSH: Tensor) -> Tensor:
        """Return the residual stream with a branch and its last bias."""
        return self.add(branch_BSH, bias_H, x_BSH, dropout=self.dropout, training=self.training)
