"""Gradient reductions of a sharded model, over a fake process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn

from lmcore.config.derived.layout import ParallelLayout
from lmcore.contract.torch_versions import CUSTOM_SHARD_COLLECTIVES
from lmcore.parallel import data_parallel
from lmcore.parallel.data_parallel import shard_stages
from lmcore.parallel.mesh import ParallelMesh


class Stage(nn.Module):
    """Two layers and one module beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a number."""
        for layer in self.layers:
            x = layer(x)
        return self.last(x).sum()


@pytest.fixture
def four_processes() -> Iterator[None]:
    """Process group of this process and three fake ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("can_average", [True, False])
def test_reductions(
    monkeypatch: pytest.MonkeyPatch, four_processes: None, replicas: int, *, can_average: bool
) -> None:
    """Gradients are averaged over shards and replicas if the backend can, else summed."""
    asked: list[Any] = []

    def watching(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            asked.append(more["op"])
            return real(*args, **more)

        return call

    monkeypatch.setattr(distributed, "all_reduce", watching(distributed.all_reduce))
    owner, name = (distributed, "reduce_scatter_tensor")
    if CUSTOM_SHARD_COLLECTIVES:
        owner, name = data_parallel, "scatter_into"
    monkeypatch.setattr(owner, name, watching(getattr(owner, name)))
    layout = ParallelLayout(data=4, replicas=replicas, zero_stage=2)
    mesh = ParallelMesh(
        layout,
        0,
        new_group=lambda ranks, _: distributed.new_group(list(ranks)),
        can_average=can_average,
    )
    stage = Stage()
    shard_stages([stage], mesh)
    stage(torch.ones(2, 8)).backward()
    wanted = distributed.ReduceOp.AVG if can_average else distributed.ReduceOp.SUM
    assert set(asked) == {wanted}
    assert len(asked) == 3 * replicas  # of each layer, and of the rest
