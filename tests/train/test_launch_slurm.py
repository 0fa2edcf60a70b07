"""Jobs of `lmcore launch slurm` under Slurm: munged, slurmctld and slurmd on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmcore.cli.main import main

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
MODEL = (
    *("--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2"),
    *("--seq-length", "32", "--micro-batch-size", "1", "--global-batch-size", "2"),
)


@dataclass
class Slurm:
    """A cluster of one node."""

    folder: Path
    env: dict[str, str]

    def output(self, *words: str) -> str:
        """Return the standard output of a command of Slurm."""
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, check=True)
        return done.stdout

    def state(self, job: str) -> dict[str, str]:
        """Return the fields of a job."""
        text = self.output("scontrol", "show", "job", "--oneliner", job)
        return dict(part.split("=", 1) for part in text.split() if "=" in part)


def free_ports(count: int) -> list[int]:
    """Return ports that are free now."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in found]


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 90) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.3)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Start Slurm's programs; skip where they are not installed or cannot start."""
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"Slurm is not installed (Debian: slurm-wlm, munge): {', '.join(missing)}")
    if os.getuid() != 0:
        pytest.skip("slurmd starts jobs as root only")
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    key = folder / "munge.key-file"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    host = socket.gethostname().partition(".")[0]
    control, node = free_ports(2)
    (folder / "slurm.conf").write_text(
        f"""ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmdPort={node}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
""",
        "utf-8",
    )
    env = {**os.environ, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}
    names = ("key-file", "socket", "pid-file", "log-file", "seed-file")
    munge = [f"--{name}={folder}/munge.{name}" for name in names]
    programs = [
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D", "-i"],
        ["slurmd", "-D", "-N", host],
    ]
    with contextlib.ExitStack() as stack:
        for words in programs:
            log = stack.enter_context((folder / f"{words[0]}.out").open("w", encoding="utf-8"))
            process = subprocess.Popen(
                words, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            stack.callback(end, process)
            time.sleep(1)
        found = Slurm(folder, env)
        deadline = time.monotonic() + 30
        while True:
            done = subprocess.run(
                ["sinfo", "-h", "-o", "%T"], env=env, capture_output=True, text=True, check=False
            )
            if done.stdout.strip() == "idle":
                break
            if time.monotonic() > deadline:
                pytest.skip(f"Slurm does not start here: {done.stdout}{done.stderr}")
            time.sleep(0.5)
        yield found
        subprocess.run(["scancel", "--user=root"], env=env, check=False)
        time.sleep(1)


def end(process: subprocess.Popen[str]) -> None:
    """End a program of Slurm."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def submit(
    slurm: Slurm, folder: Path, capfd: pytest.CaptureFixture[str], *words: str, **keys: object
) -> str:
    """Submit a job by `lmcore launch slurm`; return its number."""
    program = folder / "bin" / "lmcore"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m lmcore.cli.main "$@"\n', "utf-8")
    program.chmod(0o755)
    profile = {
        "job_name": "a b",
        "processes_per_node": 2,
        "wall_time": "00:10:00",
        "before": [f'export PATH={program.parent}:"$PATH"'],
        "env": ["OMP_NUM_THREADS=1", "LMCORE_PLUGINS="],
        **keys,
    }
    Path("p.yaml").write_text(json.dumps(profile), "utf-8")  # which is YAML
    capfd.readouterr()
    assert main(["launch", "slurm", "--profile", "p.yaml", "--submit", "train", *words]) == 0
    number = capfd.readouterr().out.split()[-1]
    assert slurm.state(number)["JobName"] == "a"  # `a b`, split at the space
    return number


def start_requeued(slurm: Slurm, job: str) -> None:
    """Start a requeued job before the two minutes that Slurm waits.

    The node refuses the second start of a job in the seconds of its first end.
    """
    wait_for(lambda: slurm.state(job)["JobState"] == "PENDING", "the end of the first start")
    time.sleep(5)
    slurm.output("scontrol", "update", f"JobId={job}", "StartTime=now")


@pytest.fixture
def folder(tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory of a test, where Slurm's commands find their cluster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_CONF", slurm.env["SLURM_CONF"])
    return tmp_path


def rows(run: Path) -> list[int]:
    """Return the steps of a run so far."""
    try:
        text = (run / "metrics.jsonl").read_text("utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line)["step"] for line in text.splitlines() if '"loss"' in line]


def summary(run: Path) -> dict[str, object]:
    """Return the summary of a run; empty if there is none."""
    path = run / "summary.json"
    found: dict[str, object] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found


def test_a_requeued_job_continues_the_run(
    slurm: Slurm, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The signal before the wall time saves and requeues; the job then continues to the end."""
    run = folder / "run's directory"
    words = (*MODEL, "--train-iters", "1500", "--save", str(run))
    job = submit(slurm, folder, capfd, *words, requeue=True)
    wait_for(lambda: len(rows(run)) > 5, "the first steps")
    # What Slurm itself sends at the time of `--signal=B:USR1@120`.
    slurm.output("scancel", "--batch", "--signal=USR1", job)
    wait_for(lambda: slurm.state(job).get("Restarts") == "1", "the requeue")
    assert summary(run)["status"] == "received SIGUSR1"
    saved = summary(run)["iteration"]
    assert isinstance(saved, int)
    assert 5 < saved < 1500
    start_requeued(slurm, job)
    wait_for(lambda: summary(run).get("status") == "completed", "the rest of the run", 120)
    assert rows(run) == list(range(1, 1501))
    assert "world_size: 2" in (run / "config.yaml").read_text("utf-8")
    wait_for(lambda: slurm.state(job)["JobState"] == "COMPLETED", "the end of the job")
    assert slurm.state(job)["Restarts"] == "1"


def test_a_job_that_fails_is_requeued_as_often_as_asked(
    slurm: Slurm, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A failure requeues the job once with `restarts: 1`, and then ends it."""
    words = (*MODEL, "--train-iters", "3", "--save", "run", "--data-path", "absent")
    job = submit(slurm, folder, capfd, *words, restarts=1)
    wait_for(lambda: slurm.state(job).get("Restarts") == "1", "the requeue")
    start_requeued(slurm, job)
    wait_for(lambda: slurm.state(job)["JobState"] == "FAILED", "the end of the job")
    assert slurm.state(job)["Restarts"] == "1"
    assert "absent" in Path(f"slurm-{job}.out").read_text("utf-8")


def test_slurm_signals_before_the_wall_time(
    slurm: Slurm, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Slurm sends the signal of the script in time; without `requeue` the job then ends."""
    run = folder / "run"
    words = (*MODEL, "--train-iters", "100000", "--save", str(run))
    job = submit(slurm, folder, capfd, *words, wall_time="00:02:00", save_seconds=60)
    wait_for(lambda: summary(run).get("status") == "received SIGUSR1", "the signal", 180)
    wait_for(lambda: slurm.state(job)["JobState"] == "COMPLETED", "the end of the job")
    assert "Restarts=0" in slurm.output("scontrol", "show", "job", job)
