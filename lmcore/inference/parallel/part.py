"""`PartRunner`: the part of a model that a rank holds, its caches, and the calls of rank 0.

Shapes: B sequences of a pass, S tokens, H hidden, N rows of hidden states, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from lmcore.inference.parallel.messages import Call
from lmcore.parallel.collectives import gather_into

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from lmcore.families.layers.cache import SlotCache
    from lmcore.families.protocol import CausalLM
    from lmcore.parallel.mesh import ParallelMesh

__all__ = ["DTYPES", "PartRunner"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of caches and of hidden states, by their number in messages."""


class PartRunner:
    """Part of a model on this rank; all ranks make the same calls in the same order."""

    def __init__(self, model: CausalLM, mesh: ParallelMesh, group: ProcessGroup | None) -> None:
        """Take this rank's part of the model.

        Args:
            model: Part of the model in evaluation mode, with the collectives of its layers.
            mesh: Mesh with the axes `tensor` and `pipeline`; each replica on its axis `data` is a
                model, whose first rank is called rank 0 here.
            group: Group of rank 0 and the ranks of the last stage, which compute logits; None on
                other ranks.
        """
        self._first = mesh.data_rank * mesh.tensor.size
        self._model, self._mesh, self._group = model, mesh, group
        self._caches: dict[int, SlotCache] = {}
        self._last_rank = mesh.pipeline.ranks[-1] if mesh.tensor.rank == 0 else None
        """First rank of the last stage, which sends results to rank 0; None: not of this line."""
        self._dtypes: dict[tuple[str, int], torch.dtype] = {}
        """Dtype of each kind of tensor from or to a rank, sent before the first one."""
        self._hidden_dtype = torch.float32

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self._model.device

    def cache(self, number: int) -> SlotCache:
        """Return this rank's part of a cache."""
        return self._caches[number]

    def run(self, call: Call, hidden_NH: Tensor | None = None) -> Any:
        """Make a call of a method of this class, or of a cache.

        Args:
            call: Call of rank 0.
            hidden_NH: Rows of hidden states for `logits`; None on other ranks than 0.
        """
        owner = self if call.cache is None else self._caches[call.cache]
        more = () if hidden_NH is None else (hidden_NH,)
        return getattr(owner, call.method)(*call.arguments, *more)

    def new_cache(self, number: int, dtype: int) -> None:
        """Make an empty cache of a dtype of `DTYPES`."""
        self._caches[number] = self._model.new_cache(DTYPES[dtype])

    def drop_cache(self, number: int) -> None:
        """Free a cache."""
        del self._caches[number]

    def hidden(self, tokens: Sequence[Sequence[int]], view: Call | None = None) -> Tensor | None:
        """Run the layers of this part; return the last hidden states on rank 0, [B, S, H].

        Args:
            tokens: Token ids, [B, S].
            view: Call that makes the view of a cache; None: there are no tokens before.
        """
        tokens_BS = torch.tensor(tokens, device=self.device)
        cache = None if view is None else self.run(Call(*view))
        axis, before = self._mesh.pipeline, dict[str, Tensor]()
        if axis.rank > 0:
            size = (*tokens_BS.shape, self._model.shape.hidden_size)
            before["hidden_BSH"] = self._received("stage", size, axis.ranks[axis.rank - 1])
        hidden_BSH: Tensor = self._model(tokens_BS, cache, **before)
        if axis.size == 1:
            self._hidden_dtype = hidden_BSH.dtype
            return hidden_BSH if self._mesh.rank == self._first else None
        if axis.rank < axis.size - 1:
            self._send("stage", hidden_BSH, axis.ranks[axis.rank + 1])
        else:
            self._hidden_dtype = hidden_BSH.dtype
        return self._to_first("hidden", hidden_BSH, (*tokens_BS.shape, hidden_BSH.shape[-1]))

    def logits(self, rows: int, hidden_NH: Tensor | None = None) -> Tensor | None:
        """Return the logits of rows of hidden states on rank 0, [N, V].

        Args:
            rows: Number of rows.
            hidden_NH: The rows on rank 0, which broadcasts them; None on other ranks.
        """
        if self._group is None:
            return None
        if hidden_NH is None:
            size = (rows, self._model.shape.hidden_size)
            hidden_NH = torch.empty(size, dtype=self._hidden_dtype, device=self.device)
        hidden_NH = hidden_NH.contiguous()
        distributed.broadcast(hidden_NH, self._first, group=self._group)
        axis, vocabulary = self._mesh.tensor, self._model.shape.padded_vocab_size
        logits_NV = None
        if self._model.part.head:
            logits_NV = self._model.logits(hidden_NH)
            if axis.size > 1:
                parts = logits_NV.new_empty(axis.size * rows, vocabulary)
                gather_into(parts, logits_NV.contiguous(), group=axis.group)
                logits_NV = torch.cat(parts.view(axis.size, rows, vocabulary).unbind(), dim=-1)
        if self._mesh.pipeline.size == 1:
            return logits_NV if self._mesh.rank == self._first else None
        return self._to_first("logits", logits_NV, (rows, axis.size * vocabulary))

    def _to_first(self, name: str, tensor: Tensor | None, size: tuple[int, ...]) -> Tensor | None:
        """Send a result of the last stage to rank 0; return it there.

        Args:
            name: Name of the result.
            tensor: The result; used on the first rank of the last stage.
            size: Size of the result.
        """
        if self._mesh.rank == self._first:
            assert self._last_rank is not None
            return self._received(name, size, self._last_rank)
        if self._mesh.rank == self._last_rank:
            assert tensor is not None
            self._send(name, tensor, self._first)
        return None

    def _send(self, name: str, tensor: Tensor, rank: int) -> None:
        if (name, rank) not in self._dtypes:
            self._dtypes[name, rank] = tensor.dtype
            number = torch.tensor([DTYPES.index(tensor.dtype)], device=self.device)
            distributed.send(number, rank)
        assert tensor.dtype == self._dtypes[name, rank]
        distributed.send(tensor.contiguous(), rank)

    def _received(self, name: str, size: tuple[int, ...], rank: int) -> Tensor:
        if (name, rank) not in self._dtypes:
            number = torch.empty(1, dtype=torch.int64, device=self.device)
            distributed.recv(number, rank)
            self._dtypes[name, rank] = DTYPES[int(number)]
        made = torch.empty(size, dtype=self._dtypes[name, rank], device=self.device)
        distributed.recv(made, rank)
        return made
