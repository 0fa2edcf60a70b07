"""The hooks of the CUDA plugin; torch-free until a device is created."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lmcore.contract import (
    Check,
    CheckpointStager,
    CommBackend,
    Device,
    OpImpl,
    PluginInfo,
    PrecisionPolicy,
    Probe,
    Problem,
    autocast_policy,
    buffer_stager,
    full_precision_policy,
)
from lmcore.hookspecs import hookimpl

if TYPE_CHECKING:
    from lmcore.config.section import Config
    from lmcore.contract.registry import OptionRegistry


@hookimpl
def lmcore_plugin_info() -> PluginInfo:
    """Return the plugin's name and the versions that it supports."""
    return PluginInfo(
        name="cuda",
        api=">=1.3,<2",
        torch=">=2.8",
        provides=("cuda",),
        summary="NVIDIA GPUs, through PyTorch's CUDA build",
        device_resources={"k8s": "nvidia.com/gpu", "slurm": "gpu"},
    )


@hookimpl
def lmcore_probe(env: Mapping[str, str]) -> Probe:
    """Read GPUs from the driver and the build from torch's metadata; create no context."""
    from lmcore_cuda.detection.facts import read_facts
    from lmcore_cuda.probe import probe

    return probe(read_facts(), env)


@hookimpl
def lmcore_add_options(registry: OptionRegistry) -> None:
    """Add the options `--cuda-...`."""
    from lmcore_cuda.settings import CudaSection

    registry.add(CudaSection)


@hookimpl
def lmcore_launch_env(rank_info: Mapping[str, Any]) -> dict[str, str]:
    """Return settings of the GPUs' order, the allocator and, for several ranks, NCCL."""
    from lmcore_cuda.launch_env import launch_env

    return launch_env(os.environ, int(rank_info.get("world_size", 1)))


@hookimpl
def lmcore_create_device(probe: Probe, config: Config) -> Device:
    """Return the GPU of this process."""
    from lmcore_cuda.device import create_device
    from lmcore_cuda.settings import settings_of

    deterministic = config.accelerator.deterministic
    return create_device(probe, settings_of(config), deterministic=deterministic)


@hookimpl
def lmcore_validate_config(device: Device, config: Config) -> list[Problem]:
    """Report settings that this GPU or its packages do not support."""
    from lmcore_cuda.packages import problems_of as package_problems
    from lmcore_cuda.settings import problems_of

    return [*problems_of(device, config), *package_problems(device, config)]


@hookimpl
def lmcore_comm_backends() -> list[CommBackend]:
    """Offer NCCL, which comes with torch."""
    from lmcore_cuda.comm import nccl

    return [nccl()]


@hookimpl
def lmcore_op_impls(device: Device) -> list[OpImpl]:
    """Offer kernels of torch, of lmcore-triton, and of the kernel packages."""
    from lmcore_cuda.kernels import op_impls

    return op_impls(device)


@hookimpl
def lmcore_precision_policies(device: Device) -> list[PrecisionPolicy]:
    """Offer float32, half-precision products, bfloat16 ones first where there are, and 8-bit."""
    from lmcore_cuda.precision import float8_policy

    policies = [
        full_precision_policy(),
        autocast_policy(device, name="fp16", compute="float16", loss_scaling=True),
        float8_policy(device),
    ]
    if "bfloat16" in device.dtypes:
        policies.append(autocast_policy(device, name="bf16", compute="bfloat16", priority=200))
    return policies


@hookimpl
def lmcore_checkpoint_stagers(device: Device) -> list[CheckpointStager]:
    """Offer pinned buffers, which the GPU copies to directly."""
    return [buffer_stager(device)]


@hookimpl
def lmcore_doctor(probe: Probe) -> list[Check]:
    """Check the driver, torch's build, and each GPU by NVML."""
    from lmcore_cuda.doctor import checks

    return checks(probe)
