"""What takes the steps of a run: torch's own blocks, or another engine that is asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from lmcore.model.shape import ModelShape
from lmcore.parallel.graph_capture import require_graphs
from lmcore.parallel.parallel_model import parallelize
from lmcore.runtime.profiler_range import ProfilerRange, no_range
from lmcore.train.compilation import compiles_blocks
from lmcore.train.state import TrainState
from lmcore.train.step import TrainStep

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.data.loading.loader import Batch
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.step_record import PendingStep

__all__ = ["Engine", "Step", "open_engine"]


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
        """True if each process holds a part of the model only."""

    @property
    def records(self) -> Mapping[str, Any]:
        """JSON files for the run directory: content by file name."""

    def begin(self) -> None:
        """Prepare the first step with the weights in the state; all processes must call it."""


class NativeEngine:
    """torch's own blocks; see `Engine`."""

    def __init__(
        self, plan: RunPlan, runtime: Runtime, profiler_range: ProfilerRange = no_range
    ) -> None:
        """Build and place the model; all processes must call it.

        Raises:
            DeviceError: `--step-graph` is set, and the device cannot capture graphs.
        """
        device = runtime.device
        if plan.config.training.step_graph:
            require_graphs(device)
        parallel = parallelize(
            ModelShape.from_plan(plan),
            plan.layout,
            runtime,
            seed=None if plan.config.checkpoint.load else plan.config.training.seed,
            compile_blocks=compiles_blocks(plan, device),
            masked=plan.config.data.reset_attention_mask,
        )
        if plan.config.training.step_graph:
            parallel.capture_graph(device)
        self.state = TrainState.create(parallel, plan, runtime)
        self.step: Step = TrainStep(self.state, plan, runtime, profiler_range)
        self.records: Mapping[str, Any] = {}
        self.divided = plan.layout.divides_model or plan.layout.context > 1

    def begin(self) -> None:
        """Do nothing: the model is where it trains."""


@contextlib.contextmanager
def open_engine(
    plan: RunPlan, runtime: Runtime, profiler_range: ProfilerRange = no_range
) -> Iterator[Engine]:
    """Build the model of a run with the engine that it asks for; all processes must call it.

    Args:
        plan: The run.
        runtime: This process.
        profiler_range: Names the parts of a step for a profile.
    """
    if plan.config.parallel.engine == "native":
        yield NativeEngine(plan, runtime, profiler_range)
        return
    from lmcore.train.deepspeed.engine import open_deepspeed_engine

    with open_deepspeed_engine(plan, runtime, profiler_range) as engine:
        yield engine
