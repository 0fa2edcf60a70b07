"""Make the simulated devices known to torch; importing this module does it, once per process.

torch has one device type that is not its own, PrivateUse1; this module registers it as "sim".
Import it to use the device without lmcore.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping

import torch
from torch.utils import backend_registration

from lmcore.base.errors import DeviceError
from lmcore_sim.faults import Faults
from lmcore_sim.probe import REBUILD, library_problem
from lmcore_sim.settings import read_settings

__all__ = ["apply_faults"]

_UNNAMED = "privateuseone"


def _register(env: Mapping[str, str]) -> None:
    settings = read_settings(env)
    problem = library_problem()
    if problem is not None:
        raise DeviceError(
            "the simulated device cannot be loaded", why=problem, hint=f"run `{REBUILD}`"
        )
    taken = torch._C._get_privateuse1_backend_name()  # noqa: SLF001 - it has no public name
    if taken not in {_UNNAMED, "sim"}:
        raise DeviceError(
            f"the simulated device and `{taken}` cannot be in one process",
            why="torch has one place for a device type that is not its own, and it is taken",
            hint="use `--plugin-off` for one of the two",
        )
    from torch import distributed  # noqa: F401 - registers the base class of the backend in `_C`

    from lmcore_sim import _C

    _C.configure(settings.num_devices, settings.memory_bytes)
    _C.set_missing_wait_raises(settings.missing_wait_raises)
    if "no-autocast" not in settings.faults.switches:
        _C.register_autocast(settings.faults.autocast_only)
    apply_faults(settings.faults, env)
    if taken == _UNNAMED:
        backend_registration.rename_privateuse1_backend("sim")
    from lmcore_sim import torch_sim
    from lmcore_sim.comm import register

    torch_sim.install()
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    atexit.register(_C.stop_autograd_threads)
    register()


def apply_faults(faults: Faults, env: Mapping[str, str] = os.environ) -> None:
    """Replace the injected faults, and reset their counts.

    `no-autocast` and `autocast-only` are exceptions: they apply when the device is registered.
    """
    from lmcore_sim import _C

    _C.set_faults(
        [_C.Fault(rule.kind, rule.target, rule.at, rule.value) for rule in faults.of_rank(env)]
    )
    _C.set_switches(sorted(faults.switches))


_register(os.environ)
