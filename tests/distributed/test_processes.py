"""Several processes: connected, agreeing, differing, failing, dying and late."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from suite import warm

from lmcore.plugin import discover, select
from lmcore.plugin.selection import HANDED_DOWN

WORKER = Path(__file__).parent / "worker.py"

pytestmark = pytest.mark.distributed


def with_site(folder):
    """Return the PYTHONPATH of a process that has the distributions of *folder*, too."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def test_processes_that_agree_work_together(start):
    """Ranks reduce over the device's backend, gather values, and leave no process group behind."""
    for rank, ended in enumerate(start("work")):
        assert ended.status == 0, ended.errors
        assert ended.printed == [
            {"backend": "gloo", "sum": [3.0, 3.0, 3.0]},
            {"member": rank == 0},
            ["from 0", "from 1"],
            {"destroyed": True},
        ]
        assert not ended.errors


def test_torchruns_processes_find_each_other():
    """The environment variables and the store of torchrun are enough."""
    chosen = select(discover(env={}), requested="cpu", env={})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = warm.run(
        [*command, "--nproc-per-node", "2", str(WORKER), "work", "30"],
        env={**os.environ, HANDED_DOWN: chosen.to_json(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('["from 0", "from 1"]') == 2


def test_a_difference_stops_every_rank(start):
    """All show the same difference and exit with 1."""
    for ended in start("settle"):
        assert ended.status == 1
        assert "differ in colour\nwhy: rank 0: red\n     rank 1: blue" in ended.errors


def test_a_rank_with_other_plugins_stops_the_run(start, chip, monkeypatch):
    """The launcher chose a plugin that rank 1 has switched off."""
    site = chip("1.0")
    monkeypatch.syspath_prepend(site)
    chosen = select(discover(env={}), requested="cpu", env={})
    assert chosen.plugin == "chip"

    def env(rank):
        common = {"PYTHONPATH": with_site(site), HANDED_DOWN: chosen.to_json()}
        return common | ({"LMCORE_PLUGINS": ""} if rank == 1 else {})

    for ended in start("work", env):
        assert ended.status == 2
        assert "rank 1 cannot use device `cpu`, which the launcher chose" in ended.errors
        assert "`LMCORE_PLUGINS` leaves it out" in ended.errors
        assert not ended.printed


def test_a_rank_with_another_version_shows_both_evidences(start, chip, monkeypatch):
    """Every rank's message shows what the launcher saw and what rank 1 sees."""
    old, new = chip("1.0"), chip("2.0")
    monkeypatch.syspath_prepend(old)
    chosen = select(discover(env={}), requested="cpu", env={})

    def env(rank):
        return {
            "PYTHONPATH": with_site(new if rank == 1 else old),
            "CHIP_EVIDENCE": f"chip of rank {rank}",
            HANDED_DOWN: chosen.to_json(),
        }

    for ended in start("work", env):
        assert ended.status == 2
        assert "launcher: `chip` (lmcore-chip 1.0)" in ended.errors
        assert "launcher: a chip on the bus" in ended.errors
        assert "here: `chip` (lmcore-chip 2.0) present" in ended.errors
        assert "here: chip of rank 1" in ended.errors


def test_a_backend_that_cannot_be_made_known_stops_the_run(start, chip, monkeypatch):
    """The rank shows its plugin's error, and the other rank is notified at once."""
    site = chip("1.0")
    monkeypatch.syspath_prepend(site)
    chosen = select(discover(env={}), requested="cpu", env={})

    def env(rank):
        common = {"PYTHONPATH": with_site(site), HANDED_DOWN: chosen.to_json()}
        return common | ({"CHIP_REGISTER": "fails"} if rank == 1 else {})

    first, second = start("work", env, timeout=60.0)
    assert "`gloo` cannot be registered with torch" in second.errors
    assert "OSError: libchip.so is missing" in second.errors
    assert first.status == second.status == 1
    assert "rank 1 stopped the run" in first.errors
    assert first.seconds < 30


def test_other_kernels_stop_the_run(start):
    """The op, its case and the choice of each rank are named."""

    def env(rank):
        return {"KERNELS": "attention=reference"} if rank == 1 else {}

    for ended in start("work", env):
        assert ended.status == 1
        assert "differ in the kernels that their model runs" in ended.errors
        assert "op `attention` (cpu, float32, dropout 0.0, head_dim 8):" in ended.errors
        assert "rank 1: `reference` of `lmcore`; not `" in ended.errors


def test_a_rank_that_fails_is_heard_at_once(start):
    """The other one does not wait for its timeout, and repeats the words."""
    first, second = start("refuse", timeout=60.0)
    assert (first.status, second.status) == (1, 1)
    assert "error: the corpus is cut off" in second.errors
    assert "rank 1 stopped the run\nwhy: it says: the corpus is cut off" in first.errors
    assert first.seconds < 30


@pytest.mark.parametrize(
    "victim, words",
    [(1, "rank 1 did not answer within 2 s"), (0, "the connection to rank 0 is lost")],
)
def test_a_rank_that_is_killed_is_named(start, victim, words):
    """The other one ends within the timeout and says who is missing."""
    found = start("die", lambda rank: {"VICTIM": str(victim)}, timeout=2.0)
    assert found[victim].status == -signal.SIGKILL
    survivor = found[1 - victim]
    assert survivor.status == 1, survivor.errors
    assert words in survivor.errors
    assert survivor.seconds < 30


def test_every_group_has_the_runs_timeout(start):
    """A reduction that a rank misses ends after it, also in a group that was made later."""
    first, _ = start("lag", timeout=1.5)
    waited = [line["waited"] for line in first.printed if "waited" in line]
    assert len(waited) == 2, first.errors
    assert waited[0] < 5
    assert waited[1] < 5
