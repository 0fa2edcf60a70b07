"""Tensor and sequence parallelism of a model whose layers were built narrow.

`ModelShape.narrowed` gives every rank its heads, feed-forward channels and rows of the vocabulary.
Here the bound ops of the layers are wrapped with collectives that make the narrow models one
(Shoeybi et al., 2019; with `sequence`, Korthikanti et al., 2022), as the model's
`TensorParallelPlan` says.

Shapes: B batch, S sequence (of this rank, if it is split), I and O channels in and out.

Vocabulary-parallel embedding and loss: each rank has some rows of the vocabulary.

No rank ever has the logits of the whole vocabulary: the largest logit of each token, the sum of
exponentials and the target's logit are all-reduced.  Logits and their gradients are computed for
one block of tokens at a time, which bounds the memory.

Shapes: T tokens, C tokens of a block, H hidden, V rows of the vocabulary on this rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from lmcore.families.layers.head import HeadLoss, with_bias
from lmcore.parallel.collectives import (
    all_gather,
    all_reduce,
    copy_to_group,
    reduce_scatter,
    scale_gradient,
)
from lmcore.parallel.tensor_layout import TensorLayout

if TYPE_CHECKING:
    from lmcore.contract.rng import RngTracker
    from lmcore.families.protocol import Model, TensorParallelPlan
    from lmcore.parallel.mesh import Axis


__all__ = [
    "STREAM",
    "VocabularyLoss",
    "connect",
    "embed_split",
    "tensor_layouts",
]

_BLOCK_BYTES = 128 * 2**20


def embed_split(
    tokens_BS: Tensor, weight_VH: Tensor, axis: Axis, *, scatter: bool = False
) -> Tensor:
    """Return the embeddings of tokens, [B, S, H].

    Args:
        tokens_BS: Token ids of the whole vocabulary.
        weight_VH: Rows of this rank; ranks hold consecutive rows.
        axis: Tensor axis of the mesh.
        scatter: True if each rank gets its part of the sequence only.
    """
    rows = weight_VH.shape[0]
    local_BS = tokens_BS - axis.rank * rows
    remote_BS = (local_BS < 0) | (local_BS >= rows)
    x_BSH = functional.embedding(local_BS.masked_fill(remote_BS, 0), weight_VH)
    x_BSH = x_BSH.masked_fill(remote_BS.unsqueeze(-1), 0.0)
    return reduce_scatter(x_BSH, axis) if scatter else all_reduce(x_BSH, axis)


class VocabularyLoss(HeadLoss):
    """`HeadLoss` over a split vocabulary."""

    def __init__(self, axis: Axis, vocab_size: int, *, gathered: bool) -> None:
        """Set the axis.

        Args:
            axis: Tensor axis of the mesh.
            vocab_size: Number of rows of the whole vocabulary that count; 0: all.
            gathered: True if the hidden states were all-gathered along the sequence, whose backward
                sums their gradients.
        """
        self.axis, self.vocab_size, self.gathered = axis, vocab_size, gathered

    def __call__(
        self,
        x_TH: Tensor,
        weight_VH: Tensor,
        target_T: Tensor,
        loss_weight_T: Tensor,
        bias_V: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of loss weight times the cross entropy of x @ weight.T + bias."""
        if not self.gathered:
            x_TH = copy_to_group(x_TH, self.axis)
        if bias_V is not None:
            x_TH, weight_VH = with_bias(x_TH, weight_VH, bias_V)
        first, own = self._place(weight_VH.shape[0], self.vocab_size)
        loss = _Loss.apply(x_TH, weight_VH, target_T, loss_weight_T, first, own, self.axis)  # type: ignore[no-untyped-call]
        return cast("Tensor", loss)

    def best(self, x_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None = None) -> Tensor:
        """Return the row of the whole vocabulary with the largest product for each token, [T]."""
        first, own = self._place(weight_VH.shape[0], self.vocab_size)
        logits_TV = functional.linear(x_TH, weight_VH, bias_V).float()
        logits_TV[:, own:] = -torch.inf
        return self._best_of(logits_TV, first)

    def scores(
        self, x_TH: Tensor, weight_VH: Tensor, target_T: Tensor, vocab_size: int
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each target, and whether it is the most probable row."""
        first, own = self._place(weight_VH.shape[0], vocab_size)
        logits_TV = functional.linear(x_TH, weight_VH).float()
        logits_TV[:, own:] = -torch.inf
        best_T = self._best_of(logits_TV, first)
        loss_T, _ = _cross_entropy(logits_TV, target_T - first, self.axis, gradient=False)
        return -loss_T, best_T == target_T

    def _best_of(self, logits_TV: Tensor, first: int) -> Tensor:
        """Return the row of the whole vocabulary with the largest logit, [T].

        Args:
            logits_TV: Logits of this rank.
            first: Number of its first row.
        """
        largest_T, row_T = logits_TV.max(dim=-1)
        pair_1T2 = torch.stack([largest_T, (row_T + first).float()], dim=-1).unsqueeze(0)
        every_RT2 = all_gather(pair_1T2, self.axis, dim=0)
        best_1T = every_RT2[..., 0].argmax(dim=0, keepdim=True)
        return every_RT2[..., 1].gather(0, best_1T)[0].long()

    def _place(self, rows: int, vocab_size: int) -> tuple[int, int]:
        """Return the number of this rank's first row, and of its rows that count."""
        first = self.axis.rank * rows
        return first, max(0, min((vocab_size or first + rows) - first, rows))


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        target_T: Tensor,
        loss_weight_T: Tensor,
        first: int,
        own: int,
        axis: Axis,
    ) -> Tensor:
        needs_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_hidden_TH = torch.empty_like(hidden_TH) if needs_grad else None
        grad_weight_VH = torch.zeros_like(weight_VH) if needs_grad else None
        total = hidden_TH.new_zeros((), dtype=torch.float32)
        for block in _blocks(hidden_TH.shape[0], weight_VH.shape[0]):
            hidden_CH = hidden_TH[block]
            logits_CV = functional.linear(hidden_CH, weight_VH)
            logits_CV[:, own:] = -torch.inf  # rows that pad the vocabulary
            compute = logits_CV.dtype
            loss_C, grad_CV = _cross_entropy(
                logits_CV, target_T[block] - first, axis, gradient=needs_grad
            )
            total = total.to(loss_C.dtype) + (loss_C * loss_weight_T[block]).sum()
            if grad_CV is None or grad_hidden_TH is None or grad_weight_VH is None:
                continue
            grad_CV = (grad_CV * loss_weight_T[block].unsqueeze(-1)).to(compute)
            grad_hidden_TH[block] = grad_CV @ weight_VH.to(compute)
            grad_weight_VH += grad_CV.t() @ hidden_CH.to(compute)
        if needs_grad:
            ctx.save_for_backward(grad_hidden_TH, grad_weight_VH)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH = ctx.saved_tensors
        return hidden_TH * grads[0], weight_VH * grads[0], *[None] * 5


def _blocks(tokens: int, rows: int) -> list[slice]:
    size = max(1, _BLOCK_BYTES // (4 * rows))
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _cross_entropy(
    logits_CV: Tensor, local_C: Tensor, axis: Axis, *, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the cross entropy of each token, [C], and its gradient by this rank's logits, [C, V].

    Args:
        logits_CV: Logits of this rank.
        local_C: Column of the target, outside [0, V) if another rank has it.
        axis: Tensor axis of the mesh.
        gradient: False: the gradient is not computed, and None.
    """
    from torch import distributed

    logits_CV = logits_CV if logits_CV.dtype == torch.float64 else logits_CV.float()
    largest_C = logits_CV.amax(dim=-1)
    axis.clock.wait(distributed.all_reduce, largest_C, distributed.ReduceOp.MAX, axis.group)
    logits_CV = logits_CV - largest_C.unsqueeze(-1)
    here_C = (local_C >= 0) & (local_C < logits_CV.shape[-1])
    column_C1 = local_C.masked_fill(~here_C, 0).unsqueeze(-1)
    chosen_C = logits_CV.gather(-1, column_C1).squeeze(-1).masked_fill(~here_C, 0.0)
    power_CV = logits_CV.exp_()
    both_2C = torch.stack([power_CV.sum(dim=-1), chosen_C])
    axis.clock.wait(distributed.all_reduce, both_2C, group=axis.group)
    sum_C, chosen_C = both_2C.unbind(0)
    loss_C = sum_C.log() - chosen_C
    if not gradient:
        return loss_C, None
    grad_CV = power_CV.div_(sum_C.unsqueeze(-1))
    grad_CV.scatter_add_(-1, column_C1, -here_C.to(grad_CV.dtype).unsqueeze(-1))
    return loss_C, grad_CV


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
    model.divide_heads(axis.rank, axis.size)
    for attention in model.attentions:
        if attention.dropout and not sequence:  # with it, all random numbers differ by rank
            attention.op = _drawing(attention.op, lambda: rng.fork(STREAM))
    for part in (plan, *plan.parts):
        for linear in part.column:
            linear.op = _after(enter, linear.op)
        for linear in part.row:
            linear.op = _before(linear.op, leave)
        _connect_embeddings(part, axis, sequence=sequence)
        if part.head_norm is not None:
            _connect_heads(model, part, axis, sequence=sequence)


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
