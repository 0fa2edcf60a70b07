"""Explanation of out-of-memory errors: where, what takes the memory, and which flags to change.

An error is recognized by torch's own type or by its text, whatever the device is.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lmcore.base.errors import LmcoreError, RunError
from lmcore.train.diagnose.memory_breakdown import (
    Activation,
    MemoryUse,
    activations,
    in_units,
    measure,
)
from lmcore.train.diagnose.memory_hints import host_remedies, remedies

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.runtime.runtime import Runtime
    from lmcore.train.state import TrainState

__all__ = ["OutOfMemoryError", "memory_error_in", "out_of_memory_explained"]

_WORDS = re.compile(
    r"out[ _]of[ _](?:\w+[ _])?memory|can(?:'|no)t allocate memory|not enough memory|ALLOC_FAILED"
    r"|(?<!LAUNCH_)OUT_OF_RESOURCES",  # of some drivers, for memory that was promised
    re.IGNORECASE,
)
_ASKED = (
    re.compile(r"tried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB|TiB|B)\b", re.IGNORECASE),
    re.compile(r"([\d.]+) (bytes|KiB|MiB|GiB) were asked for"),
)
_BYTES = {"bytes": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_MOST_CAUSES = 16
_CLOSE = 0.01
"""Relative difference of a size from torch's rounded figure."""

_PLACES = (
    (r"lmcore/generation/|lmcore/train/report/sample", "while the sample was generated"),
    (r"lmcore/train/resume/restore|lmcore/checkpoint/.*load", "while a checkpoint was loaded"),
    (r"lmcore/train/resume/(?:saver|snapshot)|lmcore/checkpoint/", "while a checkpoint was saved"),
)
_PLACES_IN_TRAINING = (
    (r"lmcore/train/validation", "in a validation after step {done}"),
    (r"lmcore/optim/", "in the update of step {step}"),
    (r"torch/(?:_tensor|autograd/__init__)\.py:backward$", "in the backward pass of step {step}"),
    (r"lmcore/(?:model|parallel)/|lmcore/train/step", "in the forward pass of step {step}"),
)
"""Patterns of stack frames (FILE:FUNCTION) and the place they show, the most specific first."""


_BUILDING = "while the model was built"


class OutOfMemoryError(RunError):
    """An error about a run that needs more memory than its device or host has."""


@contextlib.contextmanager
def out_of_memory_explained(
    plan: RunPlan,
    runtime: Runtime,
    state: TrainState | None = None,
    checkpoints: Path | None = None,
) -> Iterator[None]:
    """Turn an out-of-memory error within the context into one with breakdown and remedies.

    Args:
        plan: The run.
        runtime: Device and policies.
        state: State of the run; None before it is built.
        checkpoints: Folder of the run's checkpoints; None before training.

    Raises:
        OutOfMemoryError: Device or host ran out of memory.
    """
    try:
        yield
    except LmcoreError:
        raise
    except (RuntimeError, MemoryError) as error:
        cause = memory_error_in(error)
        if cause is None:
            raise
        raise _explained(cause, error, plan, runtime, state, checkpoints) from error


def memory_error_in(error: BaseException) -> BaseException | None:
    """Return the out-of-memory error that *error* is or was caused by; None if there is none."""
    found: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if found is None:
            return None
        if isinstance(found, torch.OutOfMemoryError | MemoryError):
            return found
        if isinstance(found, RuntimeError) and _WORDS.search(str(found)):
            return found
        found = found.__cause__ or found.__context__
    return None


def _explained(
    cause: BaseException,
    error: BaseException,
    plan: RunPlan,
    runtime: Runtime,
    state: TrainState | None,
    checkpoints: Path | None,
) -> OutOfMemoryError:
    device, where = runtime.device, _place([cause, error], state)
    said = [f"torch says: {line}" for line in str(cause).strip().splitlines()[:1]]
    if device.type != "cpu" and _of_host(cause):
        what = f"the host ran out of memory {where}"
        why, steps = said or ["the error has no text"], host_remedies(plan, runtime)
    else:
        what = f"`{device.torch_device}` ran out of memory {where}"
        layout = plan.layout
        buckets = layout.data * layout.context > 1 and not layout.zero_stage
        use = measure(state, device, buckets=buckets and layout.pipeline == 1)
        building = where == _BUILDING
        why = [*_totals(runtime, use, cause), *_consumers(plan, use, state)]
        if building:
            why.append(_size_of_model(plan, runtime))
        else:
            why += _single_ones(plan, activations(plan, runtime), _asked(cause))
        why += said
        steps = remedies(plan, runtime, use, building=building)
    steps += _goes_on(checkpoints)
    return OutOfMemoryError(
        what,
        why="\n  ".join(why),
        hint="any of these, the most effective first:\n  " + "\n  ".join(steps),
    )


def _of_host(cause: BaseException) -> bool:
    return isinstance(cause, MemoryError) or "DefaultCPUAllocator" in str(cause)


def _place(errors: list[BaseException], state: TrainState | None) -> str:
    """Return the activity of the run, from the stack of the errors."""
    frames = {
        f"{frame.filename}:{frame.name}"
        for error in errors
        for frame in traceback.extract_tb(error.__traceback__)
    }
    for pattern, words in _PLACES + (_PLACES_IN_TRAINING if state is not None else ()):
        if any(re.search(pattern, frame) for frame in frames):
            done = state.iteration if state is not None else 0
            return words.format(step=done + 1, done=done)
    return _BUILDING if state is None else f"after step {state.iteration}"


def _asked(cause: BaseException) -> float | None:
    """Return the number of bytes requested, from the text of the error; None if unknown."""
    for pattern in _ASKED:
        found = pattern.search(str(cause))
        if found is not None:
            return float(found[1].rstrip(".")) * _BYTES[found[2].lower()]
    return None


def _totals(runtime: Runtime, use: MemoryUse, cause: BaseException) -> Iterator[str]:
    asked = _asked(cause)
    more = f"; {in_units(asked)} more were requested" if asked else ""
    stats, name = use.stats, runtime.device.name
    if stats is None:
        reason = runtime.device.missing["memory_stats"]
        yield f"`{name}` does not count its memory ({reason}){more}"
        return
    limit = f" has {in_units(stats.total)}" if stats.total else ""
    parts = [f"{in_units(stats.allocated)} are in use"]
    if use.others is not None and stats.reserved > stats.allocated:
        parts.append(f"{in_units(stats.reserved - stats.allocated)} are reserved, but unused")
    if use.others:
        parts.append(f"{in_units(use.others)} are in use by other processes")
    if stats.peak_allocated > stats.allocated:
        parts.append(f"at most {in_units(stats.peak_allocated)} were in use")
    yield f"`{name}`{limit}: {', '.join(parts)}{more}"


def _consumers(plan: RunPlan, use: MemoryUse, state: TrainState | None) -> Iterator[str]:
    """Yield the groups of tensors that take the memory, the largest first."""
    rows: list[tuple[int, str]] = []
    for consumer in (use.weights, use.gradients, use.optimizer):
        if consumer.size:
            largest = f"; the largest is {consumer.largest}" if consumer.largest else ""
            rows.append((consumer.size, f"{consumer.name}: {in_units(consumer.size)}{largest}"))
    if use.rest:
        what = "activations and the rest"
        if not plan.config.parallel.by_layout:
            what = "activations and buffers of the engine"
        rows.append((use.rest, f"{what}: {in_units(use.rest)}, by difference"))
    yield from (text for _, text in sorted(rows, key=lambda row: -row[0]))
    if state is not None and use.to_come > use.gradients.size:
        yield f"gradients still to be allocated in backward: {in_units(use.to_come)}"
    if not use.fits_without_activations:
        need = in_units(use.kept)
        yield f"weights, gradients and optimizer state need {need}: more than there is"


def _size_of_model(plan: RunPlan, runtime: Runtime) -> str:
    """Return the memory of the whole model, and of this rank's part, without activations."""
    dtype, layout = runtime.precision.keep, plan.layout
    whole = plan.parameter_count * getattr(torch, dtype).itemsize
    parts = layout.tensor * layout.pipeline
    if layout.zero_stage == 3:
        parts *= layout.data * layout.context // layout.replicas
    own = f", about {in_units(whole / parts)} of it here" if parts > 1 else ""
    return (
        f"{plan.parameter_count:,} weights in {dtype} take {in_units(whole)}{own}; gradients take "
        "as much again, and optimizer state is added to that"
    )


def _single_ones(plan: RunPlan, kinds: list[Activation], asked: float | None) -> Iterator[str]:
    """Yield the sizes of single activations, and the activation that was requested."""
    batch = plan.config.training.micro_batch_size
    length = plan.config.model.seq_length
    shown = ", ".join(
        f"{kind.name} {list(kind.shape)} {kind.dtype} {in_units(kind.size)}" for kind in kinds
    )
    yield f"single tensors of a micro-batch of {batch} x {length} tokens: {shown}"
    for kind in kinds if asked else []:
        for width, words in ((1.0, ""), (0.5, " in half the width"), (2.0, " in twice the width")):
            if asked is not None and abs(asked - width * kind.size) <= _CLOSE * width * kind.size:
                yield f"the request has the size of the {kind.name}{words}"
                return


def _goes_on(checkpoints: Path | None) -> Iterator[str]:
    """Yield the flags that resume the run from its last checkpoint, if there is one."""
    if checkpoints is not None and any(checkpoints.glob("iter_*")):
        run = checkpoints.parent
        yield f"with `--load {run} --save {run}` the run resumes from its last checkpoint"
