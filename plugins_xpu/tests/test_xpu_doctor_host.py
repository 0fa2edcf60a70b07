"""Aurora's modules and jobs in `lmcore doctor`, laid out as variables, and what a run would use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmcore.contract import CheckStatus, ProbeState, TorchBuild
from lmcore.contract.op.packages import Package
from lmcore_xpu import doctor
from lmcore_xpu.detection.facts import Facts, Gpu
from lmcore_xpu.detection.host import Host
from lmcore_xpu.detection.visible import visible_units
from lmcore_xpu.doctor_host import aurora_checks, read_aurora, run_check
from lmcore_xpu.packages import BINDINGS
from lmcore_xpu.probe import probe

NODE = "x4407c6s2b0n0"
FULL_NODES = (
    "x4407c6s2b0n0.hsn.cm.aurora.alcf.anl.gov",
    "x4407c6s7b0n0.hsn.cm.aurora.alcf.anl.gov",
)
MODULE = {
    "ENV_NAME": "frameworks/2026.1.0",
    "CONDA_PREFIX": "/opt/aurora/26.181.0/frameworks/aurora_frameworks-2026.1.0",
    "ZE_FLAT_DEVICE_HIERARCHY": "FLAT",
    "CCL_PROCESS_LAUNCHER": "pmix",
}
"""Variables of the module as docs.alcf.anl.gov shows them (`module show frameworks`)."""
OLDER_MODULE = {
    "CONDA_PREFIX": "/opt/aurora/26.26.0/frameworks/aurora_frameworks-2025.3.1",
    "ZE_FLAT_DEVICE_HIERARCHY": "FLAT",
    "ONEAPI_DEVICE_SELECTOR": "opencl:gpu;level_zero:gpu",
}
CARDS = tuple(
    Gpu(f"0000:{place:02x}:00.0", "0x0bd5", "i915", f"renderD{128 + place}", True, 2)
    for place in range(1, 7)
)
FACTS = Facts(CARDS, True, True, TorchBuild("2.13.0a0+gitcf30153", "20260000"), "6.4.0")


@pytest.fixture
def job(tmp_path):
    """Return the variables of a PBS job on two hosts, each named once per process."""
    nodes = tmp_path / "nodes"
    nodes.write_text("".join(f"{host}\n" for host in FULL_NODES for _ in range(2)))
    return {"PBS_JOBID": "1234567.aurora-pbs-0001", "PBS_NODEFILE": str(nodes)}


@pytest.mark.parametrize(
    "host, env, known",
    [
        (NODE, {}, True),
        (FULL_NODES[0], {}, True),
        ("aurora-uan-0012", {}, True),
        ("worker", MODULE, True),
        ("worker", {"CONDA_PREFIX": "/opt/conda"}, False),
        ("x3002c0s13b0n0", {}, False),
        ("x3002c0s13b0n0.hsn.cm.polaris.alcf.anl.gov", {}, False),
        ("node17", {"ENV_NAME": "frameworks/2026.1.0"}, False),
    ],
)
def test_aurora_is_known_by_its_names(host, env, known):
    """Its hosts' names, their domain, and the folder of its modules."""
    assert (read_aurora(env, host) is not None) is known


def test_a_node_file_names_the_machine(job):
    """Under a name of the host that says nothing; a file that is missing says nothing either."""
    assert read_aurora(job, "nid1").hosts == FULL_NODES
    assert read_aurora({"PBS_NODEFILE": "/nowhere/nodes"}, "nid1") is None


@pytest.mark.parametrize(
    "env, version",
    [
        (MODULE, "2026.1.0"),
        (OLDER_MODULE, "2025.3.1"),
        ({"LOADEDMODULES": "gcc/13.4.0:oneapi/release/2025.3.1:frameworks/2025.2.0"}, "2025.2.0"),
        ({"LOADEDMODULES": "gcc/13.4.0:oneapi/release/2025.3.1"}, ""),
        ({}, ""),
    ],
)
def test_the_module_has_a_version(env, version):
    """By the variables that it sets, or by the list of loaded modules."""
    assert read_aurora(env, NODE).module == version


def shown(env, host=NODE):
    """Return the one check of Aurora."""
    (check,) = aurora_checks(read_aurora(env, host), env)
    return check


def test_a_job_with_the_module_is_in_order(job):
    """The check names host, job and module."""
    check = shown(MODULE | job)
    assert check.status is CheckStatus.OK
    assert check.detail == (
        f"compute node {NODE}, job 1234567.aurora-pbs-0001 on 2 hosts, module `frameworks` 2026.1.0"
    )
    assert list(aurora_checks(None, {})) == []


@pytest.mark.parametrize(
    "env, host, detail, fix",
    [
        ({}, NODE, "no PBS job, no module `frameworks`", "`module load frameworks`"),
        (MODULE, "aurora-uan-0012", "login node", "`qsub -I"),
        ({**MODULE, "ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, NODE, "the 6 cards of a node",
         "`export ZE_FLAT_DEVICE_HIERARCHY=FLAT`"),
        ({**MODULE, "CCL_KVS_MODE": "mpi"}, NODE, "unless MPI is initialised",
         "`unset CCL_KVS_MODE`"),
    ],
)  # fmt: skip
def test_what_a_user_forgets_is_warned_of(env, host, detail, fix):
    """The warning has the command."""
    check = shown(env, host)
    assert check.status is CheckStatus.WARNING
    assert detail in check.detail
    assert fix in check.fix


def test_an_older_modules_store_over_mpi_is_in_order():
    """It is what Argonne recommended for it."""
    assert shown({**OLDER_MODULE, "CCL_KVS_MODE": "mpi"}).status is CheckStatus.OK


def test_the_selector_of_an_older_module_leaves_all_tiles():
    """`ONEAPI_DEVICE_SELECTOR` of frameworks/2025.3.1 has two backends; torch uses Level Zero's."""
    found = probe(FACTS, OLDER_MODULE)
    assert (found.state, found.count) == (ProbeState.PRESENT, 12)


def run_of(env, backends, cards=CARDS, **more):
    """Return the check of a run on these cards."""
    found = probe(replace(FACTS, gpus=cards), env)
    return run_check(found, visible_units(cards, env).units, env, backends, **more)


def test_a_run_by_lmcore_itself():
    """Devices, backend, and each variable with its value, or its name if ranks differ."""
    check = run_of({}, ["xccl", "ccl"])
    assert check.status is CheckStatus.OK
    assert check.detail == (
        "`lmcore train` starts 12 processes, one for each tile of 6 cards; backend `xccl`, `ccl` "
        "with `--distributed-backend ccl`; lmcore sets ZE_ENABLE_PCI_ID_DEVICE_ORDER=1, "
        "CCL_PROCESS_LAUNCHER=none, CCL_ATL_TRANSPORT=ofi, CCL_LOCAL_RANK, CCL_LOCAL_SIZE"
    )


def test_a_run_on_several_hosts_by_mpiexec():
    """The module's variables are kept, and the network's are set."""
    check = run_of(MODULE, ["xccl"], hosts=2, slingshot=True)
    assert "backend `xccl`; it is refused: see `oneccl launcher`; by `mpiexec" in check.detail
    assert check.detail.endswith(
        "by `mpiexec --pmi=pmix` on 2 hosts, 12 each, lmcore sets ZE_ENABLE_PCI_ID_DEVICE_ORDER=1, "
        "FI_PROVIDER=cxi, FI_CXI_RX_MATCH_MODE=hybrid, FI_CXI_DEFAULT_CQ_SIZE=1048576, "
        "CCL_KVS_CONNECTION_TIMEOUT=600"
    )


@pytest.mark.parametrize(
    "env, count, text",
    [
        ({"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, 6, "starts 6 processes, one for each GPU"),
        ({"ZE_AFFINITY_MASK": "3"}, 1, "starts one process, on one tile"),
    ],
)
def test_other_devices_and_no_backend(env, count, text):
    """Without a backend there is no run of several processes."""
    check = run_of(env, [])
    assert probe(FACTS, env).count == count
    assert text in check.detail
    assert check.detail.endswith("no communication backend, so that a run has one process")


def test_a_user_who_has_set_everything():
    """No variable is added."""
    env = {"ZE_AFFINITY_MASK": "0,1", "CCL_PROCESS_LAUNCHER": "hydra"}
    assert run_of(env, ["xccl"]).detail.endswith("lmcore sets no variable")


@pytest.mark.parametrize(
    "why, package, root, usable",
    [
        (None, None, False, ["xccl"]),
        (None, Package("2.8.0"), True, ["xccl", "ccl"]),
        (None, Package("2.8.0"), False, ["xccl"]),
        ("torch was built without XCCL", Package("2.8.0"), True, ["ccl"]),
        ("torch was built without XCCL", Package("2.8.0", "is for torch 2.8"), True, []),
    ],
)
def test_backends_that_could_carry_a_run(monkeypatch, why, package, root, usable):
    """XCCL before the bindings, which need their libraries' environment and their torch."""
    monkeypatch.setattr(doctor, "why_no_xccl", lambda: why)
    packages = {} if package is None else {BINDINGS: package}
    env = {"CCL_KERNEL_PATH": "/ccl/kernels"} if root else {}
    assert doctor._backends(packages, env) == usable


def test_the_report_has_aurora_and_the_run(monkeypatch, job):
    """On a node of a job, `lmcore doctor` of the plugin shows both."""
    env = MODULE | job
    for name in (*env, "ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    host = Host(65536, 64 << 30, (6, 4), slingshot=True)
    monkeypatch.setattr(doctor, "read_facts", lambda: FACTS)
    monkeypatch.setattr(doctor, "read_host", lambda: host)
    monkeypatch.setattr(doctor, "why_no_xccl", lambda: None)
    monkeypatch.setattr(doctor, "installed_packages", dict)
    monkeypatch.setattr("socket.gethostname", lambda: NODE)
    monkeypatch.setattr("torch.xpu.device_count", lambda: 12)
    found = {check.name: check for check in doctor.checks(probe(FACTS, env))}
    assert found["aurora"].status is CheckStatus.OK
    assert "on 2 hosts, 12 each" in found["run"].detail
    assert found["oneccl launcher"].status is CheckStatus.WARNING
