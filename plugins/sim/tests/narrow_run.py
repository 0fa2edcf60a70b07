"""Runs a command of lmcore on simulated devices that have no float64, and refuses that one is made.

    python narrow_run.py COMMAND FLAGS

What a device without float64 would refuse raises here: an op that makes a tensor of it there.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lmcore.cli.main import main
from lmcore_sim import device

seen: set[str] = set()


class Narrow(TorchDispatchMode):
    """Refuses float64 on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor) and leaf.device.type == "sim":
                seen.add(func.overloadpacket.__name__)
                if leaf.dtype in {torch.float64, torch.complex128}:
                    raise AssertionError(f"`{func}` makes a {leaf.dtype} on the device")
        return made


def create_device() -> Any:
    """Return the device without float64."""
    found = real()
    return dataclasses.replace(found, dtypes=found.dtypes - {"float64"})


real = device.create_device
device.create_device = create_device
with Narrow():
    status = main(sys.argv[1:])
print(f"watched {len(seen)} ops, backward {'native_layer_norm_backward' in seen}")
sys.exit(status)
