"""Context parallelism: each rank has a part of every sequence, and attends to all of it.

A sequence is cut into twice as many chunks as there are ranks; each rank has one chunk from the
front and one from the back, so that causal attention is the same work for all (Llama 3's scheme).
Keys and values are all-gathered.  If attention is causal, each chunk of queries attends to the
keys up to its own end, which the bound attention op computes for fewer queries than keys; otherwise
all queries attend to all keys at once.

Shapes: B batch, N heads, S sequence of this rank, C = S / 2, T whole sequence, D head channels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.parallel.collectives import all_gather

if TYPE_CHECKING:
    from lmcore.families.protocol import Model
    from lmcore.parallel.mesh import Axis

__all__ = ["connect", "local_positions", "local_tokens"]


def local_positions(length: int, axis: Axis) -> Tensor:
    """Return the positions of this rank's tokens, int64 [S].

    Args:
        length: Length of the whole sequence.
        axis: Context axis of the mesh.
    """
    chunk = length // (2 * axis.size)
    front, back = axis.rank * chunk, (2 * axis.size - 1 - axis.rank) * chunk
    return torch.cat([torch.arange(front, front + chunk), torch.arange(back, back + chunk)])


def local_tokens(values_BT: Tensor, axis: Axis) -> Tensor:
    """Return the values of this rank's tokens, [B, S].

    Args:
        values_BT: Values of all tokens.
        axis: Context axis of the mesh.
    """
    chunks = values_BT.chunk(2 * axis.size, dim=1)
    return torch.cat([chunks[axis.rank], chunks[2 * axis.size - 1 - axis.rank]], dim=1)


def connect(model: Model, axis: Axis) -> None:
    """Wrap the attention ops of *model*, so that each layer attends to the whole sequence.

    Args:
        model: Model that gets this rank's part of each sequence; changed in place.
        axis: Context axis of the mesh.

    Raises:
        RunError: The model has no attention that could be wrapped.
    """
    if axis.size == 1:
        return
    if not model.attentions:  # layers of other kinds would see a part of each sequence alone
        raise model.unsupported("--context-parallel-size")
    for attention in model.attentions:
        attention.op = _Attention(attention.op, axis)
    model.document_mask = functools.partial(_document_mask, axis)  # type: ignore[method-assign]


class _Attention:
    """Attention op for this rank's queries; a mask covers all keys, [B, 1, S, T]."""

    def __init__(self, op: Callable[..., Tensor], axis: Axis) -> None:
        self.op, self.axis = op, axis

    def __call__(
        self,
        q_BNSD: Tensor,
        k_BNSD: Tensor,
        v_BNSD: Tensor,
        *,
        causal: bool,
        mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        k_BNTD, v_BNTD = (
            _in_order(all_gather(x, self.axis, dim=2), self.axis, dim=2) for x in (k_BNSD, v_BNSD)
        )
        options["causal"] = causal
        if not causal:
            if mask is not None:
                options["mask"] = mask
            return self.op(q_BNSD, k_BNTD, v_BNTD, **options)
        chunk = q_BNSD.shape[2] // 2
        out = []
        for half, index in enumerate((self.axis.rank, 2 * self.axis.size - 1 - self.axis.rank)):
            own, end = slice(half * chunk, (half + 1) * chunk), (index + 1) * chunk
            if mask is not None:
                options["mask"] = mask[:, :, own, :end]
            q_BNCD = q_BNSD[:, :, own]
            out.append(self.op(q_BNCD, k_BNTD[:, :, :end], v_BNTD[:, :, :end], **options))
        return torch.cat(out, dim=2)


def _in_order(gathered: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return gathered parts, which are in the order of ranks, in the order of the sequence."""
    chunks = gathered.chunk(2 * axis.size, dim=dim)
    return torch.cat([*chunks[::2], *reversed(chunks[1::2])], dim=dim)


def _document_mask(axis: Axis, documents_BS: Tensor) -> Tensor:
    with torch.no_grad():
        documents_BT = _in_order(all_gather(documents_BS, axis), axis, dim=1)
    return documents_BS[:, None, :, None] != documents_BT[:, None, None, :]
