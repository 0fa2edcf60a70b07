"""A third-party device, compiled by these tests, for which the generated plugin is sufficient.

It differs from the simulated device in every ability that a device may lack: see `hostchip/`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from lmcore.contract.torch_versions import ACCELERATOR_MEMORY

pytest.importorskip("lmcore_conformance", reason="lmcore-conformance is not installed")

pytestmark = pytest.mark.skipif(not ACCELERATOR_MEMORY, reason=ACCELERATOR_MEMORY.absence)

SOURCE = Path(__file__).parent / "hostchip"
SMALL = (
    *("--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2"),
    *("--seq-length", "16", "--train-iters", "3", "--eval-iters", "0", "--sample-tokens", "0"),
    *("--progress", "none", "--no-tensorboard"),
)
CLOSED = """\
suite = ">=1,<2"

[closed]
convolution = "it has no convolutions"
distributed = "it has no communication backend"
events = "it has no events"
float64 = "it has no float64"
graph_capture = "work is done when its call returns"
host_apart = "its random numbers are the host's"
mixed_precision = "it computes in float32 alone"
bfloat16 = "it computes in float32 alone"
float16 = "it computes in float32 alone"
offload = "it has no pinned memory"
peak_flops = "it has none"
pin_memory = "it has no pinned memory"
profiler = "torch's profiler has no events of it"
streams = "it has no streams"
compile = "Inductor has no backend for it"
constant_projection = "torch's own products are used"
next_token_attention = "torch's own attention is used"
"""


def compiled() -> Path:
    """Return the device's library, compiled once for this source and torch."""
    import torch
    from torch.utils import cpp_extension

    source = SOURCE / "hostchip.cpp"
    digest = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir(), f"lmcore-tests-{os.getuid()}-hostchip-{digest}.so")
    if not library.exists():
        fresh = library.with_suffix(f".{os.getpid()}")
        flags = ["-std=c++20", "-O0", "-fPIC", "-shared"]
        includes = [f"-isystem{path}" for path in cpp_extension.include_paths()]
        libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
        command = shlex.split(os.environ.get("CXX", "g++"))
        command += [*flags, *includes, str(source), "-o", str(fresh), *libraries]
        subprocess.run([*command, "-ltorch_cpu", "-lc10"], check=True, timeout=300)
        fresh.replace(library)
    return library


@pytest.fixture(scope="module")
def hostchip(new_environment):
    """An environment with torch's package of the device and the generated plugin for it."""
    made = new_environment()
    made.see("lmcore_conformance", "lmcore-conformance")
    package = made.packages / "torch_hostchip"
    shutil.copytree(SOURCE / "torch_hostchip", package, ignore=shutil.ignore_patterns("*.pyc"))
    shutil.copy(compiled(), package / "hostchip.so")
    written = made.run("plugin", "new", "hostchip", "--torch-module", "torch_hostchip")
    assert written.returncode == 0, written.stderr
    (made.work / "dev").mkdir()
    (made.work / "dev" / "hostchip0").touch()
    plugin = made.work / "lmcore-hostchip" / "src" / "lmcore_hostchip"
    probe = plugin / "probe.py"
    text = probe.read_text(encoding="utf-8")
    probe.write_text(text.replace('Path("/dev")', f'Path("{made.work / "dev"}")'))
    (plugin / "conformance.toml").write_text(CLOSED, encoding="utf-8")
    made.install_source(made.work / "lmcore-hostchip")
    return made


def losses(environment, device, directory, *flags):
    """Return the losses of a run on *device*, and what it printed on standard error."""
    found = environment.run("train", *SMALL, "--device", device, *flags, "--save", str(directory))
    assert found.returncode == 0, found.stderr
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines], found.stderr


@pytest.mark.timeout(300)
def test_training_has_the_losses_of_the_cpu(hostchip, tmp_path):
    """The device lacks streams, events, pinned memory and float64; training needs none."""
    expected, _ = losses(hostchip, "cpu", tmp_path / "cpu")
    found, shown = losses(hostchip, "hostchip", tmp_path / "chip")
    assert found == pytest.approx(expected, abs=1e-6)
    assert len(found) == 3
    record = json.loads((tmp_path / "chip" / "environment.json").read_text(encoding="utf-8"))
    assert record["device"]["type"] == "hostchip"
    assert record["device"]["abilities"] == ["empty_cache", "memory_stats", "reset_peak_memory"]
    assert "warning" not in shown


@pytest.mark.full
@pytest.mark.timeout(300)
def test_check_and_doctor_find_nothing_wrong(hostchip):
    """A device that lacks abilities is a sound one."""
    found = hostchip.run("plugin", "check", "lmcore-hostchip")
    assert found.returncode == 0, found.stdout
    found = hostchip.run_with_forks("doctor", "--json")
    groups = {group["name"]: group["checks"] for group in json.loads(found.stdout)["groups"]}
    (checks,) = (rows for name, rows in groups.items() if name.startswith("plugin hostchip"))
    statuses = {check["name"]: check["status"] for check in checks}
    assert statuses.pop("all-reduce") == "warning", checks
    assert set(statuses.values()) == {"ok"}, checks
    assert {"device works", "product float32", "random state"} <= set(statuses)


@pytest.mark.timeout(300)
def test_two_processes_are_refused(hostchip):
    """There is no backend, and one device: either is the error, whichever rank is first."""
    found = hostchip.run("train", *SMALL, "--device", "hostchip", "--nproc-per-node", "2")
    assert found.returncode != 0
    errors = "process 1 of this host has no `hostchip` device|processes on this device cannot"
    assert re.search(f"error: ({errors})", found.stderr), found.stderr
    assert re.search("hint: (start|run) one process", found.stderr), found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.timeout(300)
def test_several_devices_without_a_backend_are_one_process(hostchip, tmp_path):
    """The default command of a host with two devices trains, and says what it uses."""
    second = hostchip.work / "dev" / "hostchip1"
    second.touch()
    try:
        found, shown = losses(hostchip, "hostchip", tmp_path / "run", "--train-iters", "3")
    finally:
        second.unlink()
    assert len(found) == 3
    assert "one process, on 1 of 2 devices" in shown
    assert "`--nproc-per-node 2`" in shown


@pytest.mark.timeout(600)
@pytest.mark.parametrize("levels", ["L0,L1", pytest.param("L0,L1,L2,L3", marks=pytest.mark.full)])
def test_the_suite_agrees_with_the_declaration(hostchip, levels):
    """Claimed abilities work, and all others are declared: no gap is more, none is less."""
    arguments = ("--pyargs", "lmcore_conformance", "--accelerator", "hostchip", "--levels", levels)
    found = hostchip.pytest("-rs", *arguments)
    assert found.returncode == 0, found.stdout + found.stderr
    for level in levels.split(","):
        assert re.search(rf"{level} \w+ .* reached", found.stdout), found.stdout
