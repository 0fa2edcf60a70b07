"""The hooks of the CUDA plugin; torch-free until a device is created."""

from __future__ import annotations

from collections.abc import Mapping

from lmcore.accelerator import (
    Check,
    CheckpointStager,
    CommBackend,
    Device,
    PluginInfo,
    PrecisionPolicy,
    Probe,
    RecomputePolicy,
    autocast_policy,
    buffer_stager,
    full_precision_policy,
    standard_recompute_policies,
)
from lmcore.hookspecs import hookimpl


@hookimpl
def lmcore_plugin_info() -> PluginInfo:
    """Say what this plugin is and works with."""
    return PluginInfo(
        name="cuda",
        api=">=1,<2",
        torch=">=2.11",
        provides=("cuda",),
        summary="NVIDIA GPUs, through PyTorch's CUDA build",
    )


@hookimpl
def lmcore_probe(env: Mapping[str, str]) -> Probe:
    """Ask the driver for GPUs and torch's metadata for its build; makes no context."""
    from lmcore_cuda.detect import probe
    from lmcore_cuda.facts import read_facts

    return probe(read_facts(), env)


@hookimpl
def lmcore_launch_env() -> dict[str, str]:
    """Number the GPUs as the driver does, so that the probe and torch speak of the same one."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@hookimpl
def lmcore_create_device() -> Device:
    """Return the GPU of this process."""
    from lmcore_cuda.device import create_device

    return create_device()


@hookimpl
def lmcore_comm_backends() -> list[CommBackend]:
    """Offer NCCL, which comes with torch."""
    from lmcore_cuda.device import nccl

    return [nccl()]


@hookimpl
def lmcore_precision_policies(device: Device) -> list[PrecisionPolicy]:
    """Offer float32, half-precision products, and bfloat16 ones first where the GPU has them."""
    policies = [
        full_precision_policy(),
        autocast_policy(device, name="fp16", compute="float16", loss_scaling=True),
    ]
    if "bfloat16" in device.dtypes:
        policies.append(autocast_policy(device, name="bf16", compute="bfloat16", priority=200))
    return policies


@hookimpl
def lmcore_recompute_policies(device: Device) -> list[RecomputePolicy]:
    """Offer the core's policies, offloading to pinned memory among them."""
    return standard_recompute_policies(device)


@hookimpl
def lmcore_checkpoint_stagers(device: Device) -> list[CheckpointStager]:
    """Offer pinned buffers, which the GPU copies to directly."""
    return [buffer_stager(device)]


@hookimpl
def lmcore_doctor(probe: Probe) -> list[Check]:
    """Check driver and torch's build."""
    from lmcore_cuda.doctor import checks

    return checks(probe)
