"""Random states of a process: seeds by rank and layout, and states by name in a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmcore.config.derived.layout import ParallelLayout
from lmcore.parallel import tensor_parallel

if TYPE_CHECKING:
    from lmcore.runtime.runtime import Runtime

__all__ = [
    "named_random_states",
    "random_state_name",
    "random_states",
    "seed_everything",
    "set_random_states",
]

_STREAM = "rng.stream."
_ALONE = ParallelLayout()
_SEED_OF_PROCESS = 1_000_003
"""Difference between the seeds of consecutive ranks."""
_SEED_OF_STEP = 2_654_435_761
"""Difference between the seeds of consecutive steps; generators may use 32 bits only."""
_SEED_OF_PARTS = 2718
"""Offset of the seed of the tensor-parallel random stream."""


def random_states(runtime: Runtime) -> dict[str, Tensor]:
    """Return copies of all random states by checkpoint name: host, device, and each stream."""
    states = {
        "rng.host": torch.get_rng_state(),
        "rng.device": runtime.device.get_rng_state().clone(),
    }
    return states | {_STREAM + name: state for name, state in runtime.rng.states().items()}


def random_state_name(name: str, rank: int) -> str:
    """Return the checkpoint name of a random state; names of rank 0 have no prefix.

    Args:
        name: Name of the state in `random_states`.
        rank: Rank that the state belongs to.
    """
    return name if rank == 0 else f"rng.rank{rank}.{name.removeprefix('rng.')}"


def named_random_states(runtime: Runtime) -> dict[str, Tensor]:
    """Return copies of this rank's random states by checkpoint name."""
    states, rank = random_states(runtime), runtime.rank.rank
    return {random_state_name(name, rank): state for name, state in states.items()}


def set_random_states(states: dict[str, Tensor], runtime: Runtime) -> None:
    """Set the random states that `random_states` returned."""
    torch.set_rng_state(states["rng.host"])
    runtime.device.set_rng_state(states["rng.device"])
    runtime.rng.set_states(
        {
            name.removeprefix(_STREAM): state
            for name, state in states.items()
            if name.startswith(_STREAM)
        }
    )


def seed_everything(
    seed: int, runtime: Runtime, layout: ParallelLayout = _ALONE, *, step: int = 0
) -> None:
    """Seed the generators of host and device, and the tensor-parallel random stream.

    Ranks with the same activations draw the same numbers: the ranks of a tensor-parallel group,
    unless they divide the sequence.  All other ranks draw different numbers.  Numbers for the parts
    of a divided layer come from a stream, seeded as in Megatron with seed + 2718 + tensor rank.

    Args:
        seed: Seed of the run.
        runtime: Rank, device and random streams.
        layout: Parallel layout of the run.
        step: Number of steps done, in a run that resumes with new random numbers.
    """
    place, tensor = divmod(runtime.rank.rank, layout.tensor)
    apart = layout.sequence or layout.tensor == 1
    number = runtime.rank.rank if apart else place
    begin = seed + _SEED_OF_STEP * step
    own = (begin + _SEED_OF_PROCESS * number) % 2**63
    torch.default_generator.manual_seed(own)
    runtime.device.seed(own)
    others = runtime.rng.states()
    others.pop(tensor_parallel.STREAM, None)
    runtime.rng.set_states(others)
    if not apart:
        parts = begin + _SEED_OF_PARTS + tensor + _SEED_OF_PROCESS * place
        runtime.rng.add(tensor_parallel.STREAM, parts % 2**63)
