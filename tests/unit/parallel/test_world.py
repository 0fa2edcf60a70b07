"""Sums of numbers over the processes of a run."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from lmcore.parallel.world import sum_of_all

HOST = SimpleNamespace(torch_device=torch.device("cpu"))


@pytest.fixture(params=[False, True], ids=["one process", "a group"])
def runtime(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return what is asked of a runtime, without and with a group of one process."""
    if not request.param:
        yield SimpleNamespace(device=HOST, processes=None)
        return
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield SimpleNamespace(device=HOST, processes=object())
    distributed.destroy_process_group()


def test_numbers_and_tensors_together(runtime: Any) -> None:
    """Each comes back as a number in its place, in one transfer."""
    found = sum_of_all(runtime, 1.5, torch.tensor(2.25), 0, torch.tensor(float("inf")))
    assert found == [1.5, 2.25, 0.0, float("inf")]
    assert all(type(one) is float for one in found)


def test_precision(runtime: Any) -> None:
    """A tensor of float64 keeps its digits, and those of the numbers beside it."""
    fine = 1.0 + 2.0**-40
    assert sum_of_all(runtime, fine, torch.tensor(fine, dtype=torch.float64)) == [fine, fine]
    assert sum_of_all(runtime, torch.tensor(fine, dtype=torch.float32)) == [1.0]
