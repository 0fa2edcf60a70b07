"""Engines: a model on the processes of a run, and the function that takes its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from lmcore.model.training_engine import engine_named
from lmcore.parallel.graph_capture import require_graphs
from lmcore.parallel.parallel_model import parallelize
from lmcore.runtime.process.consistency import check_kernels
from lmcore.runtime.profiler_range import ProfilerRange, no_range
from lmcore.train.compilation import compiles_blocks
from lmcore.train.sophia_hessian import require_sampled_targets
from lmcore.train.state import TrainState
from lmcore.train.step import TrainStep

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.data.loading.batch import Batch
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.step_record import PendingStep

__all__ = ["Engine", "Step", "build_engine", "open_native_engine"]


class Step(Protocol):
    """The function that takes one step; see `TrainStep.__call__`."""

    def __call__(
        self,
        batches: Iterator[Batch],
        requests: Callable[[], tuple[float, ...]] = ...,
    ) -> PendingStep:
        """Take one step and count it."""


class Engine(Protocol):
    """A model on the processes of a run, and its step."""

    @property
    def state(self) -> TrainState:
        """State of the run; to be loaded before `begin`."""

    @property
    def step(self) -> Step:
        """Function that takes one step."""

    @property
    def divided(self) -> bool:
        """True if one process alone cannot run its model: weights or samples are divided."""

    @property
    def run_files(self) -> Mapping[str, Any]:
        """JSON files for the run directory: content by file name."""

    def begin(self) -> None:
        """Prepare the first step with the weights in the state; all processes must call it."""


OpenEngine = Callable[["RunPlan", "Runtime", ProfilerRange], AbstractContextManager[Engine]]
"""The function `TrainingEngine.open`."""


class NativeEngine:
    """The engine of torch's own parallel modules; see `Engine`."""

    def __init__(
        self, plan: RunPlan, runtime: Runtime, profiler_range: ProfilerRange = no_range
    ) -> None:
        """Build the model without initial weights; all processes must call it.

        Args:
            plan: The run.
            runtime: Device, kernels and processes.
            profiler_range: Names the parts of a step in a profile.

        Raises:
            DeviceError: `--step-graph` is set, and the device cannot capture graphs.
            RunError: The family of the model does not support the layout or the optimizer.
        """
        device = runtime.device
        if plan.config.training.step_graph:
            require_graphs(device)
        parallel = parallelize(
            plan.shape,
            plan.layout,
            runtime,
            compile_blocks=compiles_blocks(plan, device),
            masked=plan.config.data.reset_attention_mask,
        )
        if plan.config.training.step_graph:
            parallel.capture_graph(device)
        self.state = TrainState.create(parallel, plan, runtime)
        require_sampled_targets(self.state)
        self.step: Step = TrainStep(self.state, plan, runtime, profiler_range)
        self._saves_in_background = plan.config.checkpoint.async_save
        self.run_files: Mapping[str, Any] = {}
        self.divided = plan.layout.divides_model or plan.layout.context > 1

    def begin(self) -> None:
        """Allocate what saves in the background need; the model is on its device."""
        if self._saves_in_background:
            self.state.optimizer.prepare_release()


@contextlib.contextmanager
def open_native_engine(
    plan: RunPlan, runtime: Runtime, profiler_range: ProfilerRange
) -> Iterator[Engine]:
    """Build the native engine of a run, as `NativeEngine`."""
    yield NativeEngine(plan, runtime, profiler_range)


@contextlib.contextmanager
def build_engine(
    plan: RunPlan, runtime: Runtime, profiler_range: ProfilerRange = no_range
) -> Iterator[Engine]:
    """Build the engine of a run, its weights not yet initialized; all processes must call it.

    Args:
        plan: The run.
        runtime: Device, kernels and processes.
        profiler_range: Names the parts of a step in a profile.
    """
    with contextlib.ExitStack() as stack:
        with runtime.ops.bind_all():
            open_engine: OpenEngine = engine_named(plan.config.parallel.engine).load()
            engine = stack.enter_context(open_engine(plan, runtime, profiler_range))
        if runtime.processes is not None:
            rendezvous = runtime.processes.rendezvous
            check_kernels(rendezvous, runtime.ops, parts=plan.layout.pipeline > 1)
        yield engine
