"""Numbers of whole parameters; layouts of several processes are in `tests/distributed`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from lmcore.config.layout import ParallelLayout
from lmcore.parallel.mesh import Axis
from lmcore.parallel.parallel_model import LocalParameter
from lmcore.parallel.part_sums import PartSums
from lmcore.parallel.tensor_layout import TensorLayout

GROUP: Any = "a group"


def local(name: str, *, holders: int, replicated: bool) -> LocalParameter:
    weight = nn.Parameter(torch.zeros(2))
    layout = TensorLayout.whole((2,))
    return LocalParameter(name, weight, weight, layout, holders, replicated, partial=False)


def test_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are added, what several hold counts once, and nobody counts another stage's copy."""
    layout = ParallelLayout(tensor=2, pipeline=2, data=3)
    mesh = SimpleNamespace(
        layout=layout, tensor=Axis(0, 2, (0, 1), GROUP), shards=Axis(0, 1, (0,), None)
    )
    parameters = [
        local("divided", holders=3, replicated=False),
        local("norm", holders=6, replicated=True),
        local("tied", holders=6, replicated=False),  # by the first stage and the last
    ]
    names = [one.name for one in parameters]
    model = SimpleNamespace(named_parameters=lambda: [(name, None) for name in ["none", *names]])
    other = torch.tensor([7.0, 10.0, 8.0 / 2, 100.0])  # of `norm` it gives half, as we do

    def all_reduce(sums: Tensor, group: Any) -> None:
        sums += other

    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    sums = PartSums(
        parallel := SimpleNamespace(
            mesh=mesh, layout=layout, model=model, parameters=parameters, device=torch.device("cpu")
        )
    )
    found = sums(["tied", "divided", "norm"], torch.tensor([1.0, 2.0, 8.0]))
    assert found.tolist() == [101.0, 12.0, 8.0]
    assert sums([], torch.zeros(0)).tolist() == []
    parallel.device = torch.device("meta")
    nothing = PartSums(parallel)([], torch.zeros(0))  # the others' device, though none is here
    assert nothing.device == parallel.device


def test_whole_parameters() -> None:
    """Where nothing is divided nobody is asked."""
    alone = Axis(0, 1, (0,), None)
    mesh = SimpleNamespace(layout=ParallelLayout(), tensor=alone, shards=alone)
    model = SimpleNamespace(named_parameters=list)
    values = torch.tensor([3.0])
    sums = PartSums(
        SimpleNamespace(mesh=mesh, model=model, parameters=[], device=torch.device("cpu"))
    )
    assert sums(["any"], values) is values
