"""The hooks of the XPU plugin; torch-free until a device is created."""

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
    buffer_stager,
    standard_precision_policies,
)
from lmcore.hookspecs import hookimpl

if TYPE_CHECKING:
    from lmcore.config.section import Config
    from lmcore.contract.registry import OptionRegistry


@hookimpl
def lmcore_plugin_info() -> PluginInfo:
    """Say what this plugin is and works with."""
    return PluginInfo(
        name="xpu",
        api=">=1.3,<2",
        torch=">=2.8",
        provides=("xpu",),
        summary="Intel GPUs, through torch.xpu",
        # As Intel's device plugin names the GPUs of the driver i915; of the driver xe:
        # `gpu.intel.com/xe`.
        device_resources={"k8s": "gpu.intel.com/i915", "slurm": "gpu"},
    )


@hookimpl
def lmcore_probe(env: Mapping[str, str]) -> Probe:
    """Read the kernel's device tree and torch's metadata; starts no driver."""
    from lmcore_xpu.detection.facts import read_facts
    from lmcore_xpu.probe import probe

    return probe(read_facts(), env)


@hookimpl
def lmcore_add_options(registry: OptionRegistry) -> None:
    """Add `--xpu-...`: how a run uses the GPUs."""
    from lmcore_xpu.settings import XpuSection

    registry.add(XpuSection)


@hookimpl
def lmcore_launch_env(probe: Probe, rank_info: Mapping[str, Any]) -> dict[str, str]:
    """Return settings of the GPUs' order, and of oneCCL: ranks and network."""
    from lmcore_xpu.detection.facts import has_slingshot
    from lmcore_xpu.launch_env import launch_env

    return launch_env(os.environ, probe, rank_info, slingshot=has_slingshot())


@hookimpl
def lmcore_create_device(probe: Probe, config: Config) -> Device:
    """Return the GPU of this process."""
    from lmcore_xpu.device import create_device
    from lmcore_xpu.settings import settings_of

    return create_device(probe, settings_of(config))


@hookimpl
def lmcore_validate_config(device: Device, config: Config) -> list[Problem]:
    """Name what this GPU cannot do, and variables and packages that do not fit the run."""
    from lmcore_xpu.launch_env import launch_problems
    from lmcore_xpu.packages import problems_of as package_problems
    from lmcore_xpu.settings import problems_of

    return [
        *problems_of(device, config),
        *package_problems(device, config),
        *launch_problems(os.environ),
    ]


@hookimpl
def lmcore_comm_backends() -> list[CommBackend]:
    """Offer XCCL, which comes with torch, and oneCCL's bindings after it."""
    from lmcore_xpu.comm import backends

    return backends()


@hookimpl
def lmcore_op_impls(device: Device) -> list[OpImpl]:
    """Offer kernels of torch, of lmcore-triton, and of Intel's extension."""
    from lmcore_xpu.kernels import op_impls

    return op_impls(device)


@hookimpl
def lmcore_precision_policies(device: Device) -> list[PrecisionPolicy]:
    """Offer the core's policies, bfloat16 first; torch has no 8-bit products for these GPUs."""
    return standard_precision_policies(device, default="bf16")


@hookimpl
def lmcore_checkpoint_stagers(device: Device) -> list[CheckpointStager]:
    """Offer pinned buffers, which the GPU copies to directly."""
    return [buffer_stager(device)]


@hookimpl
def lmcore_doctor(probe: Probe) -> list[Check]:
    """Check nodes, libraries and torch's build."""
    from lmcore_xpu.doctor import checks

    return checks(probe)
