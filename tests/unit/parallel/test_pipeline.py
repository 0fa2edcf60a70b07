"""Schedules of a pipeline; their results are compared in `tests/distributed`."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmcore.config.derived.layout import ParallelLayout
from lmcore.families.gpt.family import GPT
from lmcore.model.shape import ModelPart, ModelShape
from lmcore.parallel.mesh import Axis, ParallelMesh
from lmcore.parallel.parallel_model import ParallelModel
from lmcore.parallel.pipeline import Pipeline, _with_equal_sizes


class Schedule:
    """Stand-in for torch's schedule, which has memory for every micro-batch."""


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """Pipeline of a rank with the middle stage, without weights."""
    group: Any = object()
    mesh = ParallelMesh(ParallelLayout(pipeline=3), 1, new_group=lambda *_: group)
    assert mesh.pipeline == Axis(1, 3, (0, 1, 2), group)

    model: Any = SimpleNamespace(
        shape=ModelShape(3, 4, 1, 4, 8, 8),
        part=ModelPart((1,), embedding=False, head=False),
        layers=[torch.nn.Identity()],
        stage_modules=lambda **_: {},
        run_stage=None,
        family=GPT,
    )
    monkeypatch.setattr(Pipeline, "_new_schedule", lambda *_: Schedule())
    return Pipeline(model, mesh, torch.device("cpu"))


def test_one_schedule_is_cached(pipeline: Pipeline) -> None:
    """A new schedule replaces it if number or size of the micro-batches changes."""
    batch = {"tokens_BS": torch.zeros(2, 8)}
    first = pipeline._schedule(batch, 4)
    assert pipeline._schedule(batch, 4) is first
    kept = weakref.ref(first)
    del first
    second = pipeline._schedule(batch, 6)
    assert kept() is None
    assert pipeline._schedule({"tokens_BS": torch.zeros(1, 8)}, 6) is not second


def test_a_lazy_device_runs_the_passes_of_a_step(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorded work runs when the schedule has ended, before the optimizer."""
    done: list[str] = []
    monkeypatch.setattr(pipeline, "run", lambda *_: done.append("schedule") or [])
    model = ParallelModel.__new__(ParallelModel)  # its modules have no part in this
    model._pipeline, model._step_boundary = pipeline, lambda: done.append("boundary")
    assert model.run([], 0) == []
    assert done == ["schedule", "boundary"]


def test_first_messages_have_one_size() -> None:
    """Torch 2.9 sends int64, receives float32, and gloo ends the process."""
    sent, received = (SimpleNamespace(tensor=x) for x in (torch.tensor(1), torch.zeros(1)))
    stage = SimpleNamespace(
        device=torch.device("cpu"), _get_init_p2p_neighbors_ops=lambda: [sent, received]
    )
    assert _with_equal_sizes(stage)() == [sent, received]
    assert sent.tensor.nbytes == received.tensor.nbytes
