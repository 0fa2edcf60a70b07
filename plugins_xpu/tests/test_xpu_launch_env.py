"""The environment of a worker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmcore.config.section import Config
from lmcore.contract import Probe, ProbeState
from lmcore_xpu import plugin
from lmcore_xpu.launch_env import LAUNCH_GROUP, launch_env, launch_problems


def probed(*generations):
    """Return a probe that found devices of these generations."""
    gpus = [{"generation": one, "address": "0000:18:00.0"} for one in generations]
    return Probe("xpu", ProbeState.PRESENT, len(gpus), facts={"gpus": gpus})


def place(rank=0, world_size=1, here=None):
    """Return a process's place; the first process of its host."""
    local = world_size if here is None else here
    return {
        "rank": rank,
        "local_rank": rank % local,
        "world_size": world_size,
        "local_world_size": local,
    }


AURORA = probed(*["Xe-HPC"] * 12)
ARCS = probed("Xe2", "Xe2")
ORDER = {"ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1"}
SLINGSHOT = {
    "FI_PROVIDER": "cxi",
    "FI_CXI_RX_MATCH_MODE": "hybrid",
    "FI_CXI_DEFAULT_CQ_SIZE": "1048576",
    "CCL_KVS_CONNECTION_TIMEOUT": "600",
}
PALS = {"PALS_APID": "7", "PALS_LOCAL_RANKID": "0", "PMI_RANK": "0"}
PMIX = {**PALS, "PMIX_NAMESPACE": "pals", "PMIX_RANK": "0"}
BY_PMIX = {"CCL_PROCESS_LAUNCHER": "pmix", "CCL_ATL_TRANSPORT": "mpi"}


def by_us(rank, size):
    """Return oneCCL's variables for a process's rank."""
    return {
        "CCL_PROCESS_LAUNCHER": "none",
        "CCL_ATL_TRANSPORT": "ofi",
        "CCL_LOCAL_RANK": str(rank),
        "CCL_LOCAL_SIZE": str(size),
    }


@pytest.mark.parametrize("found", [AURORA, ARCS, probed()])
def test_a_process_by_itself_gets_the_order_of_the_bus_alone(found):
    """No word of oneCCL, on whatever host."""
    assert launch_env({}, found, place(), slingshot=True) == ORDER
    assert launch_env({}, found, {}) == ORDER


@pytest.mark.parametrize("name", ["ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"])
def test_the_order_is_left_alone_where_the_user_has_numbered(name):
    """Another order would change what the numbers mean."""
    assert launch_env({name: "level_zero:0"}, AURORA, place()) == {}


@pytest.mark.parametrize("selector", ["level_zero:gpu", "opencl:gpu;level_zero:gpu"])
def test_a_selector_without_numbers_is_no_order(selector):
    """Modules of a machine set it for all programs."""
    assert launch_env({"ONEAPI_DEVICE_SELECTOR": selector}, AURORA, place()) == ORDER


def test_processes_of_a_host_of_linked_tiles():
    """Each process gets its rank; memory is shared as oneCCL needs it."""
    for rank in (0, 11):
        wanted = launch_env({}, AURORA, place(rank, 12))
        assert wanted == ORDER | by_us(rank, 12)


def test_processes_on_cards_without_links_share_memory_through_sockets():
    """Sharded training has hung with the default."""
    wanted = launch_env({}, ARCS, place(1, 2))
    assert wanted == ORDER | by_us(1, 2) | {"CCL_ZE_IPC_EXCHANGE": "sockets"}
    mixed = launch_env({}, probed("Xe-HPC", "Xe2"), place(1, 2))
    assert mixed["CCL_ZE_IPC_EXCHANGE"] == "sockets"
    apart = launch_env({}, ARCS, place(1, 2, here=1))  # a card in each of two hosts
    assert "CCL_ZE_IPC_EXCHANGE" not in apart


def test_slingshot_is_used_between_hosts_that_have_it():
    """And is not where there is one host, or no such card."""
    between = launch_env({}, AURORA, place(12, 24, here=12), slingshot=True)
    assert between == ORDER | by_us(0, 12) | SLINGSHOT
    for here, there in ((24, True), (12, False)):
        wanted = launch_env({}, AURORA, place(12, 24, here=here), slingshot=there)
        assert not SLINGSHOT.keys() & wanted.keys()


@pytest.mark.parametrize(
    "provider, used", [("cxi", True), ("cxi;ofi_rxm", True), ("tcp", False), ("psm3", False)]
)
def test_another_provider_of_the_users_is_not_tuned(provider, used):
    """Variables of one provider are not set for another."""
    env = {"FI_PROVIDER": provider}
    wanted = launch_env(env, AURORA, place(12, 24, here=12), slingshot=True)
    assert ("FI_CXI_RX_MATCH_MODE" in wanted) is used


@pytest.mark.parametrize(
    "env, wanted",
    [
        ({**PMIX, "CCL_ROOT": "/opt/aurora/ccl"}, BY_PMIX),
        (PMIX, by_us(0, 12)),
        ({**PALS, "CCL_ROOT": "/opt/aurora/ccl"}, by_us(0, 12)),
        ({"MPI_LOCALRANKID": "0", "PMI_RANK": "0"}, {}),
        ({"OMPI_COMM_WORLD_RANK": "0"}, by_us(0, 12)),
        ({"SLURM_PROCID": "0"}, by_us(0, 12)),
        ({**PMIX, "CCL_ROOT": "/opt/aurora/ccl", "PALS_LOCAL_SIZE": "1"}, by_us(0, 12)),
        ({"CCL_PROCESS_LAUNCHER": "none"}, by_us(0, 12)),
        *(({name: "x"}, {}) for name in LAUNCH_GROUP),
    ],
)
def test_oneccl_gets_the_launcher(env, wanted):
    """By PALS with PMIx and a module's oneCCL; not where the user or Intel MPI has begun.

    Processes that lmcore starts in a single process of PALS's have no PMIx server.
    """
    found = launch_env(env, AURORA, place(0, 24, here=12))
    assert found == ORDER | wanted


@pytest.mark.parametrize(
    "env, refused",
    [
        ({}, True),
        ({"PALS_APID": "7", "PALS_RANKID": "0", "PALS_LOCAL_SIZE": "12"}, True),
        ({**PMIX, "PALS_LOCAL_SIZE": "12"}, False),
        ({**PMIX, "PALS_LOCAL_SIZE": "1"}, True),
        ({"PMIX_RANK": "0"}, False),
        ({"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, False),
        ({"CCL_PROCESS_LAUNCHER": "none"}, False),
    ],
)
def test_a_launcher_of_a_module_that_started_nothing_is_refused(env, refused):
    """Before oneCCL looks for a PMIx server that is not there; one process needs none."""
    worker = {"CCL_PROCESS_LAUNCHER": "pmix", "WORLD_SIZE": "24", "LOCAL_WORLD_SIZE": "12"}
    problems = launch_problems(worker | env)
    assert len(problems) == refused
    for problem in problems:
        assert "`unset CCL_PROCESS_LAUNCHER`, or" in problem.hint


def test_the_hook_refuses_it_too(monkeypatch, xpu):
    """Of a run's device, beside its other problems."""
    env = {"CCL_PROCESS_LAUNCHER": "pmix", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name in ("PMIX_NAMESPACE", "PMIX_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    device = plugin.lmcore_create_device(AURORA, Config())
    (problem,) = plugin.lmcore_validate_config(device, Config())
    assert "no PMIx server" in problem.what


def test_the_hook_looks_at_its_own_environment(monkeypatch):
    """It is asked in the worker's place, with the worker's rank."""
    for name in ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR", *LAUNCH_GROUP):
        monkeypatch.delenv(name, raising=False)
    assert plugin.lmcore_launch_env(AURORA, place(3, 12)) == ORDER | by_us(3, 12)
    monkeypatch.setenv("ZE_AFFINITY_MASK", "0,1")
    monkeypatch.setenv("CCL_ATL_TRANSPORT", "mpi")
    assert plugin.lmcore_launch_env(replace(AURORA, count=2), place(1, 2)) == {}
