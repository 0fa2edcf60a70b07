"""Report of `lmcore doctor` on simulated GPUs."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest
import torch

from lmcore.contract import CheckStatus, TorchBuild
from lmcore.contract.op.packages import Package
from lmcore_xpu import doctor, plugin
from lmcore_xpu.detection.cards import card_of
from lmcore_xpu.detection.facts import Facts, Gpu
from lmcore_xpu.detection.host import Host, foreign_runtime, read_host
from lmcore_xpu.detection.selector import SELECTOR
from lmcore_xpu.detection.visible import HIERARCHY, MASK
from lmcore_xpu.doctor_ccl import ccl_checks
from lmcore_xpu.launch_env import launch_env
from lmcore_xpu.packages import BINDINGS, EXTENSION, TRITON
from lmcore_xpu.probe import probe


def gpu(place, device_id, tiles=1, access=True):
    """Return a GPU at a place of the bus."""
    return Gpu(
        f"0000:{place:02x}:00.0",
        device_id,
        "xe",
        f"renderD{128 + place}",
        access,
        tiles,
        0,
        "render",
    )


SHUT = {"access": False, "error": errno.EACCES}
MAX = tuple(gpu(place, "0x0bd5", 2) for place in (3, 4))
ARCS = (gpu(3, "0xe20b"), gpu(4, "0xe20b"))
XPU_TORCH = TorchBuild("2.13.0+xpu", "20250302")
FIT = Facts(MAX, True, True, XPU_TORCH, "6.14.0")
ARC_FIT = replace(FIT, gpus=ARCS)
ROOMY = Host(65536, 64 << 30, (6, 14), slingshot=False)
NOTHING = replace(FIT, gpus=(), loader=False, runtime=False, torch=TorchBuild("2.13.0+cpu", None))
VARIABLES = (MASK, SELECTOR, HIERARCHY, "LD_LIBRARY_PATH", "CCL_ROOT", "FI_PROVIDER")


@pytest.fixture
def check(monkeypatch):
    """Runs the checks on facts; returns them by name.  torch sees what is expected, or `count`."""
    monkeypatch.setattr(doctor, "why_no_xccl", lambda: None)
    for name in (*VARIABLES, *doctor._ALLOCATOR):
        monkeypatch.delenv(name, raising=False)

    def run(facts, *, count=None, packages=None, host=ROOMY, **env):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        found = probe(facts, env)
        seen = found.count if count is None else count
        monkeypatch.setattr(doctor, "read_facts", lambda: facts)
        monkeypatch.setattr(doctor, "read_host", lambda: host)
        monkeypatch.setattr(doctor, "installed_packages", lambda: packages or {})
        monkeypatch.setattr(torch.xpu, "device_count", lambda: seen)
        return {check.name: check for check in doctor.checks(found)}

    return run


def test_nothing_fails_without_hardware(check):
    """Without GPU, libraries and XPU in torch the report has the needs of a GPU."""
    found = check(NOTHING)
    assert set(found) == {"device nodes", "level zero", "torch build"}
    assert {check.status for check in found.values()} == {CheckStatus.SKIPPED}
    assert str(found["level zero"].fix).startswith("for an Intel GPU: install Intel's GPU runtime")
    assert str(found["torch build"].fix).startswith("for an Intel GPU: run `pip install")


def test_a_machine_in_order_is_ok(check):
    """Nodes, libraries, torch, devices, XCCL and what its processes share."""
    found = check(FIT)
    assert {check.status for check in found.values()} == {CheckStatus.OK}
    names = {"device nodes", "level zero", "torch build", "devices", "xccl", "run", "oneccl"}
    assert set(found) == names | {"CCL_ZE_IPC_EXCHANGE"}
    assert found["devices"].detail == "torch sees 4; 4 of 4 tiles on 2 cards are left"
    assert "names the device" in found["xccl"].detail
    assert "sums and divides" in found["xccl"].detail


def test_one_of_a_kind(check):
    """Nouns are in the singular for one GPU of one tile, and verbs for one that is closed."""
    one = replace(FIT, gpus=(replace(MAX[0], tiles=1),))
    found = check(one)
    assert found["device nodes"].detail == "1 of 1 GPU can be opened by this user"
    assert "; 1 of 1 tile on 1 card is left" in found["devices"].detail
    closed = probe(replace(FIT, gpus=(replace(MAX[0], **SHUT), MAX[1])), {})
    assert any("1 of 2 GPUs is closed to this process" in line for line in closed.evidence)


@pytest.mark.parametrize(
    "facts, failed",
    [
        (replace(FIT, gpus=tuple(replace(gpu, **SHUT) for gpu in MAX)), {"device nodes"}),
        (replace(FIT, loader=False), {"level zero"}),
        (replace(FIT, torch=TorchBuild("2.13.0+cpu", None)), {"torch build"}),
        (replace(FIT, torch=TorchBuild("", None)), {"torch build"}),
    ],
)
def test_what_is_at_fault_fails(check, facts, failed):
    """The fault has the probe's fix, and later checks are not made."""
    found = check(facts)
    bad = {check.name for check in found.values() if check.status is CheckStatus.FAILED}
    assert bad == failed
    assert all(found[name].fix == probe(facts, {}).fix for name in bad)
    assert "devices" not in found


def test_a_closed_node_beside_open_ones_is_warned_of(check):
    """The node is named."""
    found = check(replace(FIT, gpus=(replace(MAX[0], **SHUT), MAX[1])))["device nodes"]
    assert (found.status, found.detail) == (
        CheckStatus.WARNING,
        "1 of 2 GPUs can be opened by this user",
    )
    assert "/dev/dri/renderD131" in found.fix


@pytest.mark.parametrize(
    "env, name, status, detail",
    [
        ({MASK: "0,1"}, MASK, CheckStatus.OK, "leaves 2 of 4 tiles, on 1 of 2 cards"),
        ({MASK: "0,9"}, MASK, CheckStatus.WARNING, "ignores `9`"),
        ({MASK: "9"}, MASK, CheckStatus.FAILED, "hides all 4 tiles"),
        ({SELECTOR: "opencl:*"}, SELECTOR, CheckStatus.FAILED, "leaves none"),
        ({HIERARCHY: "COMPOSITE"}, HIERARCHY, CheckStatus.OK, "leaves 2 devices"),
        ({HIERARCHY: "flat"}, HIERARCHY, CheckStatus.WARNING, "the driver ignores it"),
        ({MASK: "0", HIERARCHY: "COMPOSITE"}, f"{MASK} and {HIERARCHY}", CheckStatus.OK,
         "with 2 of 4 tiles"),
    ],
)  # fmt: skip
def test_variables_that_choose_devices_are_checked(check, env, name, status, detail):
    """A wrong variable has a separate line."""
    found = check(FIT, **env)[name]
    assert found.status is status
    assert detail in found.detail
    assert (found.fix is None) == (status is CheckStatus.OK)


def test_tiles_that_torch_does_not_see_are_warned_of(check):
    """The report has the expected and the seen devices, and a way to find the cause."""
    found = check(FIT, count=2)["devices"]
    assert found.status is CheckStatus.WARNING
    assert found.detail.endswith("4 tiles on 2 cards are left: 4 are expected")
    assert f"start without `{MASK}`" not in found.fix
    assert f"start without `{MASK}`" in check(FIT, count=1, **{MASK: "0,1"})["devices"].fix


def test_different_gpus_are_warned_of(check):
    """The warning has the mask that leaves one kind."""
    found = check(replace(FIT, gpus=(ARCS[0], gpu(5, "0x56a0"))))["equal devices"]
    assert found.status is CheckStatus.WARNING
    assert "1 x Arc B580 Graphics, 1 x Arc A770 Graphics" in found.detail
    assert "ZE_AFFINITY_MASK=0" in found.fix


@pytest.mark.parametrize("version, warned", [("2.13.0+xpu", True), ("2.13.0a0+gitabc", False)])
def test_a_toolkits_runtime_goes_before_that_of_a_wheel(check, tmp_path, version, warned):
    """A torch that was built on the system has no other."""
    (tmp_path / "libsycl.so.8").touch()
    facts = replace(FIT, torch=TorchBuild(version, "20250302"))
    found = check(facts, LD_LIBRARY_PATH=f"/nowhere::{tmp_path}")
    assert ("sycl runtime" in found) is warned
    if warned:
        assert str(tmp_path) in found["sycl runtime"].detail
        assert "setvars.sh" in found["sycl runtime"].fix


def test_no_runtime_is_found_where_there_is_none(tmp_path):
    """Folders without it, and no variable."""
    assert foreign_runtime({}) is None
    assert foreign_runtime({"LD_LIBRARY_PATH": str(tmp_path)}) is None


@pytest.mark.parametrize("name", doctor._ALLOCATOR)
@pytest.mark.parametrize("facts, status", [(ARC_FIT, CheckStatus.WARNING), (FIT, CheckStatus.OK)])
def test_growing_segments_are_warned_of_on_arc_cards(check, name, facts, status):
    """Under each of torch's names; the Max series is not concerned."""
    value = "max_split_size_mb:128,expandable_segments:True"
    found = check(facts, **{name: value})["allocator"]
    assert found.status is status
    if status is CheckStatus.WARNING:
        assert "Arc B580 Graphics" in found.detail
        assert found.fix == f"leave `expandable_segments` out of `{name}`"


def test_other_settings_of_the_allocator_are_not(check):
    """Nor segments that are turned off."""
    found = check(ARC_FIT, PYTORCH_ALLOC_CONF="expandable_segments:False")
    assert "allocator" not in found


def test_packages_are_judged(check):
    """One that does not fit says why and what to do; one that does says its version."""
    packages = {
        EXTENSION: Package("2.8.10+xpu", "is for torch 2.8"),
        BINDINGS: Package("2.13.0"),
        TRITON: Package("3.7.0"),
    }
    found = check(FIT, packages=packages)
    assert found[EXTENSION].status is CheckStatus.WARNING
    assert found[EXTENSION].fix == f"`pip uninstall {EXTENSION}`"
    assert found[BINDINGS].status is CheckStatus.WARNING
    assert "CCL_ROOT" in found[BINDINGS].detail
    assert (found[TRITON].status, found[TRITON].detail) == (CheckStatus.OK, "3.7.0")
    broken = check(FIT, packages={TRITON: Package("3.7.0", "is for other GPUs")})[TRITON]
    assert "pip install triton-xpu" in broken.fix
    assert check(FIT, packages={TRITON: Package()})[TRITON].detail == "installed, without a version"


def test_a_torch_without_xccl_is_warned_of(check, monkeypatch):
    """One GPU works without it."""
    monkeypatch.setattr(doctor, "why_no_xccl", lambda: "torch was built without XCCL")
    assert check(FIT)["xccl"].status is CheckStatus.WARNING


def test_the_hook_runs_the_checks_of_this_machine():
    """The hook works on any machine."""
    found = plugin.lmcore_doctor(plugin.lmcore_probe({}))
    assert [check.name for check in found][:3] == ["device nodes", "level zero", "torch build"]


MAX_CARDS = [card_of("0x0bd5")] * 2
ARC_CARDS = [card_of("0xe20b")] * 2


def told(cards=MAX_CARDS, env=None, **host):
    """Return oneCCL's checks by name."""
    return {check.name: check for check in ccl_checks(cards, env or {}, replace(ROOMY, **host))}


def test_nothing_set_is_in_order():
    """The variables that runs need are set for them."""
    assert told()["oneccl"].detail == "nothing set; lmcore sets what runs need"
    user_choice = told(env={"CCL_LOG_LEVEL": "info", "CCL_BCAST": "double_tree"})["oneccl"]
    assert (user_choice.status, user_choice.detail) == (
        CheckStatus.OK,
        "yours: CCL_BCAST, CCL_LOG_LEVEL",
    )


@pytest.mark.parametrize(
    "env, detail, fix",
    [
        ({"CCL_PROCESS_LAUNCHER": "pmix", "CCL_ATL_TRANSPORT": "ofi"},
         "`CCL_PROCESS_LAUNCHER=pmix` with `CCL_ATL_TRANSPORT=ofi`",
         "set `CCL_ATL_TRANSPORT=mpi`, or unset `CCL_PROCESS_LAUNCHER`"),
        ({"CCL_KVS_USE_MPI_RANKS": "1", "CCL_ATL_TRANSPORT": "ofi"},
         "with `CCL_ATL_TRANSPORT=ofi`", "unset `CCL_KVS_USE_MPI"),
        ({"CCL_LOCAL_SIZE": "4"}, "with no `CCL_LOCAL_RANK`", "set `CCL_LOCAL_RANK`, or unset"),
        ({"CCL_LOCAL_SIZE": "4", "CCL_LOCAL_RANK": "0"},
         "for every process that starts from here", "lmcore sets them for each process"),
        ({"CCL_ROOT": "/opt/ccl"}, "`CCL_ROOT=/opt/ccl` with no `LD_LIBRARY_PATH`",
         "unset `CCL_ROOT`"),
        ({"CCL_ROOT": "/opt/ccl/", "LD_LIBRARY_PATH": "/usr/lib"},
         "`LD_LIBRARY_PATH` has nothing of", "`source $CCL_ROOT/env/vars.sh`"),
        ({"CCL_CONFIGURATION": "cpu"}, "is a oneCCL without GPUs", "cpu_gpu_dpcpp"),
        ({"FI_CXI_RX_MATCH_MODE": "hybrid"}, "with no `FI_PROVIDER`", "set `FI_PROVIDER=cxi`"),
        ({"FI_PROVIDER": "cxi"}, "this host has no Slingshot card", "`FI_PROVIDER=tcp`"),
    ],
)  # fmt: skip
def test_halves_are_found(env, detail, fix):
    """The report has the set and the missing variable, and both fixes."""
    found = told(env=env)["oneccl"]
    assert found.status is CheckStatus.WARNING
    assert found.detail.startswith("half set: ")
    assert detail in found.detail
    assert fix in found.fix


@pytest.mark.parametrize(
    "env",
    [
        {"CCL_PROCESS_LAUNCHER": "pmix", "CCL_ATL_TRANSPORT": "mpi", "CCL_KVS_MODE": "mpi"},
        {"CCL_ROOT": "/opt/ccl/", "LD_LIBRARY_PATH": "/usr/lib:/opt/ccl/lib"},
        {"CCL_LOCAL_RANK": "1", "CCL_LOCAL_SIZE": "4", "LOCAL_RANK": "1"},
        {"CCL_KVS_MODE": "mpi", "CCL_ATL_TRANSPORT": "ofi"},  # read with the transport `mpi` alone
        {"CCL_CONFIGURATION": "cpu_gpu_dpcpp"},
        {"CCL_PROCESS_LAUNCHER": "none", "CCL_KVS_USE_MPI_RANKS": "0"},
        {
            "CCL_PROCESS_LAUNCHER": "pmix"
        },  # as Aurora's module sets it; the transport's default is MPI
    ],
)
def test_wholes_are_in_order(env):
    """Nothing is said against them."""
    assert told(env=env)["oneccl"].status is CheckStatus.OK


PALS = {"PALS_APID": "7", "PALS_RANKID": "0", "PALS_LOCAL_SIZE": "12"}
PMIX = {**PALS, "PMIX_RANK": "0", "PMIX_NAMESPACE": "pals"}
INTEL_MPI = {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "12"}


@pytest.mark.parametrize(
    "launcher, transport, started_by, status, detail, fix",
    [
        ("pmix", None, PMIX, CheckStatus.OK, "ranks from `pmix`, messages over `mpi`", None),
        ("pmix", None, {}, CheckStatus.WARNING, "`lmcore train` alone is refused",
         "`unset CCL_PROCESS_LAUNCHER` for runs that"),
        ("pmix", "mpi", {}, CheckStatus.WARNING, "no PMIx server here",
         "`unset CCL_PROCESS_LAUNCHER CCL_ATL_TRANSPORT`"),
        ("pmix", None, PALS, CheckStatus.FAILED, "PALS started this process without PMIx",
         "`mpiexec --pmi=pmix`"),
        ("hydra", None, PALS, CheckStatus.FAILED, "PALS or PMIx started this process",
         "`export CCL_PROCESS_LAUNCHER=pmix`"),
        ("hydra", None, PMIX, CheckStatus.FAILED, "PALS or PMIx started this process",
         "`export CCL_PROCESS_LAUNCHER=pmix`"),
        ("hydra", None, INTEL_MPI, CheckStatus.OK, "ranks from `hydra`", None),
        ("hydra", "ofi", {}, CheckStatus.OK, "messages over `ofi`", None),
        (None, "mpi", {}, CheckStatus.WARNING, "`CCL_PROCESS_LAUNCHER=hydra` (the default) with",
         "`unset CCL_ATL_TRANSPORT`"),
        (None, "mpi", INTEL_MPI, CheckStatus.OK, "messages over `mpi`", None),
        ("none", None, {}, CheckStatus.OK, "ranks from `none`, messages over `ofi`", None),
        ("none", "mpi", {}, CheckStatus.WARNING, "no MPI launcher starts the processes",
         "`export CCL_ATL_TRANSPORT=ofi`"),
        ("torchrun", None, {}, CheckStatus.OK, "ranks from `torchrun`", None),
        ("slurm", None, {}, CheckStatus.FAILED, "`CCL_PROCESS_LAUNCHER=slurm` is unknown",
         "one of hydra, pmix"),
        (None, "tcp", {}, CheckStatus.FAILED, "`CCL_ATL_TRANSPORT=tcp` is unknown", "mpi, ofi"),
        (None, None, PMIX, None, None, None),
    ],
)  # fmt: skip
def test_oneccl_and_the_processes_have_one_launcher(
    launcher, transport, started_by, status, detail, fix
):
    """Contradictions fail if the launcher is known, and warn in a shell, before any has started."""
    given = {"CCL_PROCESS_LAUNCHER": launcher, "CCL_ATL_TRANSPORT": transport}
    env = {name: value for name, value in given.items() if value is not None}
    found = told(env=env | started_by).get("oneccl launcher")
    if status is None:
        assert found is None
        return
    assert found.status is status
    assert detail in found.detail
    assert found.fix is None if fix is None else fix in found.fix


@pytest.mark.parametrize("slingshot", [False, True])
@pytest.mark.parametrize("more", [{}, {"PALS_APID": "1", "PMIX_RANK": "0", "CCL_ROOT": "/ccl"}])
def test_what_lmcore_sets_is_whole(slingshot, more):
    """The launch environment passes these checks."""
    place = {"rank": 12, "local_rank": 0, "world_size": 24, "local_world_size": 12}
    base = {"LOCAL_RANK": "0", **more, "LD_LIBRARY_PATH": "/ccl/lib"}
    wanted = launch_env(base, probe(ARC_FIT, {}), place, slingshot=slingshot)
    found = told(ARC_CARDS, {**base, **wanted}, slingshot=slingshot)
    assert {check.status for check in found.values()} == {CheckStatus.OK}


@pytest.mark.parametrize(
    "cards, value, kernel, status, detail",
    [
        (MAX_CARDS, "", (6, 14), CheckStatus.OK, "oneCCL's default"),
        (MAX_CARDS, "drmfd", (5, 4), CheckStatus.OK, "drmfd"),
        (MAX_CARDS, "", (5, 4), CheckStatus.WARNING, "needs Linux 5.6; this is 5.4"),
        (MAX_CARDS, "pidfd", (5, 4), CheckStatus.WARNING, "needs Linux 5.6"),
        (MAX_CARDS, "", (0, 0), CheckStatus.OK, "default"),
        (ARC_CARDS, "", (6, 14), CheckStatus.OK, "lmcore sets `sockets`"),
        (ARC_CARDS, "sockets", (6, 14), CheckStatus.OK, "sockets"),
        (ARC_CARDS, "pidfd", (6, 14), CheckStatus.WARNING, "intel/torch-xpu-ops#4238"),
        (MAX_CARDS, "socket", (6, 14), CheckStatus.FAILED, "unknown to oneCCL"),
        (MAX_CARDS[:1], "pidfd", (5, 4), None, ""),
    ],
)
def test_how_processes_share_memory(cards, value, kernel, status, detail):
    """Cards without links, old kernels and misspelt values; one device shares nothing."""
    env = {"CCL_ZE_IPC_EXCHANGE": value} if value else {}
    found = told(cards, env, kernel=kernel).get("CCL_ZE_IPC_EXCHANGE")
    assert (found.status if found else None) is status
    assert found is None or detail in found.detail
    if status is CheckStatus.WARNING:
        assert "CCL_ZE_IPC_EXCHANGE=sockets" in found.fix


def test_limits_that_collectives_meet_are_warned_of():
    """Open files and shared memory, where there are several devices."""
    found = told(open_files=1024, shared_memory=64 << 20)
    assert found["open files"].status is CheckStatus.WARNING
    assert found["open files"].fix == "`ulimit -n 65536` before the start"
    assert found["shared memory"].detail.startswith("64 MiB in /dev/shm")
    assert "--shm-size=8g" in found["shared memory"].fix
    for few in (told(open_files=-1, shared_memory=None), told(MAX_CARDS[:1], open_files=1024)):
        assert not {"open files", "shared memory"} & few.keys()


def test_limits_are_read_from_this_host(tmp_path, monkeypatch):
    """Facts of the host are numbers, or unknown."""
    found = read_host()
    assert found.open_files != 0
    assert found.kernel >= (3, 0)
    monkeypatch.setattr("platform.release", lambda: "unknown")
    assert read_host(tmp_path) == replace(found, shared_memory=None, kernel=(0, 0), slingshot=False)
