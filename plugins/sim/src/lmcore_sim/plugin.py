"""The hooks of the simulated device; torch-free until a device is created."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lmcore.contract import (
    Check,
    CheckpointStager,
    CommBackend,
    Device,
    OpImpl,
    PluginInfo,
    Probe,
    buffer_stager,
    host_copy_stager,
)
from lmcore.hookspecs import hookimpl

_KERNELS = "lmcore_sim.kernels"
_DETERMINISTIC = frozenset({"deterministic"})
_FUSED = frozenset({"deterministic", "fused"})


@hookimpl
def lmcore_plugin_info() -> PluginInfo:
    """Say what this plugin is and works with."""
    return PluginInfo(
        name="sim",
        api=">=1.3,<2",
        torch=">=2.8",
        provides=("sim",),
        summary="simulated devices, to test without hardware",
    )


@hookimpl
def lmcore_probe(env: Mapping[str, str]) -> Probe:
    """Read the environment and the library's build versions; loads neither library nor torch."""
    from lmcore_sim.probe import probe

    return probe(env)


@hookimpl
def lmcore_launch_env(rank_info: Mapping[str, Any]) -> dict[str, str]:
    """Share the host's cores, which compute for the devices, out among its workers."""
    workers = int(rank_info.get("local_world_size", 1))
    if workers <= 1:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // workers))}


@hookimpl
def lmcore_create_device() -> Device:
    """Return the device of this process."""
    from lmcore_sim.device import create_device

    return create_device()


@hookimpl
def lmcore_comm_backends() -> list[CommBackend]:
    """Offer simccl."""
    from lmcore_sim.comm import simccl

    return [simccl()]


@hookimpl
def lmcore_op_impls() -> list[OpImpl]:
    """Offer torch's functions for four ops; all other ops run the core's references."""
    return [
        OpImpl("layer_norm", "torch", f"{_KERNELS}:layer_norm", traits=_FUSED),
        OpImpl("bias_gelu", "torch", f"{_KERNELS}:bias_gelu", traits=_DETERMINISTIC),
        OpImpl("cross_entropy", "torch", f"{_KERNELS}:cross_entropy", traits=_FUSED),
        OpImpl("grad_norm", "norms", f"{_KERNELS}:grad_norm", traits=_DETERMINISTIC),
    ]


@hookimpl
def lmcore_checkpoint_stagers(device: Device) -> list[CheckpointStager]:
    """Offer pinned buffers, and new tensors."""
    return [buffer_stager(device, priority=10), host_copy_stager()]


@hookimpl
def lmcore_doctor(probe: Probe) -> list[Check]:
    """Check the library, memory and the carrier of simccl."""
    from lmcore_sim.doctor import checks

    return checks(probe)
