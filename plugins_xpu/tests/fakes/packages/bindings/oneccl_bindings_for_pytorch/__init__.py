"""Stand-in of oneCCL's bindings for PyTorch: its import registers `ccl` as the package does.

Read in intel/torch-ccl, not copied: `csrc/init.cpp` (95b7a838) registers a function of store, rank,
size and timeout for xpu and cpu; `__init__.py` (127b5ae0) loads the library for GPUs and prints a
warning if that fails; `src/ProcessGroupCCL.cpp` (02547906) sets oneCCL's variables of the rank when
a group is created, unless an MPI launcher set its own.

Tensors are carried by the simulated device's backend, which is compiled, over gloo.
"""

from __future__ import annotations

import ctypes
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Backend, ProcessGroupGloo

_LIBRARIES = Path(__file__).parent / "lib"
_MPI = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_RANK", "PMI_SIZE", "PMIX_RANK")
_RECORD = "STAND_IN_RECORD"  # a folder, which gets the facts of each group


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return the backend of one process group; torch calls it."""
    before = {name: value for name, value in os.environ.items() if name.startswith(("CCL_", "FI_"))}
    if not any(name in os.environ for name in _MPI):
        os.environ["CCL_PROCESS_LAUNCHER"] = "none"
        os.environ["CCL_LOCAL_RANK"] = os.environ.get("LOCAL_RANK", str(rank))
        os.environ["CCL_LOCAL_SIZE"] = os.environ.get("LOCAL_WORLD_SIZE", str(size))
    changed = sorted(name for name in before if os.environ[name] != before[name])
    if _RECORD in os.environ:
        facts = {"rank": rank, "size": size, "env": before, "changed": changed}
        with (Path(os.environ[_RECORD]) / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(facts) + "\n")

    from lmcore_sim import _C

    return _C.SimBackend(ProcessGroupGloo(store, rank, size, timeout=timeout), rank, size)


try:
    ctypes.CDLL(str(_LIBRARIES / "liboneccl_bindings_for_pytorch.so"))
except OSError as error:  # that of the package's `_C`, which is linked to it
    raise ImportError(str(error)) from error
Backend.register_backend("ccl", _create, False, ["xpu", "cpu"])
if hasattr(torch, "xpu"):
    try:
        ctypes.CDLL(str(_LIBRARIES / "liboneccl_bindings_for_pytorch_xpu.so"))
    except OSError:
        print("the library for GPUs was not loaded")
