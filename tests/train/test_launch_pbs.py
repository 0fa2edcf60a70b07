"""Jobs of `lmcore launch pbs`, run by a stand-in for PBS that executes what is submitted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmcore.cli.main import main

MODEL = (
    *("--num-layers", "1", "--hidden-size", "32", "--num-attention-heads", "2"),
    *("--seq-length", "32", "--micro-batch-size", "1", "--global-batch-size", "2"),
)
QSUB = """#!/bin/bash
file=
while [ $# -gt 0 ]; do
    case $1 in
        -W) echo "$2" >> "$SPOOL/depends"; shift 2 ;;
        *) file=$1; shift ;;
    esac
done
number=$(find "$SPOOL" -name '*.SC' | wc -l)
cat ${file:+"$file"} > "$SPOOL/$((number + 1)).SC"
echo "$((number + 1)).host"
"""
MPIEXEC = '#!/bin/bash\nwhile [ "$1" != lmcore ]; do shift; done\nexec "$@"\n'
RUN = Path("run")


class Pbs:
    """A queue: `qsub` copies a script to the spool, and `run` executes the copies in order."""

    def __init__(self, folder: Path) -> None:
        self.spool = folder / "spool"
        self.spool.mkdir()
        self.programs = folder / "bin"
        self.programs.mkdir()
        self.program("qsub", QSUB)
        self.program("mpiexec", MPIEXEC)
        self.env = {
            **os.environ,
            "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}",
            "SPOOL": str(self.spool),
            "PBS_O_WORKDIR": str(folder),
            "OMP_NUM_THREADS": "1",
        }

    def program(self, name: str, text: str) -> None:
        """Put a program on the path of jobs."""
        path = self.programs / name
        path.write_text(text, "utf-8")
        path.chmod(0o755)

    @property
    def waiting(self) -> list[Path]:
        """The submitted scripts, by number."""
        return sorted(self.spool.glob("*.SC"), key=lambda path: int(path.stem))

    def start(self, number: int) -> subprocess.Popen[str]:
        """Start a job, as PBS does: a copy of the script, by its path."""
        env = {**self.env, "PBS_JOBID": f"{number}.host"}
        words = ["bash", str(self.spool / f"{number}.SC")]
        return subprocess.Popen(
            words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, number: int) -> tuple[int, str]:
        """Run a job to its end; return its exit status and output."""
        job = self.start(number)
        output, _ = job.communicate(timeout=120)
        return job.returncode, output

    def depends(self) -> list[str]:
        """Return what the jobs that jobs submitted wait for."""
        path = self.spool / "depends"
        return path.read_text("utf-8").split() if path.exists() else []


@pytest.fixture
def pbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pbs:
    """Return the queue, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    found = Pbs(tmp_path)
    for name in ("PATH", "SPOOL"):
        monkeypatch.setenv(name, found.env[name])
    return found


def submit(*flags: str, words: tuple[str, ...] = ("--train-iters", "9")) -> None:
    """Submit a job by `lmcore launch pbs`."""
    given = ("--wall-time", "01:00:00", "--requeue", *flags)
    assert main(["launch", "pbs", *given, "--submit", "train", *words, "--save", "run"]) == 0


@pytest.mark.full
def test_a_run_takes_two_jobs(pbs: Pbs) -> None:
    """The first job saves before its time and submits the second, which does the other steps."""
    program = f'#!/bin/sh\nexec {sys.executable} -m lmcore.cli.main "$@"\n'
    pbs.program("lmcore", program)
    # The hour of the first job is over but for a second, in which one step is done.
    late = 'if [ "$PBS_JOBID" = 1.host ]; then SECONDS=3479; fi'
    submit("--before", late, "--env", "LMCORE_PLUGINS=", words=(*MODEL, "--train-iters", "40"))
    status, output = pbs.run(1)
    assert status == 0, output
    summary = json.loads((RUN / "summary.json").read_text("utf-8"))
    assert summary["status"].endswith(" minutes have passed (--exit-duration-in-mins)")
    saved = summary["iteration"]
    assert 1 <= saved < 40
    assert (RUN / "checkpoints" / f"iter_{saved:07d}").is_dir()
    assert pbs.depends() == ["depend=afterany:1.host"]
    status, output = pbs.run(2)
    assert status == 0, output
    assert json.loads((RUN / "summary.json").read_text("utf-8"))["status"] == "completed"
    rows = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 41))
    assert len(pbs.waiting) == 2


LMCORE = """#!/bin/bash
n=$(find run/checkpoints -name 'iter_*' 2>/dev/null | wc -l)
mkdir -p run/checkpoints/iter_000000$((n - 1 + SAVED))
echo "{\\n  \\"status\\": \\"$STATUS\\"\\n}" > run/summary.json
if [ "$HANG" = 1 ]; then echo $$ > hanging; trap '' TERM; exec sleep 60; fi
exit "$CODE"
"""
TIMED = "58 minutes have passed (--exit-duration-in-mins)"


@pytest.mark.parametrize(
    "status, code, saved, flags, jobs, words",
    [
        (TIMED, 0, 1, ("--resubmits", "3"), 4, "submitted again 3 times, not once more"),
        (TIMED, 0, 1, ("--resubmits", "0"), 1, "submitted again 0 times"),
        (TIMED, 0, 0, (), 1, "the job saved no checkpoint in its time"),
        ("completed", 0, 1, (), 1, ""),
        ("stopped early: no lower loss", 0, 1, (), 1, ""),
        ("received SIGTERM", 0, 1, (), 1, ""),
        ("failed: no memory", 3, 0, (), 1, ""),
        ("failed: no memory", 3, 0, ("--restarts", "2"), 3, ""),
        (TIMED, 3, 1, ("--restarts", "1"), 2, ""),
    ],
)
def test_when_a_job_submits_itself(
    pbs: Pbs,
    status: str,
    code: int,
    saved: int,
    flags: tuple[str, ...],
    jobs: int,
    words: str,
) -> None:
    """Only a run that its time has ended continues, and a failed one as often as asked."""
    pbs.program("lmcore", LMCORE)
    pbs.env |= {"STATUS": status, "CODE": str(code), "SAVED": str(saved)}
    (RUN / "checkpoints" / "iter_0000000").mkdir(parents=True)
    submit(*flags)
    done = 0
    while done < len(pbs.waiting):
        assert done < 8
        done += 1
        found, output = pbs.run(done)
        assert found == code
    assert done == jobs
    assert words in output


@pytest.mark.full
@pytest.mark.parametrize("seconds, jobs", [(3500, 2), (0, 1)])
def test_a_job_that_is_killed(pbs: Pbs, seconds: int, jobs: int) -> None:
    """A hanging job that PBS ends at the wall time is continued; `qdel` before ends it."""
    pbs.program("lmcore", LMCORE)
    pbs.env |= {"STATUS": "failed: hung", "CODE": "0", "SAVED": "1", "HANG": "1"}
    submit("--before", f"SECONDS={seconds}")
    job = pbs.start(1)
    deadline = time.monotonic() + 60
    while not Path("hanging").exists() or not Path("hanging").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    began = time.monotonic()
    job.send_signal(signal.SIGTERM)
    assert job.wait(30) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 9  # PBS waits ten seconds by default
    assert len(pbs.waiting) == jobs
    os.kill(int(Path("hanging").read_text()), signal.SIGKILL)
    assert job.stdout is not None
    job.stdout.close()


def test_a_script_that_cannot_be_read(pbs: Pbs) -> None:
    """A shell that gets the script otherwise than by its path says so at the start."""
    pbs.program("lmcore", LMCORE)
    submit()
    env = {**pbs.env, "PBS_JOBID": "1.host"}
    with pbs.waiting[0].open() as script:
        done = subprocess.run(
            ["bash"], stdin=script, env=env, capture_output=True, text=True, check=False
        )
    assert done.returncode == 1
    assert "the job cannot read its script, bash, to submit it again" in done.stderr
    assert not RUN.exists()


@pytest.mark.parametrize(
    "flags, words, message",
    [
        (("--requeue",), ("--save", "run"), "`requeue` needs `wall_time`"),
        (("--requeue", "--wall-time", "01:00:00"), (), "needs a run directory"),
    ],
)
def test_what_a_job_needs_to_submit_itself(
    pbs: Pbs,
    flags: tuple[str, ...],
    words: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The time after which it is submitted again, and where the run's state is."""
    assert main(["launch", "pbs", *flags, "train", "--train-iters", "3", *words]) == 2
    assert message in capsys.readouterr().err
    assert pbs.waiting == []


def test_shellcheck_accepts_the_script(pbs: Pbs) -> None:
    """All lines of a job that submits itself are clean."""
    if (shellcheck := shutil.which("shellcheck")) is None:
        pytest.skip("shellcheck is not installed")
    submit("--restarts", "2")
    done = subprocess.run(
        [shellcheck, "-e", "SC2016", pbs.waiting[0]], capture_output=True, text=True, check=False
    )
    assert done.stdout == ""
