"""The need of a run for the host's memory, before anything is allocated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from lmcore.cli.main import main
from lmcore.config.derived.layout import ParallelLayout
from lmcore.config.optimizers import OPTIMIZERS
from lmcore.train.diagnose import memory_need
from lmcore.train.diagnose.memory_need import require_memory
from lmcore.train.diagnose.out_of_memory import OutOfMemoryError


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the bytes that the host has."""

    def limit(size: int) -> None:
        monkeypatch.setattr(memory_need, "memory_of_host", lambda: size)
        monkeypatch.setattr(memory_need, "memory_of_process", lambda _device: size)

    return limit


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_need_is_what_a_run_allocates(
    optimizer: str, make_plan: Any, make_state: Any, runtime: Any, memory: Any
) -> None:
    """A run is refused with a byte less than its tensors have, and not with as much."""
    plan = make_plan(f"--optimizer {optimizer}")
    state = make_state(plan)
    with state.evaluation_weights():
        weights = sum(one.nbytes for one in state.tensors(optimizer=False).values())
        total = sum(one.nbytes for one in state.tensors().values()) + weights  # gradients
    assert weights == 4 * plan.parameter_count
    memory(total)
    require_memory(plan, runtime)
    memory(total - 1)
    with pytest.raises(OutOfMemoryError, match="does not fit in the memory of this host") as caught:
        require_memory(plan, runtime)
    assert f"`--optimizer {optimizer}`" in str(caught.value.why)
    assert "`--num-layers`" in str(caught.value.hint)


def test_hint_is_a_smaller_state(make_plan: Any, runtime: Any, memory: Any) -> None:
    """AdamW with moments of 8 bits is offered where weights and gradients fit."""
    plan = make_plan("")
    memory(12 * plan.parameter_count)
    with pytest.raises(OutOfMemoryError) as caught:
        require_memory(plan, runtime)
    assert "`--optimizer adam8bit`" in str(caught.value.hint)


LAYOUTS = [
    # layout, processes here, whole models here, of 16 bytes per parameter
    (ParallelLayout(data=2), 2, 2),
    (ParallelLayout(data=4), 2, 2),
    (ParallelLayout(tensor=2), 2, 1),
    (ParallelLayout(tensor=2), 1, 0.5),
    (ParallelLayout(pipeline=2), 2, 1),
    (ParallelLayout(pipeline=2, data=2), 4, 2),
    (ParallelLayout(pipeline=2), 1, 0),
    (ParallelLayout(context=2), 2, 2),
    (ParallelLayout(data=4, zero_stage=1), 4, 1),
    (ParallelLayout(data=4, zero_stage=3, replicas=2), 4, 2),
    (ParallelLayout(data=4, zero_stage=3), 2, 0.5),
]


@pytest.mark.parametrize("layout, here, models", LAYOUTS)
def test_processes_of_a_host_share_its_memory(
    layout: ParallelLayout, here: int, models: float, make_plan: Any, runtime: Any, memory: Any
) -> None:
    """Processes together need a multiple, or a part, of the model; an unknown part is no need."""
    plan = dataclasses.replace(make_plan(""), layout=layout, world_size=layout.world_size)
    rank = dataclasses.replace(runtime.rank, world_size=layout.world_size, local_world_size=here)
    runtime = dataclasses.replace(runtime, rank=rank)
    need = int(models * 16 * plan.parameter_count)
    memory(need + 4096)  # counts of steps
    require_memory(plan, runtime)
    if need:
        memory(need - 1)
        with pytest.raises(OutOfMemoryError) as caught:
            require_memory(plan, runtime)
        assert (f"in the {here} processes of this host" in str(caught.value.why)) == (here > 1)


def test_what_is_not_refused(make_plan: Any, runtime: Any, memory: Any, monkeypatch: Any) -> None:
    """A run without steps, one of another engine, and one on another device have other needs."""
    plan = make_plan("")
    memory(5 * plan.parameter_count)
    require_memory(dataclasses.replace(plan, train_iters=0), runtime)
    parallel = dataclasses.replace(plan.config.parallel, engine="other")
    config = dataclasses.replace(plan.config, parallel=parallel)
    require_memory(dataclasses.replace(plan, config=config), runtime)
    monkeypatch.setattr(memory_need, "memory_of_process", lambda _device: None)
    require_memory(plan, runtime)


def test_command(capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: Any) -> None:
    """`lmcore train` refuses a model larger than any host at once, and leaves no run."""
    monkeypatch.chdir(tmp_path)
    flags = "--num-layers 1000 --hidden-size 65536 --num-attention-heads 64 --device cpu"
    assert main(["train", *flags.split(), "--train-iters", "1", "--progress", "none"]) == 1
    error = capsys.readouterr().err
    assert "error: the model does not fit in the memory of this host" in error
    assert "swap space included" in error
    assert not [*tmp_path.rglob("config.yaml")]
