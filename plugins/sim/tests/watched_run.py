"""Trains as `lmcore train` does, and refuses that a step has the device waited for.

    python watched_run.py FLAGS

Within an asynchronous step nothing may read a number of the device on the host, and nothing may be
copied between the two in a way that is waited for.  The number of steps watched is printed last.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lmcore.cli.main import main
from lmcore.train.step import TrainStep

READS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "unique")
watched: list[int] = []


class NoWaiting(TorchDispatchMode):
    """Refuses ops that wait for the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        of_device = any(isinstance(arg, Tensor) and arg.device.type == "sim" for arg in args)
        if of_device and name.startswith(READS):
            raise AssertionError(f"`{name}` waits for the device")
        if name == "copy_":
            self._check(args[1], args[0].device, late=kwargs.get("non_blocking") or args[2:3])
        elif name == "_to_copy":
            device = kwargs.get("device") or args[0].device
            self._check(args[0], torch.device(device), late=kwargs.get("non_blocking"))
        return func(*args, **kwargs)

    @staticmethod
    def _check(source: Tensor, target: torch.device, *, late: Any) -> None:
        if {source.device.type, target.type} != {"cpu", "sim"}:
            return
        pinned = source.device.type == "sim" or source.is_pinned()
        if not (late and pinned):
            raise AssertionError(f"a copy from {source.device} to {target} is waited for")


def step(self: TrainStep, *args: Any, **kwargs: Any) -> Any:
    """Watch an asynchronous step; a synchronous one may wait."""
    if not self.asynchronous:
        return real(self, *args, **kwargs)
    assert threading.current_thread() is threading.main_thread()
    with NoWaiting():
        pending = real(self, *args, **kwargs)
    watched.append(1)
    return pending


real = TrainStep.__call__
TrainStep.__call__ = step  # type: ignore[method-assign]
status = main(["train", *sys.argv[1:]])
print(f"watched {len(watched)}")
sys.exit(status)
