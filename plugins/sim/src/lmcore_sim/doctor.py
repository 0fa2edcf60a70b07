"""Checks of `lmcore doctor` on the simulated device; they run in a separate process."""

from __future__ import annotations

from lmcore.contract import Check, CheckStatus, Probe, ProbeState
from lmcore_sim.probe import REBUILD, library_problem

__all__ = ["checks"]


def checks(probe: Probe) -> list[Check]:
    """Return a check each for the library, and on a present device for memory and carrier."""
    problem = library_problem()
    if problem is not None:
        return [Check("library", CheckStatus.FAILED, problem, f"run `{REBUILD}`")]
    library = Check("library", CheckStatus.OK, "compiled for the torch that is installed")
    if probe.state is not ProbeState.PRESENT:
        return [library]
    return [library, _memory(), _carrier()]


def _memory() -> Check:
    """See that a tensor is counted while it is there."""
    import torch

    from lmcore_sim import torch_backend, torch_sim  # noqa: F401 - the first: torch knows it then

    size = 2**20
    before = torch_sim.memory_allocated()
    tensor = torch.empty(size, dtype=torch.uint8, device="sim")
    during = torch_sim.memory_allocated() - before
    del tensor
    left = torch_sim.memory_allocated() - before
    total = torch_sim.mem_get_info()[1]
    if (during, left) == (size, 0):
        return Check("memory", CheckStatus.OK, f"{total / 2**30:.4g} GiB, counted")
    return Check("memory", CheckStatus.FAILED, f"1 MiB was counted as {during} bytes, then {left}")


def _carrier() -> Check:
    from lmcore_sim.comm import simccl

    reason = simccl().available()
    if reason is None:
        return Check("simccl", CheckStatus.OK, "carried by gloo")
    return Check("simccl", CheckStatus.WARNING, reason, "several processes need a torch with gloo")
