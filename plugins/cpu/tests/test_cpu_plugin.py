"""The CPU plugin: host facts, the device's functions, launch environment and checks."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lmcore.base import log
from lmcore.config.section import Config
from lmcore.contract import OP_SPECS, CheckStatus, ProbeState
from lmcore.contract.op.records import load_target
from lmcore_cpu import device as device_module
from lmcore_cpu import doctor, host, plugin
from lmcore_cpu.device import create_device
from lmcore_cpu.kernel import processor
from lmcore_cpu.kernel.processor import Facts
from lmcore_cpu.kernels import KERNELS


@pytest.fixture(scope="module")
def device():
    """The host as a device."""
    return create_device()


def test_the_probe_is_present_with_evidence():
    """The host is always there, last in priority, with its cores and memory."""
    probe = plugin.lmcore_probe()
    assert (probe.state, probe.count, probe.priority) == (ProbeState.PRESENT, 1, 0)
    assert probe.facts["cores"] >= 1
    assert "cores" in probe.evidence[0]


def test_seeding_draws_the_same_numbers_again(device):
    """The device's generator repeats itself, and its state can be put back."""
    device.seed(5)
    first = torch.rand(4)
    state = device.get_rng_state()
    second = torch.rand(4)
    device.seed(5)
    assert torch.equal(torch.rand(4), first)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(4), second)


def test_seeding_leaves_other_generators_alone(device, monkeypatch):
    """Only the CPU's generator is touched: no accelerator is seeded behind its plugin's back."""
    monkeypatch.setattr(torch, "manual_seed", lambda seed: pytest.fail("seeds every device"))
    device.seed(1)


def test_memory_statistics_follow_an_allocation(device):
    """Resident memory grows with a tensor that is written, and the peak can be reset."""
    if device.reset_peak_memory is None:
        pytest.skip(device.missing["reset_peak_memory"])
    device.require("empty_cache")()  # or the tensor takes memory that an earlier test freed
    before = device.memory_stats()
    block = torch.ones(32 * 2**20)  # 128 MiB
    during = device.memory_stats()
    assert during.allocated - before.allocated > 100 * 2**20
    assert during.peak_allocated >= during.allocated
    del block
    device.require("empty_cache")()
    device.reset_peak_memory()
    after = device.memory_stats()
    assert after.peak_allocated < during.peak_allocated - 100 * 2**20
    assert after.total > after.allocated


def test_missing_abilities_have_reasons(device):
    """Each missing ability has a reason."""
    assert {"pin_memory", "new_stream", "new_event"} <= set(device.missing)


def test_peak_is_measured_once_and_plausible(device):
    """The ceiling is a rate that this host reached; asking again costs nothing."""
    peak = device.require("peak_flops")
    assert 1e8 < peak("float32") < 1e15
    assert peak("float32") == peak("float32")
    assert peak("float8_e4m3fn") is None


def test_a_disturbance_does_not_lower_the_peak(monkeypatch):
    """Products that another process made slow are not the ceiling: the fastest one is."""
    times = iter([9.0, 7.0, 5.0, 4.0, 2.0, 8.0, 8.0, 1.0, 8.0, 8.0, 8.0, 8.0])
    clock = [0.0]

    def product() -> None:
        clock[0] += next(times)

    monkeypatch.setattr(device_module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    peak = device_module._PeakFlops(patience=3, seconds=1e6)
    assert peak._best_rate(100, product) == 2.0 * 100**3 / 1.0
    assert next(times) == 8.0, "three in a row were no faster: it stopped"


def test_the_peak_covers_the_fastest_product_of_this_plugin(monkeypatch, give_facts):
    """The peak includes the plugin's own kernels, so that no model is faster than it."""
    monkeypatch.setattr(device_module, "_measured", {})
    rates = iter([100.0, 120.0])
    peak = device_module._PeakFlops(size=8)
    monkeypatch.setattr(peak, "_best_rate", lambda size, multiply: next(rates))
    give_facts(onednn=True)
    assert peak("float32") == 120.0


@pytest.mark.parametrize("small_seconds, size", [(0.001, 1024), (0.1, 256)])
def test_a_slow_dtype_is_measured_by_small_products(monkeypatch, small_seconds, size):
    """Small products are measured if a large one would take seconds, as in an emulated dtype."""
    monkeypatch.setattr(device_module, "_measured", {})
    peak = device_module._PeakFlops(seconds=0.5)
    monkeypatch.setattr(peak, "_time", lambda dtype, size: small_seconds)
    monkeypatch.setattr(peak, "_best_rate", lambda size, multiply: float(size))
    assert peak("float16") == size


def test_a_system_without_proc_says_so(monkeypatch, tmp_path):
    """Abilities are missing, with their reasons, if memory cannot be read."""
    monkeypatch.setattr(device_module, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(device_module, "_CLEAR_REFS", tmp_path / "none" / "clear_refs")
    bare = create_device()
    assert bare.memory_stats is None
    assert "status" in bare.missing["memory_stats"]
    assert "clear_refs" in bare.missing["reset_peak_memory"]


def test_kernels_load_and_name_known_ops():
    """Every kernel of the table exists."""
    assert {impl.op for impl in KERNELS} <= {spec.name for spec in OP_SPECS}
    for impl in KERNELS:
        assert callable(load_target(impl.load))


def test_launch_environment_shares_the_cores():
    """Two workers on eight cores get four threads each; one alone takes what torch takes."""
    probe = replace(plugin.lmcore_probe(), facts={"cores": 8})

    def threads(workers: int) -> str | None:
        return plugin.lmcore_launch_env(probe, {"local_world_size": workers}).get("OMP_NUM_THREADS")

    assert [threads(workers) for workers in (2, 16, 1)] == ["4", "1", None]


def test_launch_environment_bounds_the_wait_for_threads():
    """A thread that waits gives its core up soon, with any number of workers."""
    probe = replace(plugin.lmcore_probe(), facts={"cores": 8})
    for workers in (1, 4):
        wanted = plugin.lmcore_launch_env(probe, {"local_world_size": workers})
        assert 0 < int(wanted["GOMP_SPINCOUNT"]) <= 10_000


def test_compiling_without_a_compiler_is_a_problem(monkeypatch):
    """`--compile` is refused before the model is built, with the fix."""
    monkeypatch.setattr(host, "cpp_compiler", lambda: None)
    config = Config()
    assert plugin.lmcore_validate_config(config) == []
    compiled = replace(config, training=replace(config.training, compile=True))
    (problem,) = plugin.lmcore_validate_config(compiled)
    assert "--compile" in problem.what
    assert "g++" in problem.hint


@pytest.mark.parametrize(
    "workers, threads, words, fix",
    [
        (2, 2, "2 processes with 2 threads each share 2 cores", "--num-threads 1"),
        (64, 1, "64 processes with 1 thread each share 2 cores", "--nproc-per-node 2"),
        (1, 4, "1 process with 4 threads shares 2 cores", "--num-threads 2"),
    ],
)
def test_too_many_threads_are_warned_about(monkeypatch, caplog, workers, threads, words, fix):
    """Rank 0 warns about more threads than cores, with a fix that changes something."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(workers))
    monkeypatch.setattr(host, "cpu_count", lambda: 2)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    with caplog.at_level(logging.WARNING):
        plugin.lmcore_run_start({"rank": 1})
        assert not caplog.text
        plugin.lmcore_run_start({"rank": 0})
    assert words in caplog.text
    assert f"use `{fix}`" in caplog.text


def test_a_warning_is_a_line_of_the_log(give_facts, capfd):
    """It is marked as a warning, as any line of lmcore is."""
    log.configure()
    give_facts(bfloat16_products=False)
    plan = {"config": {"accelerator": {"precision": "bf16"}}}
    plugin.lmcore_run_start({"rank": 0, "plan": plan})
    assert capfd.readouterr().err.startswith("warning: this processor has no instructions")


@pytest.mark.parametrize("gain, names", [(1.9, True), (1.1, False)])
def test_a_faster_precision_is_named(monkeypatch, give_facts, caplog, gain, names):
    """Rank 0 says what bf16 would gain by measured products, if no precision was chosen."""
    give_facts(bfloat16_products=True)
    rates = {"float32": 100.0, "bfloat16": 100.0 * gain}
    monkeypatch.setattr(device_module._PeakFlops, "__call__", lambda self, dtype: rates[dtype])
    monkeypatch.setattr(host, "cpu_count", lambda: 64)
    for rank, given, seconds in ((0, None, 0.5), (1, None, 0.5), (0, "fp32", 0.5), (0, None, 0)):
        caplog.clear()
        own = {"cpu": {"peak_seconds": seconds}}
        plan = {"config": {"accelerator": {"precision": given}, "plugins": own}}
        with caplog.at_level(logging.INFO):
            plugin.lmcore_run_start({"rank": rank, "plan": plan})
        is_said = "1.9 times as fast as in float32" in caplog.text
        assert is_said == (names and rank == 0 and given is None and seconds > 0)


@pytest.mark.parametrize(
    "quota, cores", [("max 100000", 8), ("250000 100000", 2), ("10000 100000", 1), ("", 8)]
)
def test_a_containers_quota_counts(monkeypatch, tmp_path, quota, cores):
    """Cores are counted by the container's limit, not the host's."""
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda pid: set(range(8)))
    (tmp_path / "cpu.max").write_text(quota, encoding="ascii")
    assert host.cpu_count() == cores


def test_a_containers_memory_limit_counts(monkeypatch, tmp_path):
    """Memory is what the container may use, and what of it is free."""
    monkeypatch.setattr(host, "_CGROUP", tmp_path)
    unlimited = host.memory_limit()
    (tmp_path / "memory.max").write_text("1000000\n", encoding="ascii")
    (tmp_path / "memory.current").write_text("400000\n", encoding="ascii")
    assert (host.memory_limit(), host.memory_available()) == (1_000_000, 600_000)
    (tmp_path / "memory.max").write_text("max\n", encoding="ascii")
    assert host.memory_limit() == unlimited


def test_the_processors_name_is_read(tmp_path):
    """The maker's name, or at least the machine's."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name\t: Some  CPU @ 3GHz\n", encoding="utf-8")
    assert host.cpu_name(cpuinfo) == "Some CPU @ 3GHz"
    assert host.cpu_name(tmp_path / "none")


def test_the_processor_is_asked_in_one_place():
    """One module asks for the facts that decide, so that tests can give other processors."""
    asked = re.compile(
        r"cpuinfo\b|mkl(dnn)?\.is_available|_is_mkldnn|\.blocks\(\)\)|CPU_CAPABILITY"
    )
    folder = Path(host.__file__).parent
    found = {
        path.name for path in folder.rglob("*.py") if asked.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"host.py", "processor.py"}  # the former reads the name of the processor


@pytest.mark.parametrize(
    "vendor, mkl, faster",
    [
        ("GenuineIntel", True, True),
        ("GenuineIntel", False, False),
        ("AuthenticAMD", True, False),
    ],
)
def test_the_faster_product(tmp_path, vendor, mkl, faster):
    """MKL is faster than oneDNN on processors of MKL's vendor."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"vendor_id\t: {vendor}\nmodel name\t: X\n", encoding="utf-8")
    assert not Facts(tmp_path / "none").prefers_mkl
    assert Facts(cpuinfo, mkl=mkl).blas_is_faster is faster


@pytest.mark.parametrize(
    "line, expected",
    [
        ("flags\t\t: fpu avx512f avx512_bf16", True),
        ("flags\t\t: fpu amx_bf16 amx_tile", True),
        ("flags\t\t: fpu avx512f avx512_vnni", False),
        ("Features\t: fp asimd bf16", True),
        ("Features\t: fp asimd", False),
        ("", True),
    ],
)
def test_products_of_bfloat16(tmp_path, line, expected):
    """They are one of the processor's features; without a list of these they are assumed."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\n{line}\n", encoding="utf-8")
    assert Facts(cpuinfo).bfloat16_products is expected


@pytest.mark.parametrize(
    "features, slow",
    [
        ("fpu avx512f avx512_vnni", {"bf16": "bfloat16", "fp16": "float16"}),
        ("fpu avx512f avx512_bf16", {"fp16": "float16"}),
        ("fpu amx_bf16 avx512_fp16", {}),
        ("", {}),
    ],
)
def test_a_precision_without_instructions(
    tmp_path, monkeypatch, give_facts, caplog, features, slow
):
    """Rank 0 warns at the start of a run; `lmcore doctor` has a line of both dtypes."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"flags : {features}\n", encoding="utf-8")
    read = Facts(cpuinfo)
    give_facts(bfloat16_products=read.bfloat16_products, float16_products=read.float16_products)
    monkeypatch.setattr(host, "cpu_count", lambda: 64)
    for given in ("fp32", "bf16", "fp16", None):
        caplog.clear()
        plan = {"config": {"accelerator": {"precision": given}}}
        with caplog.at_level(logging.WARNING):
            plugin.lmcore_run_start({"rank": 1, "plan": plan})
            assert not caplog.records
            plugin.lmcore_run_start({"rank": 0, "plan": plan})
        said = [record.getMessage() for record in caplog.records]
        if given in slow:
            assert len(said) == 1
            assert f"no instructions for products in {slow[given]}" in said[0]
            assert f"`--precision {given}`" in said[0]
        else:
            assert said == []
    check = doctor._half_precision()
    assert check.status is CheckStatus.OK
    lacking = " and ".join(slow.values())
    assert (f"no instructions for {lacking}: " in check.detail) == bool(slow)


def test_doctor_names_what_is_wrong(monkeypatch):
    """Too many threads, little memory and no compiler are warnings."""
    good = {check.name: check.status for check in doctor.checks()}
    library = processor.facts().mkl or processor.facts().onednn
    assert good["torch build"] is (CheckStatus.OK if library else CheckStatus.WARNING)
    monkeypatch.setattr(doctor, "cpu_count", lambda: 0)
    monkeypatch.setattr(doctor, "memory_available", lambda: 2**20)
    monkeypatch.setattr(doctor, "cpp_compiler", lambda: None)
    bad = {check.name: check for check in doctor.checks()}
    for name in ("threads", "memory", "compiler"):
        assert bad[name].status is CheckStatus.WARNING
        assert bad[name].fix
