"""The XPU probe on simulated machines: device trees, libraries, builds of torch."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from lmcore.accelerator import CheckStatus, Probe, ProbeState, TorchBuild, torch_build
from lmcore_xpu import doctor, plugin
from lmcore_xpu.detect import probe, visible_gpus
from lmcore_xpu.facts import Facts, Gpu, gpus

CARDS = tuple(
    Gpu(f"0000:0{index + 3}:00.0", "0x0bd5", "xe", f"renderD{128 + index}", True)
    for index in range(3)
)
XPU_TORCH = TorchBuild("2.13.0+xpu", "20250302")
CPU_TORCH = TorchBuild("2.13.0+cpu", None)
FIT = Facts(CARDS, True, True, XPU_TORCH)


def with_cards(**more):
    return replace(FIT, gpus=tuple(replace(card, **more) for card in CARDS))


HALF = replace(FIT, gpus=(replace(CARDS[0], access=False), CARDS[1]))
PIP = "pip install --force-reinstall"


@pytest.mark.parametrize(
    "facts, env, state, count, evidence, fix",
    [
        (FIT, {}, "present", 3, "0x0bd5 at 0000:03:00.0, driver xe", None),
        (FIT, {"ZE_AFFINITY_MASK": "0,2.1"}, "present", 2, "leaves 2 of 3", None),
        (FIT, {"ZE_AFFINITY_MASK": ""}, "present", 3, "built for XPU", None),
        (FIT, {"ZE_AFFINITY_MASK": "7"}, "absent", 0, "hides all 3", None),
        (replace(FIT, gpus=()), {}, "absent", 0, "no Intel GPU", None),
        (with_cards(driver=None), {}, "broken", 3, "no kernel driver", "i915"),
        (with_cards(node=None, access=None), {}, "broken", 3, "no kernel driver", "xe"),
        (with_cards(access=None), {}, "broken", 3, "not in this container", "--device /dev/dri"),
        (with_cards(access=False), {}, "broken", 3, "may not open", "usermod -aG render"),
        (replace(FIT, loader=False), {}, "broken", 3, "libze_loader.so.1", "libze1"),
        (replace(FIT, runtime=False), {}, "broken", 3, "libze_intel_gpu.so.1", "libze-intel-gpu1"),
        (replace(FIT, torch=CPU_TORCH), {}, "broken", 3, "built without XPU",
         f"{PIP} 'torch==2.13.0' --index-url https://download.pytorch.org/whl/xpu"),
        (replace(FIT, torch=TorchBuild("", None)), {}, "broken", 3, "no torch", "'torch' --index"),
        (HALF, {}, "present", 1, "xe", None),
    ],
)  # fmt: skip
def test_every_state_of_a_machine(facts, env, state, count, evidence, fix):
    """State, count, evidence and fix tell the truth about GPUs, nodes, libraries and torch."""
    env.setdefault("PATH", "/bin")
    found = probe(facts, env)
    assert (found.device_type, found.state, found.count) == ("xpu", state, count)
    assert evidence in "\n".join(found.evidence)
    assert (found.fix is None) == (fix is None)
    assert fix is None or fix in found.fix


@pytest.mark.parametrize("state, torch", [("present", XPU_TORCH), ("broken", CPU_TORCH)])
def test_versions_are_told_in_every_state(state, torch):
    """Driver, runtime and build of torch are what someone who looks for a fault needs."""
    found = probe(replace(FIT, torch=torch, kernel="6.8.0"), {})
    assert found.state == state
    assert found.facts["driver"] == "xe of Linux 6.8.0"
    assert found.facts["torch_build"] == torch.version
    assert found.facts.get("runtime") == ("oneAPI 20250302" if torch.toolkit else None)


def test_a_nightly_torch_is_not_asked_of_the_index():
    """The command names a release only where it is one."""
    nightly = replace(FIT, torch=TorchBuild("2.14.0.dev20261101+cpu", None))
    assert "'torch' --index-url" in probe(nightly, {}).fix


def test_the_processors_own_gpu_is_called_so():
    """A laptop's user sees which GPU is meant."""
    own = replace(FIT, gpus=(replace(CARDS[0], address="0000:00:02.0"),))
    assert "the processor's GPU" in probe(own, {}).evidence[0]


def test_a_tile_of_a_gpu_counts_as_the_gpu():
    """Two tiles of one card are one card, and the order is that of the bus."""
    assert visible_gpus(CARDS, {"ZE_AFFINITY_MASK": "2.0,0,2.1"}) == [CARDS[0], CARDS[2]]


@pytest.fixture
def tree(tmp_path):
    """Return a function that lays out a PCI device, its driver and its node under a root."""

    def add(address, vendor="0x8086", kind="0x038000", driver="xe", node="renderD128", dev=True):
        folder = tmp_path / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        for name, text in (("vendor", vendor), ("class", kind), ("device", "0x0bd5")):
            (folder / name).write_text(f"{text}\n", encoding="utf-8")
        if driver:
            target = tmp_path / "sys/bus/pci/drivers" / driver
            target.mkdir(parents=True, exist_ok=True)
            (folder / "driver").symlink_to(target)
        if node:
            (folder / "drm" / "card0").mkdir(parents=True)
            (folder / "drm" / node).mkdir()
            if dev:
                (tmp_path / "dev/dri").mkdir(parents=True, exist_ok=True)
                (tmp_path / "dev/dri" / node).touch()
        return tmp_path

    return add


def test_gpus_are_read_from_the_device_tree(tree):
    """Address, driver, node and access of each GPU; other vendors and kinds are passed over."""
    tree("0000:03:00.0")
    tree("0000:04:00.0", node="renderD129", dev=False)
    tree("0000:05:00.0", driver=None, node=None)
    tree("0000:06:00.0", vendor="0x10de", node="renderD130")
    root = tree("0000:00:1f.3", kind="0x040300", driver="snd", node=None)
    found = gpus(root, may_use=lambda path: path.name == "renderD128")
    assert found == (
        Gpu("0000:03:00.0", "0x0bd5", "xe", "renderD128", True),
        Gpu("0000:04:00.0", "0x0bd5", "xe", "renderD129", None),
        Gpu("0000:05:00.0", "0x0bd5", None, None, None),
    )
    assert gpus(root, may_use=lambda path: False)[0].access is False
    assert gpus(root / "nowhere") == ()


@pytest.mark.parametrize(
    "line, xpu",
    [("xpu: Optional[str] = '20250302'", "20250302"), ("xpu: Optional[str] = None", None)],
)
def test_torchs_build_is_read_as_text(tmp_path, line, xpu):
    """Torch's version file tells the build without being imported."""
    file = tmp_path / "version.py"
    file.write_text(f"__version__ = '2.13.0+x'\n{line}\n", encoding="utf-8")
    assert torch_build("xpu", file) == TorchBuild("2.13.0+x", xpu)


def test_the_probe_of_this_machine_loads_no_torch():
    """The hooks answer in a fresh interpreter without importing torch."""
    script = (
        "import os, sys; from lmcore_xpu import plugin; plugin.lmcore_plugin_info();"
        "plugin.lmcore_probe(os.environ); sys.exit('torch' in sys.modules)"
    )
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, check=False
    )
    assert done.returncode == 0


@pytest.mark.parametrize(
    "facts, failed",
    [
        (replace(FIT, gpus=(), loader=False, runtime=False, torch=CPU_TORCH), set()),
        (with_cards(access=False), {"device nodes"}),
        (replace(FIT, loader=False), {"level zero"}),
        (replace(FIT, torch=CPU_TORCH), {"torch build"}),
    ],
)
def test_doctor_fails_what_is_at_fault(monkeypatch, facts, failed):
    """Nothing fails where there is no GPU; where there is one, the fault does, with the fix."""
    monkeypatch.setattr(doctor, "read_facts", lambda: facts)
    found = probe(facts, {})
    checks = [check for check in doctor.checks(found) if check.status is CheckStatus.FAILED]
    assert {check.name for check in checks} == failed
    assert all(check.fix == found.fix for check in checks)


def test_policies_follow_the_gpu():
    """bfloat16 is offered, first, where the GPU computes in it; reductions cannot average."""

    class New:
        type, dtypes = "xpu", frozenset({"float32", "float16", "bfloat16"})

    new = plugin.lmcore_precision_policies(New)
    assert max(new, key=lambda one: one.priority).name == "bf16"
    (backend,) = plugin.lmcore_comm_backends()
    assert (backend.name, backend.supports_average, backend.needs_device_id) == (
        "xccl", False, True
    )  # fmt: skip


def test_the_probe_is_one_of_the_contract():
    """What the hook returns is a `Probe` with a state."""
    found = plugin.lmcore_probe({})
    assert isinstance(found, Probe)
    assert isinstance(found.state, ProbeState)
