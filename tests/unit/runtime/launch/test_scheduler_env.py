"""Other launchers' variables, in torchrun's words."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.base.errors import ConfigError
from lmcore.runtime.launch.launchers import LAUNCHERS, tasks_on_node
from lmcore.runtime.launch.rank import RankInfo, rank_info
from lmcore.runtime.launch.scheduler_env import first_host, translate

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
PALS = {"PMI_RANK": "5", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4"}
INTEL = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "a[03-04]",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}
BATCH = {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NODELIST": "a[03-04]",
    "SLURM_JOB_ID": "77",
}


MVAPICH2 = {
    "MV2_COMM_WORLD_RANK": "5",
    "MV2_COMM_WORLD_SIZE": "8",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "4",
}
MVAPICH3 = {name.replace("MV2", "MVP"): value for name, value in MVAPICH2.items()}
CRAY = {
    "PALS_RANKID": "5",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "4",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "5",
    "JSM_NAMESPACE_SIZE": "8",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "4",
}
FLUX = {
    "FLUX_TASK_RANK": "5",
    "FLUX_JOB_SIZE": "8",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_ID": "f23",
}
OLD_SRUN = BATCH | {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEPID": "0",
}
COMPLETE = {
    "Open MPI": [OPEN_MPI],
    "MVAPICH2": [MVAPICH2, MVAPICH3],
    "LSF's jsrun": [JSRUN],
    "Flux": [FLUX],
    "PALS": [PALS, PALS | {"PALS_RANKID": "5"}, CRAY],
    "MPICH": [INTEL],
    "Slurm's srun": [SRUN, OLD_SRUN, OLD_SRUN | {"SLURM_STEPID": "", "SLURM_GTIDS": "4,5,6,7"}],
    "PMIx": [],  # has only the rank
    "Kubeflow": [],  # numbers nodes: `test_node_place.py`
}
"""Whole environments of the fifth of eight processes, four on each host, by launcher."""
ENVIRONMENTS = [env for environments in COMPLETE.values() for env in environments]


def test_every_launcher_has_a_case() -> None:
    """A launcher that is added gets an environment here, and a line in the documentation."""
    assert [launcher.name for launcher in LAUNCHERS] == list(COMPLETE)
    root = Path(__file__).parents[4]
    text = (root / "docs/reference/environment.md").read_text("utf-8")
    names = [name for one in LAUNCHERS for names in one.variables().values() for name in names]
    further = [name for one in LAUNCHERS for name in (*one.job, *one.hosts)]
    nodes = [one.node for one in LAUNCHERS if one.node is not None]
    further += [name for one in nodes for names in vars(one).values() for name in names]
    assert [name for name in (*names, *further) if f"`{name}`" not in text] == []


@pytest.mark.parametrize(
    "env",
    [
        *ENVIRONMENTS,
        OPEN_MPI | BATCH,
        SRUN | {"PMI_RANK": "5", "PMI_SIZE": "8"},
        SRUN | {"PMIX_RANK": "5", "PMIX_NAMESPACE": "slurm.77.0"},
        FLUX | {"PMI_RANK": "5", "PMI_SIZE": "8"},
        # A launcher within a launcher that started one process.
        SRUN | {name: str(int("SIZE" in name)) for name in OPEN_MPI},
    ],
)
def test_places(env: dict[str, str]) -> None:
    """Each launcher's variables give rank 5 of 8, the second of four on its host."""
    assert rank_info(translate(env)) == RankInfo(5, 1, 8, 4)


def test_the_only_process_of_a_launcher() -> None:
    """A launcher's only process is one that a launcher started."""
    assert translate({name: str(int("SIZE" in name)) for name in OPEN_MPI})["WORLD_SIZE"] == "1"


@pytest.mark.parametrize("env", ENVIRONMENTS)
def test_no_part_of_an_environment_runs_alone(env: dict[str, str]) -> None:
    """Without any of the variables of a rank, the process has its rank all the same, or stops."""
    for left_out in env:
        part = {name: value for name, value in env.items() if name != left_out}
        with contextlib.suppress(ConfigError):
            assert rank_info(translate(part)) == RankInfo(5, 1, 8, 4)


@pytest.mark.parametrize(
    "env",
    [
        {},
        BATCH,
        BATCH | {"SLURM_STEP_ID": "4294967291", "SLURM_GTIDS": "0"},  # the job script's own
        {name: value for name, value in BATCH.items() if name != "SLURM_PROCID"},  # salloc's shell
        SRUN | {"WORLD_SIZE": "1"},
        {"PMI_RANK": "0"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"OMPI_UNIVERSE_SIZE": "8", "PBS_NP": "8", "NSLOTS": "8", "LSB_DJOB_NUMPROC": "8"},
        {"SLURM_ARRAY_TASK_ID": "3", "PBS_ARRAY_INDEX": "3", "SGE_TASK_ID": "3"},
        {"LOW_RANK": "full", "NODE_RANK": "0", "FRANK": "3", "RANKING": "2", "BATCH_SIZE": "8"},
    ],
)
def test_no_launcher(env: dict[str, str]) -> None:
    """A job's script, its resources, an array, the only process, or what WORLD_SIZE says."""
    assert translate(env) == {}


def test_a_job_script_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A process of a job with several tasks that srun did not start says that it runs alone."""
    caplog.set_level("INFO", "lmcore")
    translate(BATCH | {"SLURM_NTASKS": "1"})
    assert caplog.text == ""
    translate(BATCH)
    assert "start it with `srun` for the 8 tasks" in caplog.text


@pytest.mark.parametrize(
    "env",
    [
        {"HOROVOD_RANK": "1"},
        {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"},
        {"MPIRUN_RANK": "3"},
        {"MPIRUN_NPROCS": "2"},
        {"ALPS_APP_PE": "7"},
        {"MP_CHILD": "1"},
        {"PMI_ID": "1"},
        {"NODE_RANK": "1"},
        {"MPI_RANKID": "1"},
        {"NEWCOMER_PROCID": "1"},
        {"NEWCOMER_WORLD_SIZE": "2"},
        {"NEWCOMER_RANK_ID": " 2 "},
    ],
)
def test_an_unknown_launcher(env: dict[str, str]) -> None:
    """A rank above 0 or a number above 1 that nobody understands stops the process."""
    with pytest.raises(ConfigError, match="an unknown launcher started this process") as caught:
        translate(env)
    assert all(f"`{name}=" in str(caught.value) for name in env if env[name] != "0")
    assert "torchrun" in (caught.value.hint or "")
    unset = (caught.value.hint or "").partition("alone, unset ")[2].split(", ")
    assert translate({name: value for name, value in env.items() if name not in unset}) == {}


@pytest.mark.parametrize(
    "env,started,lacks",
    [
        (
            {"PMI_RANK": "5", "PMI_SIZE": "8"},
            "MPICH started this process as one of 8; missing: local rank, local size",
            "none of `PMI_LOCAL_RANK`, `MPI_LOCALRANKID` is set",
        ),
        (PALS | {"PALS_LOCAL_SIZE": ""}, "PALS started .* as one of 8", "`PALS_LOCAL_SIZE` is not"),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": ""},
            "Open MPI started .* as one of 8; missing: local rank",
            "`OMPI_COMM_WORLD_LOCAL_RANK` is not set",
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
            "Slurm's srun started this process as one of 2",
            "`SLURM_LOCALID` is not set",
        ),
        (
            BATCH | {"SLURM_PROCID": "5", "SLURM_LOCALID": "1"},
            "Slurm's srun started this process as rank 5; missing: size, local size",
            "`SLURM_STEP_NUM_TASKS` is not set; `SLURM_STEP_TASKS_PER_NODE` is not set",
        ),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "Open MPI started this process as rank 1", "_SIZE` is not"),
        (
            {"PMIX_RANK": "3"},
            "PMIx started this process as rank 3",
            "has no variable with the size",
        ),
        ({"JSM_NAMESPACE_SIZE": "4"}, "jsrun started .* as one of 4; missing: rank, ", "_RANK`"),
        (FLUX | {"FLUX_JOB_NNODES": ""}, "Flux started .* as one of 8", "FLUX_JOB_NNODES` is not"),
        (
            {"PMI_RANK": "1"} | {name: str(int("SIZE" in name)) for name in OPEN_MPI},
            "MPICH started this process as rank 1",
            "`PMI_SIZE` is not set",
        ),
        ({"SLURM_NODEID": "1"}, "Slurm's srun started this process as one of several", "PROCID"),
    ],
)
def test_half_a_place(env: dict[str, str], started: str, lacks: str) -> None:
    """One of several processes that does not know its place among them is no run by itself."""
    with pytest.raises(ConfigError, match=started) as caught:
        translate(env)
    assert lacks in (caught.value.why or "")
    hint = caught.value.hint or ""
    assert "set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT" in hint
    unset = hint.partition("if this process runs alone, unset ")[2].split(", ")
    rest = translate({name: value for name, value in env.items() if name not in unset})
    assert rank_info(rest) == RankInfo()


PMIX = {"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4", "PALS_APID": "ab"}


def test_a_launcher_that_does_not_tell_the_number() -> None:
    """PALS under PMIx: refused, or with the number that the user sets a place like any other."""
    with pytest.raises(ConfigError, match="rank 5; missing: size") as caught:
        translate(PMIX)
    assert caught.value.why == "`PALS_RANKID=5`; `PMI_SIZE` is not set"
    assert (caught.value.hint or "").startswith("set WORLD_SIZE for all of them")
    env = PMIX | {"WORLD_SIZE": "8"}
    assert rank_info(env | translate(env)) == RankInfo(5, 1, 8, 4)
    assert "MASTER_PORT" in translate(env)
    assert rank_info(translate(PMIX | {"PMI_SIZE": "8"})) == RankInfo(5, 1, 8, 4)
    assert translate({"PALS_RANKID": "0", "PALS_LOCAL_SIZE": "1"}) == {}
    with pytest.raises(ConfigError, match="rank 1; missing: size"):  # one per host
        translate({"PALS_RANKID": "1", "PALS_LOCAL_SIZE": "1"})
    for number in ("8", "x"):
        with pytest.raises(ConfigError, match=f"`WORLD_SIZE=9` contradicts `PMI_SIZE={number}`"):
            translate(PALS | {"WORLD_SIZE": "9", "PMI_SIZE": number})
    other = {"MVP_COMM_WORLD_RANK": "0", "MVP_COMM_WORLD_SIZE": "8"}
    local = {"MVP_COMM_WORLD_LOCAL_RANK": "0", "MVP_COMM_WORLD_LOCAL_SIZE": "8"}
    with pytest.raises(ConfigError, match="contradicts `MVP_COMM_WORLD_SIZE=8`"):
        translate(other | local | {"WORLD_SIZE": "9"})


def test_flux_with_an_uneven_number() -> None:
    """Flux names no number for each node: five processes on two nodes cannot be placed."""
    with pytest.raises(ConfigError, match="do not say how many processes this node has"):
        translate(FLUX | {"FLUX_JOB_SIZE": "5", "FLUX_TASK_RANK": "4"})


def test_addresses(tmp_path: Path) -> None:
    """The first host of the job, and a port that every process derives alike."""
    first = translate(SRUN)
    assert first["MASTER_ADDR"] == "a03"
    other = translate(SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert first["MASTER_PORT"] == other["MASTER_PORT"]
    assert translate(SRUN | {"SLURM_STEP_ID": "1"})["MASTER_PORT"] != first["MASTER_PORT"]
    assert 20000 <= int(first["MASTER_PORT"]) < 32000
    nodes = tmp_path / "nodes"
    nodes.write_text("x1\nx1\nx2\n")
    pbs = translate(PALS | {"PBS_NODEFILE": str(nodes), "PBS_JOBID": "9.pbs"})
    assert pbs["MASTER_ADDR"] == "x1"
    assert "MASTER_PORT" in pbs
    given = translate(SRUN | {"MASTER_ADDR": "h", "MASTER_PORT": "1"})
    assert not given.keys() & {"MASTER_ADDR", "MASTER_PORT"}


def test_one_host() -> None:
    """Processes that share a host find each other there."""
    place = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}
    found = translate(OPEN_MPI | place | {"PMIX_NAMESPACE": "job@1"})
    assert found["MASTER_ADDR"] == "127.0.0.1"
    assert "MASTER_PORT" in found


def test_an_address_that_nobody_knows() -> None:
    """Unknown values are left out; the rendezvous says what is missing."""
    assert not translate(OPEN_MPI).keys() & {"MASTER_ADDR", "MASTER_PORT"}
    in_slurm = {"SLURM_JOB_NODELIST": "a[03-04]"}  # may begin with another host than rank 0's
    for env in (JSRUN, FLUX):
        assert "MASTER_ADDR" not in translate(env | in_slurm)
        one = {name: "4" if value == "8" else value for name, value in env.items()}
        one |= {"FLUX_JOB_NNODES": "1"} if env is FLUX else {}
        one = {name: "3" if value == "5" else value for name, value in one.items()}
        assert translate(one)["MASTER_ADDR"] == "127.0.0.1"
    old = translate(OLD_SRUN)
    assert old["MASTER_ADDR"] == "a03"
    assert "MASTER_PORT" in old


def test_a_node_file_that_is_not_there(tmp_path: Path) -> None:
    """It is an error that names it, not a guess; an empty one is, too."""
    with pytest.raises(ConfigError, match="names no host\nwhy: No such file"):
        translate(PALS | {"PBS_NODEFILE": str(tmp_path / "none")})
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="names no host\nwhy: the file is empty"):
        translate(PALS | {"PBS_NODEFILE": str(tmp_path / "empty")})


@pytest.mark.parametrize("text", ["", "4(x", "four", "4(x2)"])
def test_tasks_that_slurm_does_not_tell(text: str) -> None:
    """The error names the variable without this node's count."""
    env: dict[str, Any] = SRUN | {"SLURM_STEP_TASKS_PER_NODE": text or "?", "SLURM_NODEID": "2"}
    with pytest.raises(ConfigError, match="SLURM_STEP_TASKS_PER_NODE"):
        translate(env)


def test_deepspeeds_launcher_calls_one_variable_otherwise() -> None:
    """LOCAL_SIZE replaces LOCAL_WORLD_SIZE if only this one of torchrun's variables is missing."""
    place = {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    assert translate(place) == {"LOCAL_WORLD_SIZE": "2"}
    assert translate(place | {"LOCAL_WORLD_SIZE": "2"}) == {}


@pytest.mark.parametrize(
    "text, counts", [("4", [4]), ("4(x2),3", [4, 4, 3]), ("1,2(x2)", [1, 2, 2])]
)
def test_tasks_of_each_node(text: str, counts: list[int]) -> None:
    """Counts are repeated as Slurm writes it, and end where the list does."""
    assert [tasks_on_node(text, node) for node in range(len(counts) + 1)] == [*counts, None]


@pytest.mark.parametrize(
    "text, host",
    [
        ("a", "a"),
        ("a[01-04]", "a01"),
        ("a[7,1-3]", "a7"),
        ("node-1,node-2", "node-1"),
        ("node-2,node-[1,3]", "node-2"),
        ("c[09-10]-ib,b2", "c09-ib"),
        ("gpu-[1-2]-[3-4]", "gpu-1-3"),
        ("gpu-[2,4-5]-[003-004,9].x,cpu[1-2]", "gpu-2-003.x"),
        ("r[1-2]c[3-4]n[05-10]", "r1c3n05"),
        ("[10-11]", "10"),
        (" a[1-2] , b ", "a1"),
        ("a[1-999999999999]", "a1"),
    ],
)
def test_first_hosts(text: str, host: str) -> None:
    """The first number of each pair of brackets is the first host's, with its zeros."""
    assert first_host(text) == host


@pytest.mark.parametrize(
    "text",
    ["", "a[", "a[1-]", "a]", "a b", "a[x]", "a[]", "a[1[2]]", "a[1-2-3]", "a,,b", "a,b[1-", "a,"],
)
def test_malformed_nodelists(text: str) -> None:
    """They are errors, even if the first host could be read."""
    with pytest.raises(ConfigError, match="is not a list of hosts"):
        first_host(text)


@given(st.text(max_size=40) | st.text("ab[]-,01", max_size=40))
def test_any_text_ends(text: str) -> None:
    """Any text has a first host without brackets and commas, or is an error."""
    with contextlib.suppress(ConfigError):
        host = first_host(text)
        assert host
        assert not {*host} & {*"[], "}


def test_long_lists_take_linear_time() -> None:
    """A long list is read at once, and one that is malformed at its end is refused at once."""
    begin = time.process_time()
    for long in ("a," * 100_000, "a[1-2]," * 20_000, f"a[{'1,' * 100_000}2],", " a ," * 30_000):
        assert first_host(f"{long}b") in {"a", "a1"}
        with pytest.raises(ConfigError, match=r"\.\.\.`"):
            first_host(f"{long}b[")
    with pytest.raises(ConfigError, match=r"a\.\.\.`"):
        first_host("a" * 100_000 + "[1-" * 1000)
    assert time.process_time() - begin < 2
