"""All-reduces of scalars in one process; several ranks are in `tests/distributed`."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from lmcore.config.derived.layout import ParallelLayout
from lmcore.parallel.mesh import Axis
from lmcore.parallel.parallel_model import LocalParameter
from lmcore.parallel.scalar_collectives import ShardSums, all_reduce_scalars
from lmcore.parallel.tensor_layout import TensorLayout

HOST = SimpleNamespace(torch_device=torch.device("cpu"))
GROUP: Any = "a group"


@pytest.fixture(params=[False, True], ids=["one process", "a group"])
def runtime(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return a stand-in for a runtime, without and with a process group of one rank."""
    if not request.param:
        yield SimpleNamespace(device=HOST, processes=None)
        return
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield SimpleNamespace(device=HOST, processes=object())
    distributed.destroy_process_group()


def test_numbers_and_tensors_together(runtime: Any) -> None:
    """Sums come back in the order of the arguments, in one transfer."""
    found = all_reduce_scalars(runtime, 1.5, torch.tensor(2.25), 0, torch.tensor(float("inf")))
    assert found == [1.5, 2.25, 0.0, float("inf")]
    assert all(type(one) is float for one in found)


def test_precision(runtime: Any) -> None:
    """A float64 tensor makes all sums float64, also sums of plain numbers."""
    fine = 1.0 + 2.0**-40
    assert all_reduce_scalars(runtime, fine, torch.tensor(fine, dtype=torch.float64)) == [
        fine,
        fine,
    ]
    assert all_reduce_scalars(runtime, torch.tensor(fine, dtype=torch.float32)) == [1.0]


def local(name: str, *, replica_count: int, replicated: bool) -> LocalParameter:
    weight = nn.Parameter(torch.zeros(2))
    layout = TensorLayout.whole((2,))
    return LocalParameter(name, weight, weight, layout, replica_count, replicated, partial=False)


def test_sums_over_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards are summed, and a replicated parameter counts once."""
    layout = ParallelLayout(tensor=2, pipeline=2, data=3)
    mesh = SimpleNamespace(
        layout=layout, tensor=Axis(0, 2, (0, 1), GROUP), shards=Axis(0, 1, (0,), None)
    )
    parameters = [
        local("divided", replica_count=3, replicated=False),
        local("norm", replica_count=6, replicated=True),
        local("tied", replica_count=6, replicated=False),  # by the first stage and the last
    ]
    names = [one.name for one in parameters]
    model = SimpleNamespace(named_parameters=lambda: [(name, None) for name in ["none", *names]])
    other = torch.tensor([7.0, 10.0, 8.0 / 2, 100.0])  # half of `norm`, as both ranks hold it

    def all_reduce(sums: Tensor, group: Any) -> None:
        sums += other

    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    sums = ShardSums(
        parallel := SimpleNamespace(
            mesh=mesh, layout=layout, model=model, parameters=parameters, device=torch.device("cpu")
        )
    )
    found = sums(["tied", "divided", "norm"], torch.tensor([1.0, 2.0, 8.0]))
    assert found.tolist() == [101.0, 12.0, 8.0]
    assert sums([], torch.zeros(0)).tolist() == []
    parallel.device = torch.device("meta")
    nothing = ShardSums(parallel)([], torch.zeros(0))  # no shard on this rank
    assert nothing.device == parallel.device


def test_whole_parameters() -> None:
    """Without shards the values are returned without a collective."""
    alone = Axis(0, 1, (0,), None)
    mesh = SimpleNamespace(layout=ParallelLayout(), tensor=alone, shards=alone)
    model = SimpleNamespace(named_parameters=list)
    values = torch.tensor([3.0])
    sums = ShardSums(
        SimpleNamespace(mesh=mesh, model=model, parameters=[], device=torch.device("cpu"))
    )
    assert sums(["any"], values) is values
