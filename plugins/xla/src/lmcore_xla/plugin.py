"""The hooks of PJRT devices; torch-free until a device is created."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lmcore.contract import (
    CommBackend,
    Device,
    OpImpl,
    PluginInfo,
    PrecisionPolicy,
    Probe,
    Problem,
)
from lmcore.contract import standard_precision_policies as standard
from lmcore.hookspecs import hookimpl

if TYPE_CHECKING:
    from lmcore.config.section import Config
    from lmcore.contract.registry import OptionRegistry

_DETERMINISTIC = frozenset({"deterministic"})


@hookimpl
def lmcore_plugin_info() -> PluginInfo:
    """Say what this plugin is and works with."""
    return PluginInfo(
        name="xla",
        api=">=1.3,<2",
        torch=">=2.8",
        provides=("xla",),
        summary="TPUs and other PJRT devices, through torch_xla",
    )


@hookimpl
def lmcore_probe(env: Mapping[str, str]) -> Probe:
    """Read the PCI bus and packages' metadata; starts no PJRT client."""
    from lmcore_xla.probe import probe, read_facts

    return probe(read_facts(), env)


@hookimpl
def lmcore_add_options(registry: OptionRegistry) -> None:
    """Add `--xla-...`: how a run uses the devices."""
    from lmcore_xla.settings import XlaSection

    registry.add(XlaSection)


@hookimpl
def lmcore_launch_env(probe: Probe) -> dict[str, str]:
    """Return the PJRT client that the probe has found, and a setting that saves compilations."""
    return {
        "PJRT_DEVICE": str(probe.facts["pjrt_device"]),
        # Else numbers that are 0 or 1, such as a learning rate of 0, are constants of a program,
        # which is compiled again for them.
        "XLA_NO_SPECIAL_SCALARS": "1",
    }


@hookimpl
def lmcore_create_device(probe: Probe, config: Config) -> Device:
    """Start PJRT's client and return the device of this process."""
    from lmcore_xla.device import create_device
    from lmcore_xla.settings import settings_of

    return create_device(probe, settings_of(config))


@hookimpl
def lmcore_validate_config(config: Config) -> list[Problem]:
    """Refuse ZeRO over several processes, which is torch's FSDP."""
    from lmcore_xla.settings import problems_of

    return problems_of(config, int(os.environ.get("WORLD_SIZE", "1")))


@hookimpl
def lmcore_comm_backends() -> list[CommBackend]:
    """Offer torch_xla's collectives where PJRT connects processes, and gloo on the host."""
    from lmcore_xla.comm import backends

    return backends()


@hookimpl
def lmcore_op_impls() -> list[OpImpl]:
    """Offer what walks over all weights; other ops are the core's references."""
    return [
        OpImpl("adamw", "compiled", "lmcore_xla.kernels:adamw", traits=_DETERMINISTIC),
        OpImpl("grad_norm", "compiled", "lmcore_xla.kernels:grad_norm", traits=_DETERMINISTIC),
    ]


@hookimpl
def lmcore_precision_policies(device: Device) -> list[PrecisionPolicy]:
    """Offer the core's policies; bfloat16 is the default where the device is no host."""
    on_host = device.facts["pjrt_device"] == "CPU"
    return standard(device) if on_host else standard(device, default="bf16")
