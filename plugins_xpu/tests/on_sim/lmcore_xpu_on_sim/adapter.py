"""`torch.xpu` over the simulated device: torch's module keeps its names, `torch.sim` works.

It replaces the parts that a torch for Intel GPUs has, so torch itself loads it (an entry point of
the group `torch.backends`): the plugin's hooks then find torch complete, and replace nothing.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from fake_torch_xpu import FACTORIES, Card
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._device import _device_constructors

from lmcore_sim import torch_backend  # makes the device known to torch  # noqa: F401

_NAME = "Intel(R) Data Center GPU Max 1100"
_ATEN = torch.library.Library("aten", "IMPL")
_HALF = (torch.bfloat16, torch.float16)


@functools.cache
def stand_in() -> None:
    """Have `torch.xpu` be the simulated device, in the whole process from here on."""
    sim = torch.get_device_module("sim")
    for name in torch.xpu.__all__:
        ours = getattr(sim, name, None)
        if callable(ours) and not inspect.isclass(ours):
            setattr(torch.xpu, name, _on_sim(ours))
    torch.xpu.Stream = sim.Stream
    if hasattr(torch.accelerator, "Graph"):  # from torch 2.12
        torch.xpu.XPUGraph = torch.accelerator.Graph
    # Attention of the simulated device is torch's composite, whose products are otherwise float32.
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    torch.xpu.get_device_name = lambda device=None: _NAME
    torch.xpu.get_device_properties = _properties
    torch.xpu.get_arch_list = lambda: ["pvc", "bmg"]
    torch.version.xpu = "20250302"
    distributed_c10d._XCCL_AVAILABLE = "ON_SIM_WITHOUT_XCCL" not in os.environ
    distributed_c10d.Backend.register_backend = classmethod(_register_backend)
    _device_constructors()  # remembers torch's own, which `with torch.device(...)` looks for
    for name in FACTORIES:
        setattr(torch, name, _on_sim(getattr(torch, name)))
    _ATEN.impl("native_layer_norm_backward", _layer_norm_backward, "PrivateUse1")


def _register_backend(
    cls: type[distributed_c10d.Backend],
    name: str,
    create: Callable[..., Any],
    extended_api: bool = False,
    devices: Any = None,
    _own: Callable[..., None] = distributed_c10d.Backend.register_backend.__func__,
) -> None:
    """Register for the simulated device what is registered for `xpu`."""
    _own(cls, name, create, extended_api, devices)
    if "xpu" in cls.backend_capability[name]:
        cls.backend_capability[name] = [*cls.backend_capability[name], "sim"]


def _properties(device: Any = None) -> SimpleNamespace:
    total = torch.get_device_module("sim").mem_get_info(_sim(device))[1]
    return SimpleNamespace(**Card(_NAME, total, 448).fields())


def _sim(value: Any) -> Any:
    """Return a device of type `xpu` as one of type `sim`, and all else as it is."""
    if isinstance(value, torch.device) and value.type == "xpu":
        return torch.device("sim", value.index)
    if isinstance(value, str) and value.partition(":")[0] == "xpu":
        return value.replace("xpu", "sim")
    return value


def _on_sim(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        named = {name: _sim(value) for name, value in kwargs.items()}
        return function(*(_sim(arg) for arg in args), **named)

    return call


def _layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: list[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, gain and offset, summed in at least float32.

    Kernels for GPUs do the same.  torch's kernel for the CPU, which computes for the simulated
    device, sums gradients of gain and offset over all rows in bfloat16.
    """
    dims = list(range(x.dim() - len(shape), x.dim()))
    rows = list(range(x.dim() - len(shape)))
    wide = torch.float32 if x.dtype in _HALF else x.dtype
    grad_wide, x_wide = grad.to(wide), x.to(wide)
    if mean.dtype != wide:  # in half precision, as the forward function returns them
        mean = x_wide.mean(dims, keepdim=True)
    normal = (x_wide - mean) * rstd.to(wide)
    inner = grad_wide if weight is None else grad_wide * weight.to(wide)
    along = inner.mean(dims, keepdim=True) + normal * (inner * normal).mean(dims, keepdim=True)
    found = (
        ((inner - along) * rstd.to(wide)).to(x.dtype),
        None if weight is None else (grad_wide * normal).sum(rows).to(weight.dtype),
        None if bias is None else grad_wide.sum(rows).to(bias.dtype),
    )
    return tuple(one if needed else None for one, needed in zip(found, wanted, strict=True))


def device_from_torch(
    from_torch: Callable[..., Any], device_type: str, index: int | None = None, **overrides: Any
) -> Any:
    """Return the simulated device for a device of type `xpu`.

    Args:
        from_torch: `Device.from_torch`.
        device_type: torch's device type.
        index: ordinal on this host.
        overrides: attributes of the device.
    """
    reason = "torch's compiler has no code generator for the simulated device"
    missing = {**overrides.pop("missing", {}), "compile": reason}
    return from_torch(_sim(device_type), index, missing=missing, **overrides)
