"""From settings to a runtime: what is chosen, what is refused, what is put back."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from lmcore.base.errors import ConfigError, LmcoreError
from lmcore.config.load import load_config
from lmcore.plugin import PluginSet, discover, select
from lmcore.runtime.launch.rank import RankInfo
from lmcore.runtime.runtime import start_runtime


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    """The installed plugins."""
    return discover(env={})


def start(plugins: PluginSet, flags: str = ""):
    config = load_config(["--num-threads", "1", *flags.split()]).config
    return start_runtime(config, plugins, select(plugins, requested="cpu", env={}), RankInfo())


def can_flush() -> bool:
    """Return True if the processor can compute with zero in place of subnormal numbers."""
    can: bool = torch.set_flush_denormal(False)
    return can


def test_defaults(plugins: PluginSet) -> None:
    """The CPU runs in fp32, keeps every activation, and binds its own kernels."""
    with start(plugins) as runtime:
        assert runtime.device.type == "cpu"
        assert runtime.precision.name == "fp32"
        assert runtime.recompute.name == "none"
        assert torch.get_num_threads() == 1
        assert runtime.rank == RankInfo()


def test_one_process_needs_no_communication_backend(plugins: PluginSet) -> None:
    """A communication backend that is not there does not stop a run of one process."""
    with start(plugins, "--distributed-backend nothing") as runtime:
        assert runtime.processes is None


def test_environment_is_json(plugins: PluginSet) -> None:
    """`environment.json` names versions, device, precision and why the device was chosen."""
    with start(plugins, "--precision bf16 --recompute full") as runtime:
        found = json.loads(json.dumps(runtime.environment(), allow_nan=False))
    assert found["torch"] == torch.__version__
    assert found["precision"]["compute"] == "bfloat16"
    assert found["precision"]["words"].startswith("bf16: products in bfloat16 (autocast)")
    assert (found["recompute"]["name"], found["recompute"]["applies_to"]) == ("full", ["layers"])
    assert found["selection"]["plugin"] == "cpu"
    assert found["num_threads"] == 1
    assert found["rank"]["world_size"] == 1


def test_threads(plugins: PluginSet) -> None:
    """`--num-threads` is torch's number of threads."""
    config = load_config(["--num-threads", "2"]).config
    try:
        with start_runtime(
            config, plugins, select(plugins, requested="cpu", env={}), RankInfo()
        ) as runtime:
            assert torch.get_num_threads() == 2
            assert runtime.environment()["num_threads"] == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    "flags",
    [
        "--precision fp61",
        "--recompute half",
        "--ops attenshun=sdpa",
        "--ops attention",
    ],
)
def test_unknown_names(plugins: PluginSet, flags: str) -> None:
    """A precision, recompute policy or op that does not exist is an error that names it."""
    with pytest.raises(LmcoreError, match=f"`{flags[:16]}") as caught, start(plugins, flags):
        pass
    assert caught.value.exit_status == 2
    assert caught.value.hint


@pytest.mark.skipif(not can_flush(), reason="the processor computes with such numbers only")
def test_subnormal_numbers(plugins: PluginSet) -> None:
    """They are computed as zero during a run, and as they are afterwards."""
    small = torch.full((1000,), 1e-39)

    def kept() -> int:
        """Return how many products are not zero."""
        return int((small * 0.5).view(torch.int32).count_nonzero())

    with start(plugins, "--no-flush-subnormals"):
        assert kept() == 1000
    with start(plugins, ""):
        assert kept() == 0
    assert kept() == 1000


def test_subnormal_numbers_in_threads() -> None:
    """Threads that torch starts within the context compute so, too."""
    program = """
import torch
from lmcore.runtime.runtime import subnormals_flushed
torch.set_num_threads(1)
small = torch.full((1_000_000,), 1e-39)
with subnormals_flushed():
    torch.set_num_threads(2)  # the second thread starts now
    print((small * 0.5).view(torch.int32).count_nonzero().item())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == (0 if can_flush() else 1_000_000)


def test_deterministic_is_put_back(plugins: PluginSet) -> None:
    """The switch of torch is on within a deterministic run, and back as it was after it."""
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RuntimeError, match="inside"), start(plugins, "--deterministic"):  # noqa: PT012 - what happens inside is the test
        assert torch.are_deterministic_algorithms_enabled()
        raise RuntimeError("inside")
    assert not torch.are_deterministic_algorithms_enabled()


def test_device_problems_are_reported(plugins: PluginSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A problem that the plugin's validation finds stops the start, here a missing compiler."""
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigError) as caught, start(plugins, "--compile"):
        pass
    assert caught.value.what.startswith("`--compile` needs a C++ compiler")
    assert "g++" in str(caught.value.hint)
