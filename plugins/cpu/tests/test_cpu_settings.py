"""The CPU's own settings, and the command that measures threads."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from lmcore.base.errors import ConfigError
from lmcore.config.load import load_config
from lmcore.config.section import Config
from lmcore.plugin import discover
from lmcore.plugin.registrations import plugin_commands, plugin_sections
from lmcore_cpu import device as device_module
from lmcore_cpu import plugin, threads
from lmcore_cpu.settings import CpuSection, settings_of


@pytest.fixture(scope="module")
def sections():
    """The settings that the CPU plugin adds."""
    return plugin_sections(discover(env={"LMCORE_PLUGINS": ""}, probe=False))


@pytest.fixture
def allocator(monkeypatch):
    """Count the calls that make the allocator keep memory."""
    calls = []
    monkeypatch.setattr(device_module, "keep_freed_memory", lambda: calls.append(1) or True)
    return calls


def test_the_flags_reach_the_section(sections):
    """`--cpu-...` are in `config.plugins["cpu"]`, where the plugin reads them."""
    loaded = load_config(
        ["--no-cpu-keep-freed-memory", "--cpu-peak-seconds", "0.1"], plugins=sections
    )
    assert settings_of(loaded.config) == CpuSection(keep_freed_memory=False, peak_seconds=0.1)
    assert settings_of(Config()) == CpuSection()
    with pytest.raises(ConfigError, match="out of range"):
        load_config(["--cpu-peak-seconds", "-1"], plugins=sections)


@pytest.mark.parametrize("keeps", [True, False])
def test_the_allocator_is_configured_only_if_supported(allocator, sections, keeps):
    """By default freed memory is kept; off, the allocator stays as it is, and the facts say so."""
    flags = [] if keeps else ["--no-cpu-keep-freed-memory"]
    device = plugin.lmcore_create_device(load_config(flags, plugins=sections).config)
    assert len(allocator) == int(keeps)
    assert device.facts["keeps_freed_memory"] is keeps


@pytest.mark.usefixtures("allocator")
def test_no_time_to_measure_means_no_peak():
    """The ability is missing, with the reason; with time it is there."""
    without = device_module.create_device(CpuSection(peak_seconds=0))
    assert without.peak_flops is None
    assert "--cpu-peak-seconds 0" in without.missing["peak_flops"]
    assert device_module.create_device(CpuSection(peak_seconds=0.01)).peak_flops("float32") > 0


def test_the_command_is_registered():
    """`lmcore cpu-threads` is the CPU plugin's."""
    commands = plugin_commands(discover(env={"LMCORE_PLUGINS": ""}, probe=False))
    assert commands["cpu-threads"].load == "lmcore_cpu.threads:run"


@pytest.mark.parametrize(
    "cores, numbers",
    [
        (1, [1]),
        (2, [1, 2]),
        (6, [1, 2, 3, 4, 5, 6]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 9, 12]),
        (64, [1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 48, 64]),
    ],
)
def test_numbers_to_try(cores, numbers):
    """Every small number, then sparser ones, and all cores."""
    assert threads.candidates(cores) == numbers


def test_each_number_is_measured_in_turn():
    """All take turns until the time is over; the process keeps its own number of threads."""
    seen = []
    before = torch.get_num_threads()
    block = lambda: seen.append(torch.get_num_threads())  # noqa: E731
    rates = threads.measure(block, 1e6, [1, 2], seconds=0.0)
    assert seen == [1, 1, 2, 2]  # a warm-up and a measurement, whatever the time
    assert [rate.num_threads for rate in rates] == [1, 2]
    assert [rate.rounds for rate in rates] == [1, 1]
    assert rates[0].gflops == pytest.approx(1e6 / rates[0].milliseconds / 1e6)
    assert torch.get_num_threads() == before


def test_threads_are_put_back_after_a_failure():
    """A round that raises leaves the process as it was."""
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError):
        threads.measure(lambda: 1 / 0, 1.0, [before + 1], seconds=0.0)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    "gflops, best", [([10, 20], 2), ([10, 10.2], 1), ([20, 10], 1), ([10, 19.9, 20], 2)]
)
def test_more_threads_have_to_be_worth_it(gflops, best):
    """The smallest number that is within 3% of the fastest."""
    one = threads.Rate(1, 1.0, 1.0, 1)
    rates = [replace(one, num_threads=n, gflops=rate) for n, rate in enumerate(gflops, start=1)]
    assert threads.recommend(rates) == best


def test_operations_are_counted():
    """Four projections of h x 12h weights in all, forward and twice backward: 72 M h^2."""
    block, flops = threads._block(threads.ThreadsSection(hidden_size=16, rows=4))
    block()
    assert flops == 72 * 4 * 16**2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_output(capsys, dtype):
    """A table with the recommendation, or JSON with every rate."""
    small = ["--seconds", "0.01", "--hidden-size", "8", "--rows", "8", "--dtype", dtype]
    assert threads.run(small) == 0
    text = capsys.readouterr().out
    assert "<- recommended" in text
    assert text.splitlines()[-1].startswith("recommended: --num-threads ")
    assert threads.run([*small, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [rate["num_threads"] for rate in found["rates"]] == threads.candidates(found["cores"])
    assert all(rate["gflops"] > 0 for rate in found["rates"])
    assert found["recommended"] in {rate["num_threads"] for rate in found["rates"]}


def test_help_loads_no_torch():
    """The command explains itself at once."""
    script = (
        "import sys\nfrom lmcore_cpu.threads import run\n"
        "try:\n    run(['--help'])\nfinally:\n    print('torch' in sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stderr == "False\n"
