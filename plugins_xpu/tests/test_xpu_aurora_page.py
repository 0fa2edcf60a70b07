"""The guide for Aurora: its job script under a stand-in of PALS, and what it says of lmcore."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from lmcore.runtime.launch.rank import RankInfo, rank_info
from lmcore.runtime.launch.scheduler_env import translate
from lmcore_xpu.launch_env import launch_problems, launcher_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/how-to/aurora.md").read_text(encoding="utf-8")
HOSTS = ("x4407c6s2b0n0.hsn.cm.aurora.alcf.anl.gov", "x4407c6s7b0n0.hsn.cm.aurora.alcf.anl.gov")

MPIEXEC = """#!/bin/bash
while [[ $1 == -* ]]; do
    case $1 in
        -n) size=$2; shift 2;;
        -ppn) local=$2; shift 2;;
        --env) export "${2?}"; shift 2;;
        *) shift;;
    esac
done
for ((rank = 0; rank < size; rank++)); do
    PALS_APID=7 PALS_RANKID=$rank PALS_NODEID=$((rank / local)) \\
    PALS_LOCAL_RANKID=$((rank % local)) PALS_LOCAL_SIZE=$local \\
    PMIX_RANK=$rank PMIX_NAMESPACE=pals "$@" &
done
wait
"""
"""PALS's `mpiexec --pmi=pmix`, as far as its variables go."""

LMCORE = '#!/bin/bash\nenv -0 > "rank$PALS_RANKID"\nprintf "%s\\n" "$@" > arguments\n'
MODULE = "module() { export ZE_FLAT_DEVICE_HIERARCHY=FLAT CCL_PROCESS_LAUNCHER=pmix; }\n"


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Return the environments of the processes that the page's job script starts, by rank."""
    folder = tmp_path_factory.mktemp("job")
    script = next(block for block in shell_blocks() if "#PBS" in block)
    (folder / "job.sh").write_text(MODULE + script, encoding="utf-8")
    (folder / "nodes").write_text("".join(f"{host}\n" for host in HOSTS), encoding="utf-8")
    binaries = folder / "venv/bin"
    binaries.mkdir(parents=True)
    (binaries / "activate").write_text(f"PATH={binaries}:$PATH\n", encoding="utf-8")
    for name, text in (("mpiexec", MPIEXEC), ("lmcore", LMCORE)):
        (binaries / name).write_text(text, encoding="utf-8")
        (binaries / name).chmod(0o755)
    job = {"PBS_O_WORKDIR": str(folder), "PBS_NODEFILE": str(folder / "nodes"), "PBS_JOBID": "9"}
    env = {"PATH": os.environ["PATH"], **job}
    subprocess.run(["bash", str(folder / "job.sh")], env=env, cwd="/", check=True, timeout=60)
    found = []
    for rank in range(len(list(folder.glob("rank*")))):
        entries = (folder / f"rank{rank}").read_text(encoding="utf-8").split("\0")
        found.append(dict(entry.split("=", 1) for entry in entries if entry))
    assert (folder / "arguments").read_text(encoding="utf-8").startswith("train\n--data-path\n")
    return found


def shell_blocks():
    return re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_job_scripts_processes_find_their_ranks(processes):
    """12 on each of two hosts, the first host as the address, and one port."""
    places = [rank_info(env | translate(env)) for env in processes]
    assert places == [RankInfo(rank, rank % 12, 24, 12) for rank in range(24)]
    addresses = {tuple(sorted(_address(env).items())) for env in processes}
    assert len(addresses) == 1
    assert dict(addresses.pop())["MASTER_ADDR"] == HOSTS[0]


def _address(env):
    return {name: value for name, value in translate(env).items() if name.startswith("MASTER_")}


def test_the_job_scripts_processes_fit_the_modules_oneccl(processes):
    """PMIx started them, as `CCL_PROCESS_LAUNCHER=pmix` needs; a process of `lmcore train` not."""
    for env in processes:
        worker = env | translate(env)
        assert launcher_of(worker, 12) == worker["CCL_PROCESS_LAUNCHER"] == "pmix"
        assert launch_problems(worker) == []
    alone = RankInfo(0, 0, 12, 12).to_env() | {"CCL_PROCESS_LAUNCHER": "pmix"}
    assert launch_problems(alone)
    assert any("unset CCL_PROCESS_LAUNCHER\n" in block for block in shell_blocks())


def test_the_cores_of_the_job_script():
    """A range of eight for each process, none of the system's cores, none twice."""
    ranges = re.search(r"^CORES=list:(\S+)$", PAGE, re.MULTILINE)[1].split(":")
    cores = [range(int(first), int(last) + 1) for first, last in (one.split("-") for one in ranges)]
    listed = [core for one in cores for core in one]
    assert [len(one) for one in cores] == [8] * 12
    assert len(set(listed)) == len(listed)
    assert not {0, 52} & set(listed)
    assert all(core < 52 for one in cores[:6] for core in one)
    assert all(52 < core < 104 for one in cores[6:] for core in one)


def test_the_installation_names_what_lmcore_needs():
    """Every requirement except torch, which the module has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = {re.match(r"[\w-]+", one)[0] for one in project["dependencies"]} - {"torch"}
    (listed,) = re.findall(r"^pip install (?!--)(.*)$", PAGE, re.MULTILINE)
    assert set(listed.split()) == needs
    python = project["requires-python"].removeprefix(">=")
    assert f"lmcore needs Python {python} and torch 2.8 or newer" in PAGE


@pytest.mark.parametrize(
    "text, code, source",
    [
        ("no PMIx server started this process", None, "plugins_xpu/src/lmcore_xpu/launch_env.py"),
        (
            "PALS started this process as rank 3; missing: the number of processes",
            "started this process as {place}; missing: ",
            "lmcore/runtime/launch/scheduler_env.py",
        ),
        ("cannot listen at", "cannot {does} at", "lmcore/runtime/process/join.py"),
        ("device of its own", None, "lmcore/contract/torch_device.py"),
        ("| `aurora` |", '"aurora"', "plugins_xpu/src/lmcore_xpu/doctor_host.py"),
        ("| `run` |", '"run"', "plugins_xpu/src/lmcore_xpu/doctor_host.py"),
        ("| `oneccl launcher` |", '"oneccl launcher"', "plugins_xpu/src/lmcore_xpu/doctor_ccl.py"),
    ],
)
def test_messages_and_checks_exist(text, code, source):
    """The page quotes errors and checks as the code has them."""
    assert text in PAGE
    assert (code or text) in (ROOT / source).read_text(encoding="utf-8")
