"""What does not go with `step_graph`: whatever the host decides while forward and backward run."""

from __future__ import annotations

from collections.abc import Iterator

from lmcore.config.layout import ParallelLayout
from lmcore.config.load import LoadedConfig
from lmcore.errors import ConfigError, LmcoreError

__all__ = ["graph_problems"]

_EXCHANGED = "its processes exchange tensors within forward and backward, which is not recorded"


def graph_problems(loaded: LoadedConfig, layout: ParallelLayout) -> Iterator[LmcoreError]:
    """Yield what keeps forward and backward of a micro-batch from being recorded."""
    if not loaded.value("step_graph"):
        return
    for name, why in _in_the_way(loaded, layout):
        yield ConfigError(
            f"{loaded.shown('step_graph')} does not go with {loaded.shown(name)}",
            why=why,
            hint="leave one of the two out",
        )


def _in_the_way(loaded: LoadedConfig, layout: ParallelLayout) -> Iterator[tuple[str, str]]:
    if loaded.value("engine") != "native":
        yield "engine", "the other engine runs forward and backward itself"
        return
    if layout.tensor > 1:
        yield "tensor_model_parallel_size", _EXCHANGED
    if layout.context > 1:
        yield "context_parallel_size", _EXCHANGED
    if layout.pipeline > 1:
        yield "pipeline_model_parallel_size", _EXCHANGED
    if layout.zero_stage:
        sharded = "zero_stage" if loaded.value("zero_stage") else "use_distributed_optimizer"
        yield sharded, _EXCHANGED
    if loaded.value("recompute") != "none":
        yield "recompute", "what is computed again gets its random numbers back from the host"
    if loaded.value("optimizer") == "sophia":
        yield "optimizer", "now and then it draws targets from the model, in another pass"
