"""Level 4: a GPT that two processes divide, in each way, takes the steps of one process."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from lmcore.base.errors import counted
from lmcore.contract.torch_versions import SPLIT_BACKWARD
from lmcore.parallel.tensor_layout import box
from lmcore_conformance.registry import Failure, check
from lmcore_conformance.tiny_run import DROPOUT, Trained, tiny_runs

if TYPE_CHECKING:
    from lmcore_conformance.process.ranks import RankBench

_check = partial(check, level="L4", group="distributed-parallel")
_STEPS = 4
_SAME_CURVE = 2e-5
"""Largest relative difference of losses and gradient norms in float32, as of `train.processes`."""

_SAME_WEIGHTS = 5e-6
"""Largest difference of a weight after the steps; on the host they are 5e-7 apart."""

# Adam would make whole steps of gradients that are zero but for rounding, with an epsilon of 1e-8.
_FLAGS = (
    "--precision fp32 --num-layers 4 --hidden-size 32 --num-attention-heads 4 --adam-eps 1e-3"
    " --make-vocab-size-divisible-by 136 --micro-batch-size 1"
)
_TENSOR = "--tensor-model-parallel-size 2"
_CONTEXT = "--context-parallel-size 2"
_PIPELINE = "--pipeline-model-parallel-size 2"


def _compare(bench: RankBench, layouts: Mapping[str, str]) -> str:
    """Train alone and in each layout, and compare."""
    worst = 0.0
    with tiny_runs(bench) as runs:
        alone = runs.train(_FLAGS, steps=_STEPS)
        for name, flags in layouts.items():
            found = runs.train(f"{_FLAGS} {flags}", steps=_STEPS, processes=bench.processes)
            pairs = [
                *zip(found.losses, alone.losses, strict=True),
                *zip(found.norms, alone.norms, strict=True),
            ]
            curve = _largest(abs(first / second - 1) for first, second in pairs)
            weights = _weights_off(found, alone)
            differing = _other_replicas(bench, found)
            # All ranks learn what any of them found: they go on, or not, together.
            gathered = bench.processes.gather([curve, weights])
            curve, weights = (_largest(values) for values in zip(*gathered, strict=True))
            if not curve <= _SAME_CURVE:
                raise Failure(f"{name}: losses or gradient norms differ by {curve:.1e} of them")
            if not weights <= _SAME_WEIGHTS:
                raise Failure(f"{name}: after {_STEPS} steps a weight is off by {weights:.1e}")
            if differing:
                raise Failure(f"{name}: the processes hold different {', '.join(differing[:3])}")
            worst = max(worst, curve)
    return f"{', '.join(layouts)}: largest relative difference {worst:.1e}"


def _largest(values: Iterable[float]) -> float:
    """Return the largest value, or NaN if any value is NaN, which `max` may pass over."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


def _weights_off(found: Trained, alone: Trained) -> float:
    """Return the largest difference of this process's weights from the run of one process."""
    differences = []
    for name, layout in found.layouts.items():
        local, full = found.tensors[name], alone.tensors[name]
        if tuple(full.shape) != layout.shape:
            raise Failure(f"`{name}` is {layout.shape} in parts, and {tuple(full.shape)} whole")
        for piece in layout.chunks:
            own = box(local, piece.start, piece.size)
            off = own - box(full, piece.offset, piece.size)
            differences.append(float(off.abs().max()))
    return _largest(differences)


def _other_replicas(bench: RankBench, found: Trained) -> list[str]:
    """Return the names of weights whose equal parts differ between the processes."""
    own = {}
    for name, layout in found.layouts.items():
        digest = hashlib.sha256(found.tensors[name].contiguous().numpy().tobytes()).hexdigest()
        part = hashlib.sha256(repr(layout.chunks).encode()).hexdigest()
        own[f"{name} {part[:8]}"] = digest[:16]
    first, *remaining = bench.processes.gather(own)
    differing = {
        held.split()[0]
        for other in remaining
        for held in first.keys() & other.keys()
        if first[held] != other[held]
    }
    return sorted(differing)


@_check(
    "parallel.tensor",
    "Two processes with tensor parallelism have the steps of one process, with and without "
    "sequence parallelism.",
    reason="`--tensor-model-parallel-size`, `--sequence-parallel`: layers too wide for one device.",
    requires=["distributed", "reduce_scatter"],
    seconds=120,
)
def tensor(bench: RankBench) -> str:
    """Train with activations whole and divided, and with layers computed again."""
    return _compare(
        bench,
        {
            "tensor": _TENSOR,
            "with sequence": f"{_TENSOR} --sequence-parallel",
            "computed again": f"{_TENSOR} --sequence-parallel --recompute-activations",
        },
    )


@_check(
    "parallel.tensor-dropout",
    "With dropout, replicated weights stay equal on both processes, bit for bit.",
    reason="If processes draw different numbers for the same activations, their replicas diverge "
    "without an error.",
    requires=["distributed", "reduce_scatter"],
    seconds=120,
)
def tensor_dropout(bench: RankBench) -> str:
    """Train for some steps and compare digests of replicated weights."""
    compared = 0
    with tiny_runs(bench) as runs:
        for more in ("", " --sequence-parallel"):
            flags = f"{_FLAGS} {_TENSOR} {DROPOUT}{more}"
            found = runs.train(flags, steps=8, processes=bench.processes)
            differing = _other_replicas(bench, found)
            if differing:
                verb = "differs" if len(differing) == 1 else "differ"
                names = ", ".join(differing[:4])
                raise Failure(f"{counted(len(differing), 'weight')} {verb}: {names}")
            compared += sum(
                layout.shape == tuple(found.tensors[name].shape)
                for name, layout in found.layouts.items()
            )
    return f"{counted(compared, 'weight')} after 8 steps"


@_check(
    "parallel.context",
    "Two processes with context parallelism have the steps of one process.",
    reason="`--context-parallel-size`: sequences that are too long for one device.",
    requires=["distributed", "reduce_scatter"],
    seconds=90,
)
def context(bench: RankBench) -> str:
    """Train with the sequence in parts."""
    return _compare(bench, {"context": _CONTEXT})


@_check(
    "parallel.pipeline",
    "Two processes with pipeline parallelism have the steps of one process, with every schedule.",
    reason="`--pipeline-model-parallel-size`: models that are too deep for one device.",
    requires=["distributed", "send_recv"],
    seconds=180,
)
def pipeline(bench: RankBench) -> str:
    """Train by each schedule that the installed torch can run."""
    named = f"{_PIPELINE} --pipeline-schedule"
    schedules = {
        "1f1b": f"{named} 1f1b",
        "gpipe": f"{named} gpipe",
        "interleaved": f"{_PIPELINE} --num-layers-per-virtual-pipeline-stage 1",
    }
    if SPLIT_BACKWARD:
        schedules |= {name: f"{named} {name}" for name in ("zero-bubble", "zero-bubble-v")}
    return _compare(bench, schedules)


@_check(
    "parallel.zero",
    "Two processes with data parallelism have the steps of one process, at every ZeRO stage.",
    reason="`--zero-stage` 1, 2 and 3: models that do not fit one device.",
    requires=["distributed", "reduce_scatter", "fsdp"],
    seconds=150,
)
def zero(bench: RankBench) -> str:
    """Train with each stage, two micro-batches a step each."""
    stages = {f"stage {number}": f"--zero-stage {number}" for number in range(4)}
    return _compare(bench, stages)
