"""Memory that weights, gradients and optimizer state take, compared with the host's before a run.

A host promises more memory than it has, and ends a process without a message when it is used; other
devices raise an error, which `out_of_memory` explains.  Counted is what each run with the settings
allocates, without activations and copies, and swap space counts as memory: no run is refused
that could work.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lmcore.model.family import family_of
from lmcore.model.parameters import stored
from lmcore.optim.create import create_optimizer
from lmcore.runtime.host_memory import memory_of_host, memory_of_process
from lmcore.train.diagnose.memory_breakdown import Consumer, MemoryUse, in_units
from lmcore.train.diagnose.memory_hints import remedies
from lmcore.train.diagnose.out_of_memory import OutOfMemoryError

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.runtime.runtime import Runtime

__all__ = ["require_memory"]

_MUCH = 1 / 64
"""Share of the memory below which weights are no cause to count anything.

Small runs start without delay; no optimizer of the core keeps 60 times the weights.
"""


@dataclass(frozen=True)
class _Need:
    """Least bytes that some processes allocate together.

    Attributes:
        weights, gradients, optimizer: Bytes of each kind.
    """

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer

    def times(self, count: Fraction) -> _Need:
        """Return the need of *count* whole models, or of a part of one."""
        parts = (int(part * count) for part in (self.weights, self.gradients, self.optimizer))
        return _Need(*parts)


def require_memory(plan: RunPlan, runtime: Runtime) -> None:
    """Refuse a run whose weights, gradients and optimizer state exceed the memory of the host.

    Args:
        plan: The run.
        runtime: Device, precision and rank of this process.

    Raises:
        OutOfMemoryError: This process, or all processes of this host together, cannot keep them.
    """
    memory, here = memory_of_process(runtime.device), runtime.rank.local_world_size
    if memory is None or not plan.config.parallel.by_layout:  # other engines may offload
        return
    whole = plan.parameter_count * getattr(torch, runtime.precision.keep).itemsize
    if whole * here < _MUCH * memory:
        return
    trains = plan.train_iters > 0
    model = _Need(whole, whole * trains, _optimizer_state(plan, runtime) if trains else 0)
    layout = plan.layout
    replicas = layout.replicas if layout.zero_stage else layout.data * layout.context
    if layout.pipeline == 1:  # else stages differ
        own = model.times(Fraction(replicas, layout.world_size))
        _require(own, memory, plan, runtime)
    if here > 1 and (layout.pipeline == 1 or here == layout.world_size):
        together = model.times(Fraction(replicas * here, layout.world_size))
        _require(together, memory_of_host(), plan, runtime, processes=here)


def _require(
    need: _Need, memory: int, plan: RunPlan, runtime: Runtime, *, processes: int = 1
) -> None:
    """Raise `OutOfMemoryError` if a need exceeds the memory, swap space included."""
    if need.total <= memory:
        return
    stats = runtime.device.memory_stats() if runtime.device.memory_stats is not None else None
    use = MemoryUse(
        stats,
        None,
        Consumer("weights", need.weights),
        Consumer("gradients", need.gradients),
        Consumer("optimizer state", need.optimizer),
        to_come=0,
        rest=None,
    )
    steps, where = remedies(plan, runtime, use, building=True), ""
    if processes > 1:
        steps.append("fewer processes on this host, or a host with more memory")
        where = f" in the {processes} processes of this host"
    raise OutOfMemoryError(
        "the model does not fit in the memory of this host",
        why=f"{plan.parameter_count:,} weights in {runtime.precision.keep} take "
        f"{in_units(need.weights)}{where}, gradients {in_units(need.gradients)} and the state of "
        f"`--optimizer {plan.config.optimizer.optimizer}` {in_units(need.optimizer)}: together "
        f"{in_units(need.total)}, without activations\n"
        f"this host has {in_units(memory)} for them, swap space included",
        hint="any of these, the most effective first:\n  " + "\n  ".join(steps),
    )


def _optimizer_state(plan: RunPlan, runtime: Runtime) -> int:
    """Return the bytes of the optimizer's state for the whole model; 0 for an imported class."""
    settings = plan.config.optimizer
    if ":" in settings.optimizer:
        return 0
    dtype = getattr(torch, runtime.precision.keep)
    named = [
        (row.name, nn.Parameter(torch.empty(row.shape, dtype=dtype, device="meta")))
        for row in stored(family_of(plan.shape).parameters(plan.shape))
    ]
    optimizer = create_optimizer(settings, named, bind=lambda _op: _no_update)
    optimizer.eval_mode()
    return sum(tensor.nbytes for tensor in optimizer.state_tensors().values())


def _no_update(*_tensors: Any, **_numbers: Any) -> None:
    """Do nothing, in place of the kernel of an optimizer that takes no step."""
