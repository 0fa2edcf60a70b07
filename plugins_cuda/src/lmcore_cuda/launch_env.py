"""Environment variables of a worker, set before torch is imported; torch-free.

The core keeps every variable that the user has set.  Two of torch's have an older name that users
set too: where they did, the newer one stays unset, since torch prefers it.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["launch_env"]

_ALWAYS = {
    # CUDA's numbers are the driver's then, and those that the probe shows.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    # Blocks of changing sizes leave no holes behind: a tenth of memory in some runs.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}

_WITH_OTHERS = {
    # A collective that fails or times out ends the process, so that the launcher ends the run.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    # The flight recorder: the last collectives of each process, written when one times out.
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}

_OLDER_NAMES = {
    "PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "NCCL_ASYNC_ERROR_HANDLING",
}


def launch_env(env: Mapping[str, str], world_size: int) -> dict[str, str]:
    """Return the variables to set for a worker.

    Args:
        env: Environment that the worker has.
        world_size: Number of processes of the run.
    """
    wanted = _ALWAYS | (_WITH_OTHERS if world_size > 1 else {})
    return {name: value for name, value in wanted.items() if _OLDER_NAMES.get(name, "") not in env}
