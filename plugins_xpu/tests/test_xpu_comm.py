"""Communication backends: the choice, its record for the core, and reasons against the others."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from fake_torch_xpu import Card
from torch import distributed

from lmcore.accelerator import Probe, ProbeState
from lmcore.accelerator.op.packages import Package
from lmcore.errors import DeviceError
from lmcore.plugin import choose_comm_backend
from lmcore.runtime.launch.rank import RankInfo
from lmcore.runtime.process import group as processes
from lmcore_xpu import comm, plugin
from lmcore_xpu.device import create_device
from lmcore_xpu.packages import BINDINGS, BINDINGS_LIBRARY

FIT = Package("2.13.0+xpu")


@pytest.fixture
def none_installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Package]:
    """Leave packages to the test."""
    found: dict[str, Package] = {}
    monkeypatch.setattr(comm, "installed_packages", lambda: found)
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder like oneCCL's."""
    (tmp_path / "ccl" / "lib").mkdir(parents=True)
    (tmp_path / "ccl" / "lib" / "libccl.so.1").touch()
    return tmp_path / "ccl"


@pytest.fixture
def bindings(install: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Installed bindings whose part for GPUs loads; the libraries that were loaded."""
    install("bindings", "oneccl-bind-pt", FIT.version)
    monkeypatch.setattr(distributed.Backend, "CCL", "", raising=False)
    monkeypatch.delattr(distributed.Backend, "CCL")
    loaded: list[str] = []

    def load(name: str) -> None:
        loaded.append(name)

    monkeypatch.setattr(comm.ctypes, "CDLL", load)
    return loaded


def test_xccl_gets_its_device_and_sums(
    xpu: Any, none_installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the default; the core passes the device, sums, and records oneCCL's version."""
    monkeypatch.setattr(importlib.metadata, "version", {"oneccl": "2021.17.2"}.__getitem__)
    found = plugin.lmcore_comm_backends()
    chosen = choose_comm_backend(found)
    assert (chosen.name, chosen.device_type, chosen.priority) == ("xccl", "xpu", 0)
    assert (chosen.supports_average, chosen.needs_device_id) == (False, True)
    assert chosen.facts == {"oneccl": "2021.17.2"}
    assert chosen.register is None


def test_xccl_of_another_origin(xpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that was not built with the packages of oneCCL has no version of it."""

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert comm.xccl().facts == {}


def test_a_torch_without_xccl_says_so(xpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is what users are shown."""
    xpu.xccl = False
    assert comm.xccl().available() == "torch was built without XCCL"
    monkeypatch.setattr(distributed, "is_available", lambda: False)
    assert comm.xccl().available() == "torch was built without torch.distributed"


def test_ccl_without_the_bindings(xpu: Any, none_installed: Any) -> None:
    """`--distributed-backend ccl` says that there is nothing to install, and what to use."""
    with pytest.raises(DeviceError) as caught:
        choose_comm_backend(plugin.lmcore_comm_backends(), "ccl")
    assert caught.value.what == "`--distributed-backend ccl` cannot be used on this device"
    assert caught.value.why == (
        f"`ccl`: `{BINDINGS}` is not installed; its last release, 2.8, is for torch 2.8, and there "
        f"is none for torch {torch.__version__}: use `xccl`, which comes with torch for Intel GPUs"
    )
    assert caught.value.hint == "leave it out: `xccl` is used then"


def test_ccl_for_another_torch(xpu: Any, none_installed: dict[str, Package]) -> None:
    """The misfit is the reason; nothing is imported."""
    none_installed[BINDINGS] = Package("2.8.0+xpu", "is for torch 2.8")
    backend = comm.ccl()
    assert backend.available() == (
        "is for torch 2.8; use `xccl`, which comes with torch for Intel GPUs"
    )
    assert backend.facts == {"bindings": "2.8.0+xpu"}
    assert BINDINGS not in sys.modules


def test_oneccls_environment(root: Path, tmp_path: Path) -> None:
    """Not set, half set, set, or set by the folder of kernels alone."""
    problem = comm.environment_problem({})
    assert problem is not None
    assert problem.startswith("oneCCL's environment is not set: `CCL_ROOT` is empty; `source env/")
    assert comm.environment_problem({"CCL_ROOT": str(tmp_path)}) == (
        f"oneCCL's environment is half set: `CCL_ROOT={tmp_path}` has no `lib/libccl.so.1`"
    )
    assert comm.environment_problem({"CCL_ROOT": str(root)}) is None
    assert comm.environment_problem({"CCL_KERNEL_PATH": "/kernels"}) is None


def test_bindings_that_fit(bindings: list[str], root: Path) -> None:
    """They are imported, their part for GPUs is loaded, and `ccl` is known to torch."""
    assert comm.why_no_ccl(FIT, {"CCL_ROOT": str(root)}) is None
    (library,) = bindings
    assert library.endswith(f"{BINDINGS}/{BINDINGS_LIBRARY}")
    backend = comm.ccl()
    assert (backend.supports_average, backend.needs_device_id) == (False, True)
    assert backend.priority < comm.xccl().priority
    assert backend.register is not None
    backend.register()
    assert distributed.Backend.CCL == "ccl"


def test_nothing_is_imported_where_the_environment_is_not_set(bindings: list[str]) -> None:
    """Cheap reasons come first."""
    problem = comm.why_no_ccl(FIT, {})
    assert problem is not None
    assert "CCL_ROOT" in problem
    assert BINDINGS not in sys.modules


def test_bindings_whose_part_for_gpus_does_not_load(
    bindings: list[str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package only prints a warning then; here it is the reason."""

    def load(name: str) -> None:
        raise OSError("libsycl.so.7: cannot open shared object file")

    monkeypatch.setattr(comm.ctypes, "CDLL", load)
    assert comm.why_no_ccl(FIT, {"CCL_ROOT": str(root)}) == (
        f"`{BINDINGS}` is installed, and its part for GPUs cannot be loaded: libsycl.so.7: cannot "
        "open shared object file; use `xccl`, which comes with torch for Intel GPUs"
    )


def test_bindings_that_register_nothing(
    bindings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import that leaves torch without `ccl` is an error of the plugin, not a hang later."""
    monkeypatch.setattr(comm.importlib, "import_module", lambda name: None)
    register = comm.ccl().register
    assert register is not None
    with pytest.raises(RuntimeError, match="torch knows no backend `ccl`"):
        register()


def test_torch_is_called_with_its_signature() -> None:
    """The argument of the core for a backend with `needs_device_id` is a parameter of torch's."""
    assert "device_id" in inspect.signature(distributed.init_process_group).parameters
    assert distributed.Backend.default_device_backend_map["xpu"] == "xccl"


def test_the_device_is_current_before_the_group_and_named_at_it(
    xpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core makes the process's own card the current one first; the other way round has hung."""
    xpu.cards = [Card(), Card()]
    monkeypatch.setenv("LOCAL_RANK", "1")
    device = create_device(Probe("xpu", ProbeState.PRESENT, 2))
    seen: list[tuple[int, Any, Any]] = []

    def init(backend: Any = None, **options: Any) -> None:
        seen.append((xpu.current, backend, options["device_id"]))

    fake = create_autospec(distributed.init_process_group, side_effect=init)
    monkeypatch.setattr(distributed, "init_process_group", fake)
    monkeypatch.setattr(processes, "backend_of", lambda *_: comm.xccl())
    place = RankInfo(rank=1, local_rank=1, world_size=2, local_world_size=2)
    store = distributed.HashStore()
    meeting: Any = SimpleNamespace(rank=place, store=store, barrier=lambda about: None)
    nobody: Any = None
    with processes.start_processes(nobody, nobody, device, meeting, timeout=1.0) as found:
        assert found.backend.name == "xccl"
    assert seen == [(1, "xccl", torch.device("xpu", 1))]


def test_no_torch_in_the_launcher() -> None:
    """The table of packages and backends loads no torch, until a backend is asked for."""
    code = (
        "import sys, lmcore_xpu.plugin, lmcore_xpu.comm, lmcore_xpu.kernels, lmcore_xpu.packages;"
        "import lmcore_xpu.faults; print('torch' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, env=env, capture_output=True, text=True
    )
    assert json.loads(done.stdout.strip().lower()) is False
