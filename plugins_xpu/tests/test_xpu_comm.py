"""Communication backends: the choice, its record for the core, and reasons against the others."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from fake_torch_xpu import Card
from suite import warm
from torch import distributed

from lmcore.base.errors import DeviceError
from lmcore.contract import Probe, ProbeState
from lmcore.contract.op.packages import Package
from lmcore.plugin import choose_comm_backend
from lmcore.runtime.launch.rank import RankInfo
from lmcore.runtime.process import group as processes
from lmcore_xpu import comm, plugin
from lmcore_xpu.device import create_device
from lmcore_xpu.packages import BINDINGS, BINDINGS_LIBRARY

FIT = Package(f"{'.'.join(torch.__version__.split('.')[:2])}.0+xpu")
TABLES = ("backend_list", "backend_capability", "backend_type_map", "default_device_backend_map")


@pytest.fixture
def none_installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Package]:
    """Leave packages to the test."""
    found: dict[str, Package] = {}
    monkeypatch.setattr(comm, "installed_packages", lambda: found)
    return found


@pytest.fixture
def no_ccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registrations with torch, and the import of the bindings, that the test's end undoes."""
    for name in (*TABLES, "_plugins"):
        monkeypatch.setattr(distributed.Backend, name, copy(getattr(distributed.Backend, name)))
    monkeypatch.setattr(distributed.Backend, "CCL", "", raising=False)
    monkeypatch.delattr(distributed.Backend, "CCL")
    for name in ("CCL_ATL_TRANSPORT", "CCL_PROCESS_LAUNCHER", "CCL_KERNEL_PATH"):
        monkeypatch.delenv(name, raising=False)
    yield
    sys.modules.pop(BINDINGS, None)


@pytest.fixture
def bindings(
    no_ccl: None, put_bindings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """Function that installs bindings, by default for this torch; returns the folder of oneCCL."""

    def put(version: str = FIT.version, **options: Any) -> Path:
        env = put_bindings(tmp_path / "site", version, **options)
        monkeypatch.syspath_prepend(tmp_path / "site")
        monkeypatch.setenv("CCL_ROOT", env["CCL_ROOT"])
        return Path(env["CCL_ROOT"])

    return put


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
    """The reason is shown to users."""
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


def test_oneccls_environment(bindings: Any, tmp_path: Path) -> None:
    """The environment is found not set, half set, set, or set by the folder of kernels alone."""
    root = bindings()
    problem = comm.environment_problem({})
    assert problem is not None
    assert problem.startswith("oneCCL's environment is not set: `CCL_ROOT` is empty; `source env/")
    assert comm.environment_problem({"CCL_ROOT": str(tmp_path)}) == (
        f"oneCCL's environment is half set: `CCL_ROOT={tmp_path}` has no `lib/libccl.so.1`"
    )
    assert comm.environment_problem({"CCL_ROOT": str(root)}) is None
    assert comm.environment_problem({"CCL_KERNEL_PATH": "/kernels"}) is None


@pytest.mark.parametrize("own", [True, False])
def test_oneccl_that_pip_installed(
    bindings: Any, own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the bindings' folder, or in Python's, it needs no variables."""
    library = bindings() / "lib" / "libccl.so.1"
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "python"))
    folder = tmp_path / ("site/" + BINDINGS if own else "python") / "lib"
    folder.mkdir(parents=True, exist_ok=True)
    library.rename(folder / library.name)
    assert comm.environment_problem({}) is None


MPI = "no MPI launcher started this process"


@pytest.mark.parametrize(
    "env, reason",
    [
        ({"CCL_ATL_TRANSPORT": "mpi"}, MPI),
        ({"CCL_ATL_TRANSPORT": "mpi", "CCL_KVS_MODE": "mpi", "RANK": "0"}, MPI),
        ({"CCL_ATL_TRANSPORT": "mpi", "CCL_PROCESS_LAUNCHER": "pmix"}, MPI),
        (
            {"CCL_PROCESS_LAUNCHER": "none", "CCL_LOCAL_RANK": "0", "LOCAL_RANK": "1"},
            "`CCL_LOCAL_RANK=0` is not of this process, which has `LOCAL_RANK=1`",
        ),
        (
            {"CCL_PROCESS_LAUNCHER": "none", "CCL_LOCAL_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
            "`CCL_LOCAL_SIZE=4` is not of this process, which has `LOCAL_WORLD_SIZE=2`",
        ),
        (
            {"MPI_LOCALRANKID": "0", "LOCAL_RANK": "1"},
            "`MPI_LOCALRANKID=0` is not of this process, which has `LOCAL_RANK=1`",
        ),
    ],
)
def test_variables_that_contradict(
    bindings: Any, env: dict[str, str], reason: str, xpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both backends refuse them, before anything is imported: oneCCL would end the process."""
    root = bindings()
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert reason in str(comm.why_no_ccl(FIT, {**env, "CCL_ROOT": str(root)}))
    assert BINDINGS not in sys.modules
    with pytest.raises(DeviceError) as caught:
        choose_comm_backend(plugin.lmcore_comm_backends())
    assert [reason in line for line in caught.value.why.splitlines()] == [True, True]


@pytest.mark.parametrize(
    "env",
    [
        {"CCL_ATL_TRANSPORT": "mpi", "CCL_PROCESS_LAUNCHER": "pmix", "PMIX_RANK": "3"},
        {"CCL_ATL_TRANSPORT": "mpi", "MPI_LOCALRANKID": "1", "LOCAL_RANK": "1"},
        {"CCL_ATL_TRANSPORT": "ofi", "CCL_KVS_MODE": "mpi"},  # oneCCL 2021.15.2 works with it
        {"CCL_LOCAL_RANK": "0", "MPI_LOCALRANKID": "1", "LOCAL_RANK": "1"},  # it is not read
    ],
)
def test_variables_that_agree(env: dict[str, str]) -> None:
    """Another set is left to oneCCL."""
    assert comm.variables_problem(env) is None


def test_bindings_that_fit(bindings: Any, xpu: Any) -> None:
    """They are imported, their part for GPUs is loaded, and torch has `ccl` for GPUs and hosts."""
    bindings()
    backend = comm.ccl()
    assert backend.available() is None
    assert (backend.supports_average, backend.needs_device_id) == (False, True)
    assert backend.facts == {"bindings": FIT.version}
    assert backend.register is not None
    backend.register()
    assert distributed.Backend.CCL == "ccl"
    assert distributed.Backend.backend_capability["ccl"] == ["xpu", "cpu"]


@pytest.mark.parametrize("xccl", [True, False])
def test_xccl_and_ccl(bindings: Any, xpu: Any, xccl: bool) -> None:
    """`xccl` is the default if torch has it, and torch's own default; `ccl` is there by name."""
    bindings()
    xpu.xccl = xccl
    offered = plugin.lmcore_comm_backends()
    assert choose_comm_backend(offered).name == ("xccl" if xccl else "ccl")
    assert choose_comm_backend(offered, "ccl").name == "ccl"
    assert distributed.Backend.default_device_backend_map["xpu"] == "xccl"


def test_nothing_is_imported_where_the_environment_is_not_set(bindings: Any) -> None:
    """Cheap reasons come first."""
    bindings()
    problem = comm.why_no_ccl(FIT, {})
    assert problem is not None
    assert "CCL_ROOT" in problem
    assert BINDINGS not in sys.modules


def test_bindings_of_another_torch(bindings: Any) -> None:
    """Their metadata is enough; they are not imported."""
    bindings("2.6.0+xpu")
    reason = comm.ccl().available()
    assert reason is not None
    assert reason.startswith(f"`{BINDINGS}` 2.6.0+xpu is for torch 2.6, and torch 2.")
    assert BINDINGS not in sys.modules


def test_bindings_without_oneccls_libraries(bindings: Any) -> None:
    """The error of the import, which is the loader's, is the reason."""
    bindings(run_path=False)
    code = "from lmcore_xpu import comm; print(comm.ccl().available())"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # Not in this process, in which other tests have loaded a `libccl.so.1`.
    done = warm.run(
        [sys.executable, "-c", code], check=True, env=env, capture_output=True, text=True
    )
    assert done.stdout == (
        f"`{BINDINGS}` is installed, and its `{BINDINGS}` cannot be loaded: libccl.so.1: cannot "
        "open shared object file: No such file or directory; use `xccl`, which comes with torch "
        "for Intel GPUs\n"
    )


def test_bindings_whose_part_for_gpus_does_not_load(
    bindings: Any, tmp_path: Path, capsys: Any
) -> None:
    """The package only prints a warning then; here the loader's error is the reason."""
    bindings()
    library = tmp_path / "site" / BINDINGS / BINDINGS_LIBRARY
    library.write_bytes(b"")
    reason = comm.ccl().available()
    assert capsys.readouterr().out == "the library for GPUs was not loaded\n"
    assert reason == (
        f"`{BINDINGS}` is installed, and its part for GPUs cannot be loaded: {library}: file too "
        "short; use `xccl`, which comes with torch for Intel GPUs"
    )


@pytest.mark.parametrize(
    "devices, message",
    [(None, "torch knows no backend `ccl`"), (["cpu"], "registered `ccl` for cpu, not for xpu")],
)
def test_bindings_that_register_too_little(
    no_ccl: None, devices: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import that leaves torch without `ccl` for GPUs is an error, not a hang later."""

    def load(name: str) -> None:
        if devices is not None:
            distributed.Backend.register_backend("ccl", print, devices=devices)

    monkeypatch.setattr(comm.importlib, "import_module", load)
    register = comm.ccl().register
    assert register is not None
    with pytest.raises(RuntimeError, match=message):
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
