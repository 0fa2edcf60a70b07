"""Tensor and sequence parallelism of a model whose layers were built narrow.

`ModelShape.narrowed` gives every rank its heads, feed-forward channels and rows of the vocabulary.
Here the bound ops of the layers are wrapped with collectives that make the narrow models one
(Shoeybi et al., 2019; with `sequence`, Korthikanti et al., 2022), as the model's
`TensorParallelPlan` says.

Shapes: B batch, S sequence (of this rank, if it is split), I and O channels in and out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional

from lmcore.parallel.collectives import (
    all_gather,
    all_reduce,
    copy_to_group,
    reduce_scatter,
    scale_gradient,
)
from lmcore.parallel.tensor_layout import TensorLayout
from lmcore.parallel.vocabulary import VocabularyLoss, embed_split

if TYPE_CHECKING:
    from lmcore.contract.rng import RngTracker
    from lmcore.families.protocol import Model, TensorParallelPlan
    from lmcore.parallel.mesh import Axis

__all__ = ["STREAM", "connect", "tensor_layouts"]

STREAM = "tensor-parallel"
"""Random number stream that differs between the ranks of tensor parallelism."""

Op = Callable[..., Tensor]


def tensor_layouts(model: Model, axis: Axis) -> dict[str, TensorLayout]:
    """Return the layout of every parameter of a narrow model, by name.

    Args:
        model: Model of `ModelShape.narrowed(axis.size)`.
        axis: Tensor axis of the mesh.

    Raises:
        RunError: The model's family does not support tensor parallelism.
    """
    layouts = {name: TensorLayout.whole(tuple(p.shape)) for name, p in model.named_parameters()}
    if axis.size == 1:
        return layouts
    model.tensor_parallel_plan()  # refuses families that do not support it
    for name, whole in layouts.items():
        if (split := model.table[name].split) is not None:
            layouts[name] = TensorLayout.split(
                whole.shape, split.dim, rank=axis.rank, size=axis.size, groups=split.groups
            )
    return layouts


def connect(model: Model, axis: Axis, *, sequence: bool, rng: RngTracker) -> None:
    """Wrap the ops of a narrow model with the collectives of tensor parallelism.

    Args:
        model: Model of `ModelShape.narrowed(axis.size)`; changed in place.
        axis: Tensor axis of the mesh.
        sequence: True if activations between the layers are split along the sequence.
        rng: Random number streams; attention dropout draws from `STREAM`.
    """
    if axis.size == 1:
        return
    plan = model.tensor_parallel_plan()
    enter: Callable[[Tensor], Tensor] = functools.partial(
        all_gather if sequence else copy_to_group, axis=axis
    )
    leave: Callable[[Tensor], Tensor] = functools.partial(
        reduce_scatter if sequence else all_reduce, axis=axis
    )
    for linear in plan.column:
        linear.op = _after(enter, linear.op)
    for linear in plan.row:
        linear.op = _before(linear.op, leave)
    for attention in model.attentions:
        if attention.dropout and not sequence:  # with it, all random numbers differ by rank
            attention.op = _drawing(attention.op, lambda: rng.fork(STREAM))
    _connect_embeddings(plan, axis, sequence=sequence)
    if plan.head_norm is not None:
        _connect_heads(model, plan, axis, sequence=sequence)


def _connect_heads(model: Model, plan: TensorParallelPlan, axis: Axis, *, sequence: bool) -> None:
    if model.head_weight is not None:
        model.head_loss = VocabularyLoss(axis, model.head_loss.vocab_size, gathered=sequence)
    if sequence:
        assert plan.head_norm is not None
        plan.head_norm.op = _before(plan.head_norm.op, functools.partial(all_gather, axis=axis))
        # Gradients of what follows the gathered hidden states are summed over the ranks.
        for head in plan.whole_heads:
            head.op = _before(head.op, functools.partial(scale_gradient, factor=1 / axis.size))


def _connect_embeddings(plan: TensorParallelPlan, axis: Axis, *, sequence: bool) -> None:
    tokens = plan.token_embedding
    if tokens is not None:

        def embed_tokens(tokens_BS: Tensor) -> Tensor:
            rows = embed_split(tokens_BS, tokens.weight, axis, scatter=sequence)
            return rows if tokens.output_dtype is None else rows.to(tokens.output_dtype)

        _replace_forward(tokens, embed_tokens)
    for embedding in plan.replicated_embeddings if sequence else ():
        _replace_forward(embedding, functools.partial(_embed_part, embedding, axis))


def _embed_part(embedding: nn.Embedding, axis: Axis, ids_BS: Tensor) -> Tensor:
    length = ids_BS.shape[-1] // axis.size
    own = ids_BS.narrow(-1, axis.rank * length, length)  # ids from `chunk` crash one compiler
    return functional.embedding(own, embedding.weight)


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
    def call(*arguments: Any, **options: Any) -> Tensor:
        if not options.get("dropout"):
            return op(*arguments, **options)
        with stream():
            return op(*arguments, **options)

    return call
