"""A step whose numbers are read later: the same training, and nothing waited for on the way."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lmcore.base.errors import DataError
from lmcore.contract import OP_SPECS, OpTable
from lmcore.contract.transfer.async_scalars import ScalarCopier
from lmcore.data.loading.loader import BatchLoader
from lmcore.parallel.parallel_model import parallelize
from lmcore.parallel.random_states import seed_everything
from lmcore.train.diagnose.non_finite import NonFiniteError
from lmcore.train.exit_conditions import ExitConditions
from lmcore.train.loop import train
from lmcore.train.report.display import SilentDisplay
from lmcore.train.report.run_directory import RunDirectory
from lmcore.train.report.run_report import RunReport
from lmcore.train.report.startup_clock import PhaseClock
from lmcore.train.resume.validation_history import ValidationHistory
from lmcore.train.state import TrainState
from lmcore.train.step import TrainStep
from lmcore.train.step_queue import StepQueue
from lmcore.train.step_record import PendingStep, StepRecord


class Event:
    """An event of a device that is done with all work at once; counts who waits."""

    waits = 0

    def record(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        Event.waits += 1


class NoHostReads(TorchDispatchMode):
    """Refuses what a device would be waited for: to read a number of it on the host."""

    READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not name.startswith(self.READS), f"`{name}` waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_host_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], NoHostReads]:
    """Returns a mode that refuses reads; `tolist` and `numpy` pass by torch's dispatcher."""
    watching: list[bool] = []
    main = threading.main_thread()
    for name in ("tolist", "numpy", "cpu"):
        real = getattr(Tensor, name)

        def refuse(self: Tensor, *args: Any, name: str = name, real: Any = real) -> Any:
            if watching and threading.current_thread() is main:
                raise AssertionError(f"`{name}` waits for the device")
            return real(self, *args)

        monkeypatch.setattr(Tensor, name, refuse)

    class Watching(NoHostReads):
        def __enter__(self) -> Any:
            watching.append(True)
            return super().__enter__()

        def __exit__(self, *raised: object) -> None:
            watching.pop()
            super().__exit__(*raised)

    return Watching


@pytest.fixture
def late_runtime(runtime: Any) -> Any:
    """The CPU, as a device that works on its own."""
    missing = {
        name: why
        for name, why in runtime.device.missing.items()
        if name not in {"pin_memory", "new_event"}
    }
    device = dataclasses.replace(
        runtime.device, pin_memory=Tensor.clone, new_event=Event, missing=missing
    )
    return dataclasses.replace(runtime, device=device)


@pytest.fixture
def lazy_runtime(runtime: Any) -> Any:
    """The CPU, as a device without events that records work until a boundary."""
    device = dataclasses.replace(runtime.device, step_boundary=lambda: None)
    return dataclasses.replace(runtime, device=device)


@pytest.fixture
def run_steps(make_plan: Any, make_datasets: Any) -> Any:
    """Takes steps one by one, each by a function of step, state and batches."""

    def run(flags: str, runtime: Any, take: Any, count: int = 4, change: Any = None) -> Any:
        plan = make_plan(flags)
        seed = plan.config.training.seed
        seed_everything(seed, runtime)
        with runtime.ops.bind_all():
            parallel = parallelize(plan.shape, plan.layout, runtime)
            parallel.initialize(seed)
            state = TrainState.create(parallel, plan, runtime)
            step = TrainStep(state, plan, runtime)
        if change is not None:
            change(state)
        micro = plan.config.training.micro_batch_size
        with BatchLoader(make_datasets(plan).train, micro_batch_size=micro) as batches:
            return state, [take(step, batches) for _ in range(count)]

    return run


FLAGS = (
    "--clip-grad 0.3",
    "--clip-grad 0 --micro-batch-size 2 --global-batch-size 8",
    "--optimizer lamb --lr 1e-2",
    "--clip-grad 0.3 --log-params-norm --log-num-zeros-in-grad",
)


LLAMA = (
    "--normalization RMSNorm --swiglu --ffn-hidden-size 24 --position-embedding-type rope "
    "--use-rope-scaling --group-query-attention --no-add-bias-linear "
    "--untie-embeddings-and-output-weights"
)


@pytest.mark.parametrize("flags", FLAGS)
def test_computes_the_same(
    run_steps: Any, runtime: Any, late_runtime: Any, weights: Any, flags: str
) -> None:
    """Losses, norms, rates, counters, weights and moments match a step read at once."""
    one, plain = run_steps(flags, runtime, lambda step, batches: step(batches).result())
    two, late = run_steps(flags, late_runtime, lambda step, batches: step(batches))
    assert [pending.result() for pending in late] == plain
    assert two.counters() == one.counters()
    for name, tensor in weights(one).items():
        assert torch.equal(weights(two)[name], tensor), name


@pytest.mark.parametrize("flags", [FLAGS[0], FLAGS[-1]])
def test_a_lazy_device_computes_the_same(
    run_steps: Any, runtime: Any, lazy_runtime: Any, weights: Any, no_host_reads: Any, flags: str
) -> None:
    """Nothing is read between the boundaries of a step, and no event is needed."""

    def watched(step: Any, batches: Any) -> Any:
        with no_host_reads():
            return step(batches)

    own_ops = OpTable(OP_SPECS, [])
    plain, lazy = (dataclasses.replace(one, ops=own_ops) for one in (runtime, lazy_runtime))
    one, records = run_steps(flags, plain, lambda step, batches: step(batches).result())
    assert (records[0].params_norm is not None) == ("params-norm" in flags)
    two, late = run_steps(flags, lazy, watched)
    assert {pending.ready() for pending in late} == {None}
    assert [pending.result() for pending in late] == records
    for name, tensor in weights(one).items():
        assert torch.equal(weights(two)[name], tensor), name


def test_step_boundaries(run_steps: Any, late_runtime: Any) -> None:
    """The work that a lazy device records runs after each micro-batch and after the update."""
    calls: list[None] = []
    device = dataclasses.replace(late_runtime.device, step_boundary=lambda: calls.append(None))
    counts: list[int] = []

    def take(step: Any, batches: Any) -> None:
        before = len(calls)
        step(batches)
        counts.append(len(calls) - before)

    flags = "--micro-batch-size 2 --global-batch-size 8"
    run_steps(flags, dataclasses.replace(late_runtime, device=device), take, 2)
    assert counts == [4 + 1] * 2


def masked(batches: Iterator[Any], valid: int) -> Iterator[Any]:
    """Yield micro-batches with so many valid targets, and every second one without any."""
    for number, batch in enumerate(batches):
        weights = torch.zeros_like(batch["loss_weight_BS"])
        weights[0, : valid if number % 2 else 0] = 1
        yield batch | {"loss_weight_BS": weights}


@pytest.mark.parametrize("flags", ["--clip-grad 0", "--clip-grad 0.3"])
def test_masked_targets(run_steps: Any, runtime: Any, late_runtime: Any, flags: str) -> None:
    """Gradients are divided on the device by the share of valid targets, as on the host."""
    flags = f"{flags} --micro-batch-size 2 --global-batch-size 8"
    one, plain = run_steps(flags, runtime, lambda step, own: step(masked(own, 3)).result())
    two, late = run_steps(flags, late_runtime, lambda step, own: step(masked(own, 3)))
    for found, wanted in zip([pending.result() for pending in late], plain, strict=True):
        assert found.loss == pytest.approx(wanted.loss, rel=1e-6)
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-6)
    for name, tensor in one.tensors().items():
        torch.testing.assert_close(two.tensors()[name], tensor, rtol=1e-5, atol=1e-7)


def test_no_valid_target(run_steps: Any, late_runtime: Any) -> None:
    """The result's error names the step; the counters stay as before it, weights are finite."""
    valid = iter([3, 0, 3])
    flags = "--micro-batch-size 2 --global-batch-size 8"
    state, late = run_steps(
        flags, late_runtime, lambda step, own: step(masked(own, next(valid))), 3
    )
    assert late[0].result().loss is not None
    with pytest.raises(DataError, match="no target counts in the loss of step 2, samples 8 to 15"):
        late[1].result()
    assert (state.iteration, state.consumed_samples) == (1, 8)
    assert all(torch.isfinite(tensor).all() for tensor in state.tensors().values())


@pytest.mark.parametrize("model", ["", LLAMA], ids=["gpt", "llama"])
def test_nothing_is_read_in_a_step(
    run_steps: Any, late_runtime: Any, no_host_reads: Any, model: str
) -> None:
    """From the first batch to the update nothing of the core has the host read a number."""

    def watched(step: Any, batches: Any) -> Any:
        with no_host_reads():
            return step(batches)

    before = Event.waits
    flags = f"--micro-batch-size 2 --global-batch-size 8 --clip-grad 1 {model}"
    own_ops = dataclasses.replace(late_runtime, ops=OpTable(OP_SPECS, []))
    _, late = run_steps(flags, own_ops, watched)
    assert Event.waits == before
    assert all(one.result().loss is not None for one in late)
    assert Event.waits == before + 4


def test_the_watch_sees_reads(run_steps: Any, runtime: Any, no_host_reads: Any) -> None:
    """A step that reads its loss at once is refused, as is each other way to read a number."""

    def watched(step: Any, batches: Any) -> Any:
        with no_host_reads():
            return step(batches)

    with pytest.raises(AssertionError, match="`tolist` waits for the device"):
        run_steps("", dataclasses.replace(runtime, ops=OpTable(OP_SPECS, [])), watched, 1)
    value = torch.ones(())
    for read in (float, bool, Tensor.item, Tensor.cpu, lambda one: one.nonzero()):
        with no_host_reads(), pytest.raises(AssertionError, match="waits for the device"):
            read(value)


def test_where_it_can_be_used(
    make_plan: Any, runtime: Any, late_runtime: Any, lazy_runtime: Any
) -> None:
    """On a lazy device or with events and pinned memory, unless switched off or scaling losses."""

    def asynchronous(flags: str, runtime: Any) -> bool:
        return TrainStep(SimpleNamespace(), make_plan(flags), runtime).asynchronous  # type: ignore[arg-type]

    assert asynchronous("", late_runtime)
    assert asynchronous("", lazy_runtime)
    assert not asynchronous("", runtime)
    assert not asynchronous("--no-async-metrics", late_runtime)
    scaled = dataclasses.replace(late_runtime.precision, loss_scaling=True)
    assert not asynchronous("", dataclasses.replace(late_runtime, precision=scaled))


def test_not_finite(run_steps: Any, late_runtime: Any) -> None:
    """The result's error names step and micro-batch; the counters stay as before the step."""

    def spoil(state: Any) -> None:
        real, calls = state.model.loss, iter(range(99))
        state.model.loss = lambda **batch: real(**batch) * (math.nan if next(calls) == 5 else 1.0)

    flags = "--micro-batch-size 2 --global-batch-size 8"
    state, late = run_steps(flags, late_runtime, lambda step, batches: step(batches), 3, spoil)
    assert late[0].result().loss is not None
    assert state.iteration == 3
    with pytest.raises(NonFiniteError, match="the loss is nan at step 2, samples 8 to 15") as one:
        late[1].result()
    assert "micro-batch 2 of 4 is the first" in str(one.value.why)
    assert "`--no-async-metrics`" in str(one.value.hint)
    assert (state.iteration, state.consumed_samples) == (1, 8)


def test_gradient_not_finite(run_steps: Any, late_runtime: Any) -> None:
    """A finite loss with a gradient of infinity is heard of too."""

    def spoil(state: Any) -> None:
        state.model.final_norm.bias.register_hook(lambda grad: grad * math.inf)

    _, (late,) = run_steps("", late_runtime, lambda step, batches: step(batches), 1, spoil)
    with pytest.raises(NonFiniteError, match=r"the gradient norm is (inf|nan) at step 1"):
        late.result()


def test_reader_uses_its_memory_again(late_runtime: Any) -> None:
    """Numbers come as they were when they were sent; their memory serves the next ones."""
    reader = ScalarCopier(late_runtime.device)
    values = torch.tensor([1.5, 2.0])
    sent = reader.copy(values)
    other = reader.copy(values + 1)
    values.zero_()
    assert (sent.read(), other.read()) == ([1.5, 2.0], [2.5, 3.0])
    place = sent._buffer.data_ptr()
    assert place in {reader.copy(values)._buffer.data_ptr(), reader.copy(values)._buffer.data_ptr()}


class Recorder(TrainStep):
    """A late step that counts how many results were asked for when it is called."""

    asked: list[int]

    def __call__(self, *args: Any, **kwargs: Any) -> PendingStep:
        self.asked.append(Event.waits)
        return super().__call__(*args, **kwargs)


@pytest.fixture
def run_loop(make_plan: Any, make_state: Any, make_datasets: Any, tmp_path: Path) -> Any:
    """Runs the whole loop; returns report, rows, saved steps and waits before each step."""

    def run(flags: str, runtime: Any, name: str, change: Any = None) -> Any:
        plan = make_plan(f"{flags} --no-tensorboard")
        state, saved = make_state(plan), []
        if change is not None:
            change(state)

        def save(*, timed: bool = False) -> Path:
            saved.append((state.iteration, Event.waits))
            return Path(f"iter_{state.iteration:07d}")

        step = Recorder(state, plan, runtime)
        step.asked, first = [], Event.waits
        (tmp_path / name).mkdir()
        plugins: Any = None
        directory = RunDirectory(tmp_path / name)
        report = RunReport(plan, runtime, plugins, directory, SilentDisplay(), PhaseClock())
        with report.recording(after_step=0), ExitConditions(plan.config.training) as exits:
            engine: Any = SimpleNamespace(state=state, step=step)
            saver: Any = SimpleNamespace(save=save, raise_background_error=lambda: None)
            train(
                engine,
                make_datasets(plan),
                plan,
                runtime,
                report,
                saver,
                exits,
                ValidationHistory(),
            )
        rows = [json.loads(line) for line in directory.metrics.read_text().splitlines()]
        return report, rows, [(at, n - first) for at, n in saved], [n - first for n in step.asked]

    return run


def test_rows_are_the_same(run_loop: Any, runtime: Any, late_runtime: Any) -> None:
    """A run leaves the rows, validations and saves that it leaves where numbers are read at once.

    The numbers of a step are asked for when the next one is queued; before a save, a validation and
    the end all are.
    """
    flags = "--train-iters 8 --eval-interval 3 --eval-iters 1 --split 80,20,0 --save-interval 5"
    plain_report, plain, plain_saved, _ = run_loop(flags, runtime, "plain")
    report, late, saved, asked = run_loop(flags, late_runtime, "late")
    times = {"step_time_ms", "data_wait_ms", "tokens_per_second", "mfu"}
    assert [{k: v for k, v in row.items() if k not in times} for row in late] == [
        {k: v for k, v in row.items() if k not in times} for row in plain
    ]
    assert all(row["step_time_ms"] > 0 for row in late)
    assert report.validation == plain_report.validation
    assert [at for at, _ in saved] == [at for at, _ in plain_saved] == [5, 8]
    # Step 1 is waited for; 2 is not when 3 begins, but 3 is validated; 5 is saved; 6 validated.
    assert asked == [0, 1, 1, 3, 3, 5, 6, 6]
    assert saved == [(5, 5), (8, 8)]


def test_an_exit_waits_for_all(run_loop: Any, late_runtime: Any) -> None:
    """A run that ends early reports the step that it ended with."""
    report, rows, saved, _ = run_loop("--exit-interval 3", late_runtime, "late")
    assert report.reason == "step 3 is a multiple of --exit-interval 3"
    assert ([row["step"] for row in rows], saved) == ([1, 2, 3], [(3, 3)])


def test_nothing_is_saved_after_nan(run_loop: Any, late_runtime: Any) -> None:
    """The step before a save is looked at first."""

    def spoil(state: Any) -> None:
        real, calls = state.model.loss, iter(range(99))
        state.model.loss = lambda **batch: real(**batch) * (math.nan if next(calls) == 3 else 1.0)

    with pytest.raises(NonFiniteError, match="at step 4"):
        run_loop("--save-interval 4", late_runtime, "late", spoil)


@pytest.mark.parametrize(
    "host, device, late, expected",
    [
        pytest.param(1.0, 9.0, 0.0, [10.0, 10.0, 9.0, 9.0], id="device-bound"),
        pytest.param(9.0, 1.0, 0.0, [10.0, 9.0, 9.0, 10.0], id="host-bound"),
        pytest.param(9.0, 0.0, 0.0, [9.0, 9.0, 9.0, 9.0], id="synchronous"),
        pytest.param(9.0, 0.0, 0.001, [9.001, 9.0, 9.0, 9.001], id="synchronous-late-event"),
    ],
)
def test_time_of_a_step(
    step_times: Any, host: float, device: float, late: float, expected: list[float]
) -> None:
    """It is the device's time if the host waits for the result, and else the time of the call.

    Each step takes the host and the device so many seconds; events report an end so much later.
    """
    assert step_times(host, device, late) == pytest.approx(expected)


def test_time_of_a_step_of_a_lazy_device(step_times: Any) -> None:
    """It is the time of its call and of the wait for its result: all of them are the run's time."""
    assert step_times(2.0, 5.0, told=False) == pytest.approx([7.0, 5.0, 5.0, 7.0])


@pytest.fixture
def step_times(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the times of four steps, with a validation after the first."""
    now, free = [0.0], [0.0]
    monkeypatch.setattr(
        "lmcore.train.step_queue.time", SimpleNamespace(perf_counter=lambda: now[0])
    )

    def times(host: float, device: float, late: float = 0.0, *, told: bool = True) -> list[float]:
        def step(batches: Any) -> PendingStep:
            now[0] += host
            done = free[0] = max(now[0], free[0]) + device + late

            def read() -> StepRecord:
                now[0] = max(now[0], done)
                return StepRecord(
                    step=1,
                    consumed_samples=4,
                    consumed_tokens=64,
                    global_batch_size=4,
                    learning_rate=1e-3,
                )

            return PendingStep(read, ready=lambda: now[0] >= done if told else None)

        queue = StepQueue(step, SimpleNamespace(wait_seconds=0.0))  # type: ignore[arg-type]
        found = []
        for number, wait in enumerate((True, False, False, True), start=1):
            queue.submit(number)
            found += [record.step_time_ms / 1e3 for record in queue.completed(wait=wait)]
            if wait:
                now[0] += 100.0  # a validation
        return found

    return times
