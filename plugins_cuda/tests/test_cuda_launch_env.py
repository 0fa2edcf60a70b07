"""The environment of a worker."""

from __future__ import annotations

import pytest

from lmcore_cuda import plugin
from lmcore_cuda.launch_env import launch_env

ALONE = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_a_process_by_itself_gets_no_settings_of_nccl():
    """Order and allocator alone."""
    assert launch_env({}, 1) == ALONE


def test_a_job_requests_the_devices_by_name():
    """Clusters name the GPUs so, unless their administrators chose another name."""
    names = plugin.lmcore_plugin_info().device_resources
    assert names == {"k8s": "nvidia.com/gpu", "slurm": "gpu"}


def test_several_get_the_flight_recorder():
    """A collective that times out ends its process and leaves a record."""
    assert launch_env({}, 2) == ALONE | {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


@pytest.mark.parametrize(
    "older, newer",
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE"),
        ("NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    ],
)
def test_an_older_name_that_the_user_set_counts(older, newer):
    """Torch would prefer the newer name, so that one is left alone."""
    assert newer not in launch_env({older: "1"}, 2)
    assert newer in launch_env({}, 2)


def test_the_hook_looks_at_its_own_environment(monkeypatch):
    """It is asked in the worker's place, with the worker's rank."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    found = plugin.lmcore_launch_env({"world_size": 2})
    assert "PYTORCH_ALLOC_CONF" not in found
    assert found["TORCH_FR_BUFFER_SIZE"] == "2000"
