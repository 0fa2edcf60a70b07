"""Other launchers' variables, in torchrun's words."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.errors import ConfigError
from lmcore.runtime.launch.rank import RankInfo, rank_info
from lmcore.runtime.launch.scheduler_env import expand_nodelist, tasks_on_node, translate

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


@pytest.mark.parametrize(
    "env",
    [OPEN_MPI, PALS, INTEL, SRUN, OPEN_MPI | BATCH, SRUN | {"PMI_RANK": "5", "PMI_SIZE": "8"}],
)
def test_places(env: dict[str, str]) -> None:
    """Each launcher's variables give rank 5 of 8, the second of four on its host."""
    assert rank_info(translate(env)) == RankInfo(5, 1, 8, 4)


@pytest.mark.parametrize(
    "env",
    [{}, BATCH, {"OMPI_COMM_WORLD_RANK": "1"}, SRUN | {"WORLD_SIZE": "1"}, {"PMI_RANK": "0"}],
)
def test_no_launcher(env: dict[str, str]) -> None:
    """A job's script, a variable that is left over, or what torchrun's words say: nothing."""
    assert translate(env) == {}


@pytest.mark.parametrize(
    "env,lacks",
    [
        ({"PMI_RANK": "5", "PMI_SIZE": "8"}, "`PALS_LOCAL_RANKID`, `PMI_LOCAL_RANK`"),
        (PALS | {"PALS_LOCAL_SIZE": ""}, "none of `PALS_LOCAL_SIZE`, `PMI_LOCAL_SIZE`"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": ""}, "`OMPI_COMM_WORLD_LOCAL_RANK` is not set"),
    ],
)
def test_half_a_place(env: dict[str, str], lacks: str) -> None:
    """One of several processes that does not know its host's others is no run by itself."""
    with pytest.raises(ConfigError, match="as one of 8, without its rank") as caught:
        translate(env)
    assert lacks in (caught.value.why or "")
    assert "set WORLD_SIZE, RANK, LOCAL_WORLD_SIZE and LOCAL_RANK" in (caught.value.hint or "")
    assert translate(env | {"PMI_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "1"}) == {}


PMIX = {"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4", "PALS_APID": "ab"}


def test_a_launcher_that_does_not_tell_the_number() -> None:
    """PALS under PMIx: refused, or with the number that the user sets a place like any other."""
    with pytest.raises(ConfigError, match="rank 5 of a run, without the number") as caught:
        translate(PMIX)
    assert caught.value.why == "`PMI_SIZE` is not set, as under PMIx"
    assert (caught.value.hint or "").startswith("set WORLD_SIZE for all of them")
    env = PMIX | {"WORLD_SIZE": "8"}
    assert rank_info(env | translate(env)) == RankInfo(5, 1, 8, 4)
    assert "MASTER_PORT" in translate(env)
    assert rank_info(translate(PMIX | {"PMI_SIZE": "8"})) == RankInfo(5, 1, 8, 4)
    assert translate({"PALS_RANKID": "0", "PALS_LOCAL_SIZE": "1"}) == {}
    with pytest.raises(ConfigError, match="rank 1 of a run, without the number"):  # one per host
        translate({"PALS_RANKID": "1", "PALS_LOCAL_SIZE": "1"})
    with pytest.raises(ConfigError, match="`WORLD_SIZE=9`: a launcher started 8 processes"):
        translate(PALS | {"WORLD_SIZE": "9"})


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


def test_a_node_file_that_is_not_there(tmp_path: Path) -> None:
    """It is an error that names it, not a guess."""
    with pytest.raises(ConfigError, match="names no host"):
        translate(PALS | {"PBS_NODEFILE": str(tmp_path / "none")})


@pytest.mark.parametrize("text", ["", "4(x", "four", "4(x2)"])
def test_tasks_that_slurm_does_not_tell(text: str) -> None:
    """The error names the variable without this node's count."""
    env: dict[str, Any] = SRUN | {"SLURM_STEP_TASKS_PER_NODE": text or "?", "SLURM_NODEID": "2"}
    with pytest.raises(ConfigError, match="SLURM_STEP_TASKS_PER_NODE"):
        translate(env)


@pytest.mark.parametrize(
    "text, counts", [("4", [4]), ("4(x2),3", [4, 4, 3]), ("1,2(x2)", [1, 2, 2])]
)
def test_tasks_of_each_node(text: str, counts: list[int]) -> None:
    """Counts are repeated as Slurm writes it, and end where the list does."""
    assert [tasks_on_node(text, node) for node in range(len(counts) + 1)] == [*counts, None]


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("a", ["a"]),
        ("a[01-04]", ["a01", "a02", "a03", "a04"]),
        ("node-1,node-2", ["node-1", "node-2"]),
        ("a[1,3-4],b2,c[09-10]-ib", ["a1", "a3", "a4", "b2", "c09-ib", "c10-ib"]),
    ],
)
def test_nodelists(text: str, hosts: list[str]) -> None:
    """Slurm's short forms are written out, with leading zeros."""
    assert list(expand_nodelist(text)) == hosts


@pytest.mark.parametrize(
    "text", ["", "a[", "a[1-]", "a[2-1]", "a[1-999999999]", "a b", "a[x]", "a,,b"]
)
def test_malformed_nodelists(text: str) -> None:
    """They are errors, and never many hosts."""
    with pytest.raises(ConfigError, match="is not a list of hosts"):
        list(expand_nodelist(text))


@given(st.text(max_size=40))
def test_any_text_ends(text: str) -> None:
    """Any text is a list of hosts or an error."""
    with contextlib.suppress(ConfigError):
        assert all(list(expand_nodelist(text)))


def test_deepspeeds_launcher_calls_one_variable_otherwise() -> None:
    """LOCAL_SIZE replaces LOCAL_WORLD_SIZE if only this one of torchrun's variables is missing."""
    place = {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    assert translate(place) == {"LOCAL_WORLD_SIZE": "2"}
    assert translate(place | {"LOCAL_WORLD_SIZE": "2"}) == {}
