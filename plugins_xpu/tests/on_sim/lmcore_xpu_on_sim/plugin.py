"""Hooks of lmcore-xpu for the device type `sim`; torch-free until a device is made."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from lmcore.contract import CommBackend, Device, OpImpl, PluginInfo, Probe, TorchBuild
from lmcore.hookspecs import hookimpl
from lmcore_xpu import plugin as xpu
from lmcore_xpu.detection import facts


def _gpus(*_: Any) -> tuple[facts.Gpu, ...]:
    """Return a card of one tile for each simulated device."""
    count = int(os.environ.get("LMCORE_SIM_DEVICES") or 2)
    return tuple(
        facts.Gpu(f"0000:{3 + index:02x}:00.0", "0x0bda", "xe", f"renderD{128 + index}", True)
        for index in range(count)
    )


# What `read_facts` asks the machine for.
facts.gpus = _gpus
facts._can_load = lambda library: True
facts.torch_build = lambda toolkit: TorchBuild("2.13.0+xpu", "20250302")


@hookimpl
def lmcore_plugin_info() -> PluginInfo:
    return replace(xpu.lmcore_plugin_info(), name="xpu-on-sim", provides=("sim",))


@hookimpl
def lmcore_probe(env: Any) -> Probe:
    return replace(xpu.lmcore_probe(env), device_type="sim")


def _on_device(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def call(*args: Any, **kwargs: Any) -> Any:
        from lmcore_xpu import device
        from lmcore_xpu_on_sim.adapter import device_from_torch, stand_in

        stand_in()  # again where torch was imported before this environment had the entry point
        from_torch = functools.partial(device_from_torch, Device.from_torch)
        device.Device = SimpleNamespace(from_torch=from_torch)
        found = hook(*args, **kwargs)
        backends = isinstance(found, list) and found and isinstance(found[0], CommBackend)
        return [_carried(backend) for backend in found] if backends else found

    return hookimpl(call)


def _carried(backend: CommBackend) -> CommBackend:
    """Return XCCL with simccl for a carrier, and every other one as it is."""
    from lmcore_sim.comm import register

    if backend.name != "xccl":
        return replace(backend, device_type="sim")
    return replace(backend, name="simccl", device_type="sim", register=register)


@_on_device
def lmcore_op_impls(device: Device) -> list[OpImpl]:
    """Leave out Triton's kernels, which are for devices of the type `xpu` alone."""
    return [impl for impl in xpu.lmcore_op_impls(device) if impl.id != "triton"]


def _take_over() -> None:
    """Have every other hook of the plugin here too."""
    for name, hook in vars(xpu).items():
        if name.startswith("lmcore_") and name not in globals():
            launcher = name.startswith("lmcore_add_") or name == "lmcore_launch_env"
            globals()[name] = hook if launcher else _on_device(hook)


_take_over()
