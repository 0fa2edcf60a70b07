"""Training loops as one writes them, in every layout, beside which `lmcore train`'s is measured.

Where torch has the layout ready-made the loop is what its documentation shows: a wrapper around
the whole model, torch's AdamW, clipping, nothing else.  Where layers are divided it is a bare loop
over lmcore's divided model: forward, backward, exchanges, clipping, update.
"""

# ruff: noqa: SLF001 - takes the parts of a divided model without what lmcore does around them

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from subjects import Parts
from torch import Tensor, distributed, nn

from lmcore.families.build import build_model
from lmcore.parallel.collectives import all_reduce_coalesced
from lmcore.parallel.data_parallel import LossModule
from lmcore.parallel.parallel_model import parallelize
from lmcore.train.state import TrainState
from lmcore.train.token_mean import mean_loss, weighted

if TYPE_CHECKING:
    from lmcore.data.loading.batch import Batch
    from lmcore.parallel.parallel_model import ParallelModel

__all__ = ["by_hand"]

_RATE = 1e-4
Step = Callable[[], float]


def by_hand(parts: Parts) -> Step:
    """Return a step of a loop as one writes it, on a separate model, in the layout of *parts*."""
    layout = parts.plan.layout
    divided = layout.tensor * layout.pipeline * layout.context > 1
    return _divided(parts) if divided else _ready_made(parts)


def _ready_made(parts: Parts) -> Step:
    """Return a step with torch's `DistributedDataParallel` or `fully_shard`."""
    stage = parts.plan.layout.zero_stage
    model = build_model(parts.plan.shape, parts.runtime)
    model.initialize(1)
    root: nn.Module = LossModule(model)
    if stage:
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer, reshard_after_forward=stage == 3)
        fully_shard(root, reshard_after_forward=stage == 3)
    else:
        from torch.nn.parallel import DistributedDataParallel

        root = DistributedDataParallel(root, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(root.parameters(), lr=_RATE, fused=True)
    batches = parts.batches()

    def take() -> float:
        optimizer.zero_grad()
        loss = mean_loss(root, next(batches), model.family, torch.device("cpu"))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(root.parameters(), 1.0)
        optimizer.step()
        return _mean([loss])

    return take


def _divided(parts: Parts) -> Step:
    """Return a step over a model whose layers, stages or sequences are divided."""
    placed = parallelize(parts.plan.shape, parts.plan.layout, parts.runtime)
    placed.initialize(1)
    optimizer = TrainState.create(placed, parts.plan, parts.runtime).optimizer
    parameters = [one.source for one in placed.parameters]
    partial = [one.source for one in placed.parameters if one.partial]
    batches = parts.batches()
    count = parts.plan.num_micro_batches
    backward = _pipelined if placed.mesh.layout.pipeline > 1 else _in_place

    def take() -> float:
        placed.zero_grad()
        losses = backward(placed, [next(batches) for _ in range(count)])
        all_reduce_coalesced(
            [one.grad for one in partial if one.grad is not None], placed.mesh.tensor
        )
        grads = [one.grad for one in parameters if one.grad is not None]
        square = nn.utils.get_total_norm(grads).square()
        distributed.all_reduce(square)
        nn.utils.clip_grads_with_norm_(parameters, 1.0, square.sqrt())
        optimizer.step(_RATE)
        return _mean(losses)

    return take


def _in_place(placed: ParallelModel, batches: list[Batch]) -> list[Tensor]:
    losses = []
    for number, batch in enumerate(batches, start=1):
        own = placed._local_batch(weighted(batch, placed.model.family, share=1 / len(batches)))
        with placed._replica.accumulation(last=number == len(batches)):
            loss = placed.root(**own)
            loss.backward()
        losses.append(loss)
    return losses


def _pipelined(placed: ParallelModel, batches: list[Batch]) -> list[Tensor]:
    share = 1 / len(batches)
    own = [weighted(one, placed.model.family, share=share) for one in batches]
    pipeline = placed._pipeline
    schedule = pipeline._schedule(own[0], len(batches))
    target: dict[str, Any] = {}
    if pipeline._has_last:
        target = {"target": torch.arange(len(batches))}
    pipeline._feed.batches, pipeline._losses = own, []
    for module in pipeline.modules:
        module.taken = 0
    schedule.step(return_outputs=False, **target)
    for holders, axis in placed._shared.items():
        tied = [one.source.grad for one in placed.parameters if one.holders == holders]
        all_reduce_coalesced([one for one in tied if one is not None], axis)
    losses: list[Tensor] = pipeline._losses
    return losses


def _mean(losses: Iterable[Tensor]) -> float:
    shown = sum((one.detach() for one in losses), torch.zeros(()))
    distributed.all_reduce(shown)
    return shown.item() / distributed.get_world_size()
