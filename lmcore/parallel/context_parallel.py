"""Context parallelism: each process has a part of every sequence, and attends to all of it.

A sequence is cut into twice as many chunks as there are processes; each has one from the front and
one from the back, so that causal attention is the same work for all (as Llama 3 was trained).
Keys and values are gathered; each chunk of queries then attends to all that lies before it, which
is what the bound attention op computes for fewer queries than keys.

Shapes: B batch, N heads, S sequence of this process, C = S / 2, T whole sequence, D head channels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmcore.parallel.collectives import all_gather

if TYPE_CHECKING:
    from lmcore.model.gpt import GPT
    from lmcore.parallel.mesh import Axis

__all__ = ["connect", "own_places", "own_tokens"]


def own_places(length: int, axis: Axis) -> Tensor:
    """Return the places of this process's tokens in a sequence of *length*, int64 [S]."""
    chunk = length // (2 * axis.size)
    front, back = axis.rank * chunk, (2 * axis.size - 1 - axis.rank) * chunk
    return torch.cat([torch.arange(front, front + chunk), torch.arange(back, back + chunk)])


def own_tokens(values_BT: Tensor, axis: Axis) -> Tensor:
    """Return the values of this process's tokens, [B, S]."""
    chunks = values_BT.chunk(2 * axis.size, dim=1)
    return torch.cat([chunks[axis.rank], chunks[2 * axis.size - 1 - axis.rank]], dim=1)


def connect(model: GPT, axis: Axis) -> None:
    """Let every layer attend to the whole sequence, of which the model gets a part."""
    if axis.size == 1:
        return
    for block in model.layers:
        block.attention.op = _Attention(block.attention.op, axis)
    model.document_mask = functools.partial(_document_mask, axis)  # type: ignore[method-assign]


class _Attention:
    """The attention op for this process's queries; a mask has all keys, [B, 1, S, T]."""

    def __init__(self, op: Callable[..., Tensor], axis: Axis) -> None:
        self.op, self.axis = op, axis

    def __call__(self, q_BNSD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor, **how: Any) -> Tensor:
        k_BNTD, v_BNTD = (
            _in_order(all_gather(x, self.axis, dim=2), self.axis, dim=2) for x in (k_BNSD, v_BNSD)
        )
        mask = how.pop("mask", None)
        chunk = q_BNSD.shape[2] // 2
        out = []
        for half, place in enumerate((self.axis.rank, 2 * self.axis.size - 1 - self.axis.rank)):
            own, seen = slice(half * chunk, (half + 1) * chunk), (place + 1) * chunk
            if mask is not None:
                how["mask"] = mask[:, :, own, :seen]
            q_BNCD = q_BNSD[:, :, own]
            out.append(self.op(q_BNCD, k_BNTD[:, :, :seen], v_BNTD[:, :, :seen], **how))
        return torch.cat(out, dim=2)


def _in_order(gathered: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return what the processes gave one after the other in the order of the sequence."""
    chunks = gathered.chunk(2 * axis.size, dim=dim)
    return torch.cat([*chunks[::2], *reversed(chunks[1::2])], dim=dim)


def _document_mask(axis: Axis, documents_BS: Tensor) -> Tensor:
    with torch.no_grad():
        documents_BT = _in_order(all_gather(documents_BS, axis), axis, dim=1)
    return documents_BS[:, None, :, None] != documents_BT[:, None, None, :]
