"""Rules for `--step-graph`: nothing on the host may take part in forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

from lmcore.config.derived.layout import ParallelLayout
from lmcore.config.rules import Problems
from lmcore.config.settings import LoadedConfig
from lmcore.errors import ConfigError

__all__ = ["graph_problems"]

_COLLECTIVES = "forward and backward contain collectives, which the graph does not capture"


def graph_problems(loaded: LoadedConfig, layout: ParallelLayout) -> Problems:
    """Yield what prevents the capture of forward and backward of a micro-batch in a graph."""
    if not loaded.config.training.step_graph:
        return
    for name, why in _obstacles(loaded, layout):
        yield ConfigError(
            f"{loaded.shown('step_graph')} cannot be combined with {loaded.shown(name)}",
            why=why,
            hint="leave one of the two out",
        )


def _obstacles(loaded: LoadedConfig, layout: ParallelLayout) -> Iterator[tuple[str, str]]:
    config = loaded.config
    if config.parallel.engine != "native":
        yield "engine", "the other engine runs forward and backward itself"
        return
    if layout.tensor > 1:
        yield "tensor_model_parallel_size", _COLLECTIVES
    if layout.context > 1:
        yield "context_parallel_size", _COLLECTIVES
    if layout.pipeline > 1:
        yield "pipeline_model_parallel_size", _COLLECTIVES
    if layout.zero_stage:
        sharded = "zero_stage" if config.parallel.zero_stage else "use_distributed_optimizer"
        yield sharded, _COLLECTIVES
    if config.accelerator.recompute != "none":
        yield "recompute", "the host restores the random states for recomputation"
    if config.optimizer.optimizer == "sophia":
        yield "optimizer", "its Hessian estimate runs another pass with sampled labels"
