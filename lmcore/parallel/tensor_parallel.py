"""Tensor and sequence parallelism: connects a model that was built narrow with its other parts.

`ModelShape.narrowed` gives every process its heads, feed-forward channels and rows of the
vocabulary; here the layers' ops are wrapped so that what they exchange makes them one model
(Shoeybi et al., 2019; with `sequence`, Korthikanti et al., 2022).  Nothing of a layer is written
anew: a wrapped op calls the bound one.

Shapes: B batch, S sequence (of this process, where it is divided), I and O channels in and out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional

from lmcore.model.gpt import GPT
from lmcore.model.transformer import Attention, FeedForward
from lmcore.parallel.collectives import all_gather, all_reduce, copy_to_group, reduce_scatter
from lmcore.parallel.tensor_layout import TensorLayout
from lmcore.parallel.vocabulary import VocabularyLoss, embed_divided

if TYPE_CHECKING:
    from lmcore.accelerator.rng import RngTracker
    from lmcore.model.shape import ModelShape
    from lmcore.parallel.mesh import Axis

__all__ = ["STREAM", "connect", "tensor_layouts"]

STREAM = "tensor-parallel"
"""Random numbers that differ between the parts of a layer."""

_DIVIDED: Mapping[type, Mapping[str, int]] = {
    Attention: {"qkv.weight": 0, "qkv.bias": 0, "output.weight": 1},
    FeedForward: {"up.weight": 0, "up.bias": 0, "up_bias": 0, "down.weight": 1},
    GPT: {"token_embedding.weight": 0, "output_embedding.weight": 0},
}
"""Dim of the parameters that are divided."""

Op = Callable[..., Tensor]


def tensor_layouts(model: GPT, axis: Axis) -> dict[str, TensorLayout]:
    """Return the layout of every parameter of a narrow model, by name."""
    found = {name: TensorLayout.whole(tuple(p.shape)) for name, p in model.named_parameters()}
    if axis.size == 1:
        return found
    for prefix, module in model.named_modules():
        for name, dim in _DIVIDED.get(type(module), {}).items():
            full = f"{prefix}.{name}" if prefix else name
            if full in found:
                found[full] = TensorLayout.divided(
                    found[full].shape,
                    dim,
                    rank=axis.rank,
                    size=axis.size,
                    groups=_groups(name.partition(".")[0], model.shape),
                )
    return found


def _groups(name: str, shape: ModelShape) -> tuple[int, ...]:
    """Return the rows of each projection of several that are one, by the name of that."""
    if name == "qkv":
        return shape.attention_size, shape.key_size, shape.key_size
    if name == "up" and shape.swiglu:
        return shape.ffn_hidden_size, shape.ffn_hidden_size
    return ()


def connect(model: GPT, axis: Axis, *, sequence: bool, rng: RngTracker) -> None:
    """Make narrow models one: exchange what their layers have in common over *axis*.

    Args:
        model: Of `ModelShape.narrowed(axis.size)`; changed in place.
        axis: The processes that divide it.
        sequence: Whether activations between the layers are divided along the sequence.
        rng: Has the stream `STREAM`, which parts of a layer draw from.
    """
    if axis.size == 1:
        return
    enter: Callable[[Tensor], Tensor] = functools.partial(
        all_gather if sequence else copy_to_group, axis=axis
    )
    leave: Callable[[Tensor], Tensor] = functools.partial(
        reduce_scatter if sequence else all_reduce, axis=axis
    )
    for block in model.layers:
        attention, feed_forward = block.attention, block.feed_forward
        attention.qkv.op = _after(enter, attention.qkv.op)
        attention.output.op = _before(attention.output.op, leave)
        if attention.dropout and not sequence:  # with it all of the process draws its own
            attention.op = _drawing(attention.op, lambda: rng.fork(STREAM))
        feed_forward.up.op = _after(enter, feed_forward.up.op)
        feed_forward.down.op = _before(feed_forward.down.op, leave)
    if model.part.embedding:
        _divide_embedding(model, axis, sequence=sequence)
    if model.part.head:
        if sequence:
            norm = model.final_norm
            norm.op = _before(norm.op, functools.partial(all_gather, axis=axis))
        model.linear_cross_entropy = VocabularyLoss(axis, gathered=sequence)


def _divide_embedding(model: GPT, axis: Axis, *, sequence: bool) -> None:
    tokens = model.token_embedding

    def embed_tokens(tokens_BS: Tensor) -> Tensor:
        return embed_divided(tokens_BS, tokens.weight, axis, scatter=sequence)

    _replace_forward(tokens, embed_tokens)
    if not (sequence and model.shape.learned_positions):
        return
    positions = model.position_embedding

    def embed_positions(places: Tensor) -> Tensor:
        own = places.chunk(axis.size, dim=-1)[axis.rank]
        return functional.embedding(own, positions.weight)

    _replace_forward(positions, embed_positions)


def _replace_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    module.forward = forward


def _after(first: Callable[[Tensor], Tensor], op: Op) -> Op:
    def call(x_BSI: Tensor, *rest: Any) -> Tensor:
        return op(first(x_BSI), *rest)

    return call


def _before(op: Op, last: Callable[[Tensor], Tensor]) -> Op:
    def call(*arguments: Any) -> Tensor:
        return last(op(*arguments))

    return call


def _drawing(op: Op, stream: Callable[[], AbstractContextManager[None]]) -> Op:
    def call(*arguments: Any, **how: Any) -> Tensor:
        if not how.get("dropout"):
            return op(*arguments, **how)
        with stream():
            return op(*arguments, **how)

    return call
