"""The device tree as the probe reads it, laid out in a folder."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmcore.contract import TorchBuild, torch_build
from lmcore_xpu.detection import facts as facts_module
from lmcore_xpu.detection.facts import (
    Gpu,
    gpus,
    has_slingshot,
    in_container,
    read_facts,
    try_to_open,
)


@pytest.fixture
def tree(tmp_path):
    """Return a function that lays out a PCI device, its driver and its node under a root."""

    def add(address, device="0x0bd5", vendor="0x8086", kind="0x038000", driver="xe", **more):
        folder = tmp_path / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        for name, text in (("vendor", vendor), ("class", kind), ("device", device)):
            (folder / name).write_text(f"{text}\n", encoding="utf-8")
        if driver:
            target = tmp_path / "sys/bus/pci/drivers" / driver
            target.mkdir(parents=True, exist_ok=True)
            (folder / "driver").symlink_to(target)
        node = more.get("node", "renderD128")
        if node:
            (folder / "drm" / "card0").mkdir(parents=True)
            (folder / "drm" / node).mkdir()
            if more.get("dev", True):
                (tmp_path / "dev/dri").mkdir(parents=True, exist_ok=True)
                (tmp_path / "dev/dri" / node).touch()
        for part in more.get("parts", ()):
            (folder / part).mkdir(parents=True)
        for name, text in more.get("files", {}).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        return tmp_path

    return add


def test_gpus_are_read_from_the_device_tree(tree):
    """Address, driver, node and access of each GPU; other vendors and kinds are passed over."""
    tree("0000:03:00.0", "0xe20b")
    tree("0000:04:00.0", "0xe20b", node="renderD129", dev=False)
    tree("0000:05:00.0", "0xe20b", driver=None, node=None)
    tree("0000:06:00.0", vendor="0x10de", node="renderD130")
    root = tree("0000:00:1f.3", kind="0x040300", driver="snd", node=None)
    found = gpus(root, try_node=lambda path: 0)
    memory = 12 << 30
    group = (root / "dev/dri/renderD128").group()
    assert found == (
        Gpu("0000:03:00.0", "0xe20b", "xe", "renderD128", True, 1, memory, group),
        Gpu("0000:04:00.0", "0xe20b", "xe", "renderD129", None, 1, memory),
        Gpu("0000:05:00.0", "0xe20b", None, None, None, 1, memory),
    )
    closed = gpus(root, try_node=lambda path: errno.EACCES)[0]
    assert (closed.access, closed.error) == (False, errno.EACCES)
    assert gpus(root / "nowhere") == ()


def test_a_node_is_opened_and_closed(tmp_path):
    """Its own file opens; a folder does not, and the reason is kept."""
    (tmp_path / "node").touch()
    assert try_to_open(tmp_path / "node") == 0
    assert try_to_open(tmp_path) == errno.EISDIR
    assert try_to_open(tmp_path / "nowhere") == errno.ENOENT


@pytest.mark.parametrize("driver", ["vfio-pci", "pci-stub", "xe-vfio-pci"])
def test_a_gpu_of_a_virtual_machine_is_not_ours(tree, driver):
    """A GPU that is reserved for a guest is left out."""
    assert gpus(tree("0000:03:00.0", driver=driver, node=None)) == ()


@pytest.mark.parametrize(
    "device, driver, parts, tiles",
    [
        ("0x0bd5", "xe", ["tile0/gt0", "tile1/gt0"], 2),
        ("0x0bd5", "xe", ["tile0/gt0"], 1),
        ("0x0bd5", "i915", ["drm/card0/gt/gt0", "drm/card0/gt/gt1"], 2),
        ("0x0bd5", "i915", [], 2),
        ("0x0bda", "i915", ["drm/card0/gt/gt0"], 1),
        ("0xe20b", "xe", ["tile0/gt0", "tile0/gt1"], 1),
        ("0x7d55", "i915", ["drm/card0/gt/gt0", "drm/card0/gt/gt1"], 1),
        ("0xf0f0", "xe", ["tile0", "tile1", "tile2", "tile3"], 4),
    ],
)
def test_tiles_are_counted(tree, device, driver, parts, tiles):
    """`xe` has a folder for a tile; a media unit beside the graphics unit is no tile."""
    (gpu,) = gpus(tree("0000:03:00.0", device, driver=driver, parts=parts))
    assert gpu.tiles == tiles


@pytest.mark.parametrize(
    "device, driver, files, memory",
    [
        (
            "0x0bd5",
            "xe",
            {
                "tile0/physical_vram_size_bytes": "68719476736\n",
                "tile1/physical_vram_size_bytes": "68719476736\n",
            },
            128 << 30,
        ),
        ("0xe20b", "i915", {"drm/card0/lmem_total_bytes": "12884901888"}, 12 << 30),
        ("0x56a0", "i915", {"drm/card0/lmem_total_bytes": "unknown"}, 0),
        ("0x0bd5", "xe", {}, 128 << 30),
        ("0x64a0", "xe", {}, 0),
    ],
)
def test_memory_is_the_drivers_word_or_the_models(tree, device, driver, files, memory):
    """Bytes of all tiles; a processor's GPU has no dedicated memory."""
    (gpu,) = gpus(tree("0000:03:00.0", device, driver=driver, files=files))
    assert gpu.memory == memory


def test_windows_lends_a_gpu(tmp_path):
    """In Linux on Windows a GPU is on no bus; its driver's folder shows its vendor."""
    assert gpus(tmp_path) == ()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    assert gpus(tmp_path) == ()  # another vendor's
    (tmp_path / "usr/lib/wsl/drivers/iigd_dch_d.inf_amd64_0f").mkdir(parents=True)
    (gpu,) = gpus(tmp_path)
    assert (gpu.address, gpu.driver, gpu.path, gpu.access) == ("WSL", "dxgkrnl", "/dev/dxg", True)


def test_paths_of_nodes():
    """The path that a message names."""
    gpu = Gpu("0000:03:00.0", "0xe20b", "xe", "renderD128", True)
    assert gpu.path == "/dev/dri/renderD128"
    assert replace(gpu, node=None).path == ""


@pytest.mark.parametrize(
    "error, group", [(KeyError(), str(os.getgid())), (OSError(), ""), (NotImplementedError(), "")]
)
def test_a_group_without_a_name_is_its_number(tmp_path, monkeypatch, error, group):
    """A container does not know the host's groups by name."""

    def raises(_path):
        raise error

    (tmp_path / "node").touch()
    monkeypatch.setattr(Path, "group", raises)
    assert facts_module._group(tmp_path / "node") == group


def test_slingshot_and_containers_leave_marks(tmp_path):
    """They are found by a network card, and by the files of container runtimes."""
    assert not has_slingshot(tmp_path)
    assert not in_container(tmp_path)
    (tmp_path / "sys/class/cxi/cxi0").mkdir(parents=True)
    (tmp_path / ".dockerenv").touch()
    assert has_slingshot(tmp_path)
    assert in_container(tmp_path)


def test_all_facts_come_together(tree, monkeypatch):
    """Bus, libraries, torch's build, kernel and container of one machine."""
    root = tree("0000:03:00.0")
    (root / "run").mkdir()
    (root / "run/.containerenv").touch()
    loadable = {facts_module.LOADER}

    def load(name):
        if name not in loadable:
            raise OSError(name)

    monkeypatch.setattr(facts_module.ctypes, "CDLL", load)
    found = read_facts(root)
    assert [gpu.address for gpu in found.gpus] == ["0000:03:00.0"]
    assert (found.loader, found.runtime, found.container) == (True, False, True)
    assert found.torch == torch_build("xpu")
    assert found.kernel


@pytest.mark.parametrize(
    "line, xpu",
    [("xpu: Optional[str] = '20250302'", "20250302"), ("xpu: Optional[str] = None", None)],
)
def test_torchs_build_is_read_as_text(tmp_path, line, xpu):
    """Torch's version file has the build; it is not imported."""
    file = tmp_path / "version.py"
    file.write_text(f"__version__ = '2.13.0+x'\n{line}\n", encoding="utf-8")
    assert torch_build("xpu", file) == TorchBuild("2.13.0+x", xpu)


def test_a_device_that_goes_away_meanwhile_is_passed_over(tmp_path):
    """A folder of the bus without files."""
    (tmp_path / "sys/bus/pci/devices/0000:03:00.0").mkdir(parents=True)
    assert gpus(tmp_path) == ()


def test_the_loader_may_come_with_torchs_wheel(tmp_path, monkeypatch):
    """In the folder of the environment's libraries, or in torch's own."""
    original = facts_module._comes_with_torch
    assert not original(facts_module.LOADER, tmp_path)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / facts_module.LOADER).touch()
    assert original(facts_module.LOADER, tmp_path)
    (tmp_path / "torch/lib").mkdir(parents=True)
    (tmp_path / "torch/lib/libze_other.so").touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "torch")])
    monkeypatch.setattr(facts_module.importlib.util, "find_spec", lambda _name: spec)
    assert original("libze_other.so", tmp_path)
    monkeypatch.setattr(facts_module.importlib.util, "find_spec", lambda _name: None)
    assert not original("libze_other.so", tmp_path)
