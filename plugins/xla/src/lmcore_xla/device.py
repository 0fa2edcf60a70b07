"""One PJRT device as a `Device`, built by hand: torch has no module `torch.xla`.

The device is lazy.  torch_xla records operations, and compiles and runs what it has recorded at
`step_boundary`, or if a value is needed on the host.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from lmcore.base.errors import DeviceError
from lmcore.contract import Compilations, Device, MemoryStats, Probe, first_line
from lmcore_xla.next_token_attention import attend
from lmcore_xla.peaks import peak_flops
from lmcore_xla.probe import CHOICE, HOST
from lmcore_xla.settings import XlaSection

__all__ = ["create_device"]

_DEFAULTS = XlaSection()
_STATE_BYTES = 8
_MISSING = {
    "reset_peak_memory": "PJRT keeps one peak for the whole process",
    "empty_cache": "PJRT's allocator gives nothing back",
    "pin_memory": "torch_xla copies from ordinary host memory",
    "new_stream": "PJRT orders programs itself; torch_xla has no streams",
    "new_event": "torch_xla has no events that can be waited for",
    "new_graph": "what is recorded between two step boundaries is one program already",
}


def create_device(probe: Probe, settings: XlaSection = _DEFAULTS) -> Device:
    """Start PJRT's client and return the device of this process, always the client's first.

    Args:
        probe: Probe of the launcher, with the name of the client.
        settings: Settings of the run.

    Raises:
        DeviceError: torch_xla cannot be imported, or the client does not start.
    """
    client = str(probe.facts["pjrt_device"])
    os.environ.setdefault(CHOICE, client)  # before the import, which chooses one otherwise
    xla = _torch_xla()
    device = _started(client)
    _register_module()
    _register_autocast()
    if client != HOST:  # whose products of float32 are exact
        xla.backends.set_mat_mul_precision(settings.matmul_precision)
    name = _name(client)
    memory_stats = _memory_stats(device)
    missing = dict(_MISSING)
    if memory_stats is None:
        missing["memory_stats"] = f"PJRT's client `{client}` counts no memory"
    peak = peak_flops(name)
    if peak is None:
        missing["peak_flops"] = f"no figure for the peak of `{name}`"
    return Device(
        type="xla",
        index=0,
        name=name,
        dtypes=_dtypes(client),
        synchronize=_synchronize,
        set_current=lambda: None,  # the process has one device
        seed=lambda number: _set_seed(number % 2**64),
        get_rng_state=_get_rng_state,
        set_rng_state=_set_rng_state,
        memory_stats=memory_stats,
        peak_flops=peak,
        missing=missing,
        facts=_facts(client),
        step_boundary=_boundary,
        inference_mode=False,  # its tensors take no views and no changes in place there
        compile_backend="openxla",
        compilations=_compilations,
        next_token_attention=lambda _dtype, _channels: attend,
    )


def _torch_xla() -> Any:
    """Return torch_xla, which registers the device with torch when it is imported.

    Raises:
        DeviceError: It cannot be imported.
    """
    root = logging.getLogger()
    path, handlers = list(sys.path), list(root.handlers)
    try:
        import torch_xla
        import torch_xla.backends
        import torch_xla.debug.frame_parser_util
    except (ImportError, OSError) as cause:
        raise DeviceError(
            "torch_xla cannot be imported",
            why=first_line(cause),
            hint="install the torch_xla that was built for this torch: `lmcore plugins` names both",
        ) from cause
    finally:
        # The program's own log and modules: torch_xla configures the root logger, and what it
        # imports of torch adds a temporary directory, for the modules of torch's RPC.
        root.handlers[:], sys.path[:] = handlers, path
    return torch_xla


def _started(client: str) -> Any:
    """Start the client, with this process's share of the host's devices, and return its device.

    Raises:
        DeviceError: The client does not start.
    """
    import torch_xla
    from torch_xla._internal import pjrt  # torch_xla has no public name for what torchrun calls

    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    try:
        if processes > 1:
            pjrt.initialize_multiprocess(int(os.environ.get("LOCAL_RANK", "0")), processes)
        return torch_xla.device()
    except RuntimeError as cause:
        raise DeviceError(
            f"PJRT's client `{client}` does not start",
            why=first_line(cause),
            hint="end other processes that use the device; `lmcore doctor` tries it alone",
        ) from cause


def _register_module() -> None:
    """Give torch a module `torch.xla`, once: `torch.random.fork_rng` and checkpointing need one."""
    if hasattr(torch, "xla"):
        return
    module: Any = ModuleType("torch.xla", "Random numbers and the one device, for torch.")
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda _device: None
    module.synchronize = lambda _device=None: _synchronize()
    module.manual_seed = module.manual_seed_all = lambda number: _set_seed(number % 2**64)
    module.get_rng_state = lambda _device=None: _get_rng_state()
    module.set_rng_state = lambda state, _device=None: _set_rng_state(state)
    torch._register_device_module("xla", module)  # noqa: SLF001 - torch has no public name for it


@functools.cache
def _register_autocast() -> torch.library.Library:
    """Have torch's attention compute in autocast's dtype, as torch_xla has other products do."""

    def attention(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        wanted = torch.get_autocast_dtype("xla")
        lowered = (_lowered(one, wanted) for one in tensors)
        with torch.autocast("xla", enabled=False):
            return torch.nn.functional.scaled_dot_product_attention(*lowered, **options)

    library = torch.library.Library("aten", "IMPL")  # the kernel is there as long as this object
    library.impl("scaled_dot_product_attention", attention, "AutocastXLA")
    return library


def _lowered(value: Any, wanted: torch.dtype) -> Any:
    """Return a tensor of floats in the wanted dtype; one of float64, and all else, as it is."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value if value.dtype == torch.float64 else value.to(wanted)
    return value


def _name(client: str) -> str:
    """Return the device's name as PJRT has it, such as `TPU v4`."""
    from torch_xla.core import xla_model

    return f"PJRT's {client} client" if client == HOST else str(xla_model.xla_device_kind())


def _dtypes(client: str) -> frozenset[str]:
    # Without float16: XLA adds it in float16, and a sum of 64 gradients is off by a hundredth.
    half_and_single = frozenset({"float32", "bfloat16"})
    return half_and_single | {"float64"} if client == HOST else half_and_single


def _boundary() -> None:
    """Run what is recorded; random numbers continue as if nothing had happened.

    torch_xla would continue with a number made from the one at the start of the recorded program,
    which cannot be read.
    """
    import torch_xla

    number = _next_draw()
    torch_xla.sync()
    _set_seed(number)


def _synchronize() -> None:
    """Run what is recorded, and wait until all programs have ended."""
    from torch_xla.core import xla_model

    _boundary()
    xla_model.wait_device_ops()


def _set_seed(number: int) -> None:
    from torch_xla.core import xla_model

    xla_model.set_rng_state(number)


def _next_draw() -> int:
    """Return the number of the next draw, which is the whole state."""
    from torch_xla.core import xla_model

    number: int = xla_model.get_rng_state()
    return number


def _get_rng_state() -> torch.Tensor:
    number = _next_draw()
    return torch.frombuffer(bytearray(number.to_bytes(_STATE_BYTES, "little")), dtype=torch.uint8)


def _set_rng_state(state: torch.Tensor) -> None:
    _set_seed(int.from_bytes(bytes(state.tolist()), "little"))


def _memory_stats(device: torch.device) -> Callable[[], MemoryStats] | None:
    """Return a reader of memory statistics; None if the client has none."""
    from torch_xla.core import xla_model

    def read() -> MemoryStats:
        found = xla_model.get_memory_info(device)
        used, peak = found["bytes_used"], found.get("peak_bytes_used", found["bytes_used"])
        return MemoryStats(used, peak, used, found["bytes_limit"])

    try:
        read()
    except (RuntimeError, KeyError):
        return None
    return read


def _compilations() -> Compilations:
    """Return the number of programs that XLA has compiled in this process, and the time."""
    from torch_xla.debug import metrics

    found = metrics.metric_data("CompileTime")
    if found is None:
        return Compilations(0, 0.0)
    return Compilations(int(found[0]), float(found[1]) / 1e9)


def _facts(client: str) -> dict[str, Any]:
    import torch_xla
    from torch_xla import runtime

    return {
        "pjrt_device": client,
        "torch_xla": torch_xla.__version__,
        "devices_of_process": runtime.addressable_device_count(),
        "devices": runtime.global_device_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", "").strip(),
    }
