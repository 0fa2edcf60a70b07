"""`lmcore run`: its flags, what precedes a script, and the environment of a script.

Whole messages are recorded in `tests/golden/errors/run_*.txt`; `UPDATE_GOLDEN=1 pytest ...`
rewrites them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from suite import warm

from lmcore.cli.main import main
from lmcore.cli.run import RunSection, _hand_down, _split, _with_flags_at_end
from lmcore.contract import Probe, ProbeState
from lmcore.plugin import Selection

GOLDEN = Path(__file__).parents[2] / "golden/errors"

SHOW = """\
import json, os, sys
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR LMCORE_PLUGIN_OFF".split()
shown = {name: os.environ.get(name) for name in names}
shown["plugin"] = json.loads(os.environ["LMCORE_SELECTION"])["plugin"]
shown["argv"] = sys.argv
print(json.dumps(shown))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, without a launcher's variables, and with no plugin but the CPU's."""
    for name in os.environ:
        if name.startswith(("LMCORE", "SLURM", "PMI")) or name in {"RANK", "WORLD_SIZE"}:
            monkeypatch.delenv(name)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # else lines of two ranks mix
    monkeypatch.setenv("LMCORE_PLUGINS", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lmcore_run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `lmcore run` in a separate process."""
    done: subprocess.CompletedProcess[str] = warm.run(
        [sys.executable, "-m", "lmcore", "run", *words],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done


@pytest.mark.parametrize(
    "line, own, words",
    [
        ("train.py --device x", "", "train.py --device x"),
        ("--nproc-per-node 2 train.py", "--nproc-per-node 2", "train.py"),
        ("--nproc_per_node=2 train.py -h", "--nproc_per_node=2", "train.py -h"),
        ("--plugin-off a --plugin-off b job", "--plugin-off a --plugin-off b", "job"),
        ("--standalone --nnodes 1 job", "--standalone --nnodes 1", "job"),
        ("--device cpu -m pkg.job --x", "--device cpu", "-m pkg.job --x"),
        ("-- -job.py -- a", "", "-job.py -- a"),
        ("--output rank0", "--output rank0", ""),
        ("", "", ""),
    ],
)
def test_flags_precede_the_script(line: str, own: str, words: str) -> None:
    """Each flag takes one value, and everything from the script on is the script's."""
    assert _split(line.split()) == (own.split(), words.split())


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """It shows the order of flags and script."""
    assert main(["run", "--nproc-per-node", "2", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "usage: lmcore run [--flags] SCRIPT [arguments of the script]" in shown
    assert "--output WORD" in shown


CASES = {
    "nothing": "",
    "no_module": "-m",
    "flag_without_value": "--nproc-per-node",
    "no_process": "--nproc-per-node 0 train.py",
    "flag_misspelt": "--devise cpu train.py",
    "flags_among_arguments": "--device cpu train.py a --nproc-per-node 2 --lr 1",
    "flags_among_a_modules": "-m train --nproc_per_node=2 1",
    "no_such_script": "trian.py --lr 1",
    "directory": "--device cpu .",
    "output": "--output some train.py",
    "hosts": "--nnodes 2 --rdzv-endpoint host:29400 train.py",
    "restarts": "--max-restarts 3 train.py",
    "no_such_module": "--device cpu -m package.train",
    "module_of_a_path": "--device cpu -m train.py",
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_usage(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole message is the recorded one; the status is 2."""
    (folder / "train.py").touch()
    if "-m " in CASES[name]:  # changes the environment
        done = lmcore_run(*CASES[name].split())
        status, message = done.returncode, done.stderr
    else:
        status, message = main(["run", *CASES[name].split()]), capsys.readouterr().err
    text = f"$ lmcore run {CASES[name]}\n{message}[exit status {status}]\n"
    golden = GOLDEN / f"run_{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")
    assert status == 2


def test_no_stale_recording() -> None:
    """Every recorded message belongs to a case."""
    assert {path.stem for path in GOLDEN.glob("run_*.txt")} == {f"run_{name}" for name in CASES}


def test_a_syntax_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is shown as Python shows it, once for all processes."""
    (folder / "bad.py").write_text("if x\n")
    assert main(["run", "--nproc-per-node", "3", "bad.py"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f'  File "{folder}/bad.py", line 1\n    if x\n')
    assert shown.endswith("SyntaxError: expected ':'\n")
    assert shown.count("bad.py") == 1


def test_one_process(folder: Path) -> None:
    """The script has a launcher's variables and the choice of the device."""
    (folder / "show.py").write_text(SHOW)
    done = lmcore_run("--nproc-per-node", "1", "--device", "cpu", "show.py", "--device", "x")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "LMCORE_PLUGIN_OFF": None,
        "plugin": "cpu",
        "argv": ["show.py", "--device", "x"],
    }


def test_two_processes(folder: Path) -> None:
    """Workers get the script and its arguments only; what lmcore logs comes once."""
    (folder / "show.py").write_text(SHOW)
    done = lmcore_run("--standalone", "--nproc_per_node=2", "--device", "cpu", "show.py", "-x")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("--standalone") == 1
    lines = sorted(done.stdout.splitlines())
    assert lines[0].startswith("[rank 1] ")
    found = [json.loads(lines[1]), json.loads(lines[0].removeprefix("[rank 1] "))]
    assert [worker["RANK"] for worker in found] == ["0", "1"]
    for worker in found:
        assert (worker["WORLD_SIZE"], worker["plugin"]) == ("2", "cpu")
        assert worker["argv"] == ["show.py", "-x"]


def test_output_of_rank_0_alone(folder: Path) -> None:
    """Standard output of other ranks is dropped if that is wanted; their errors are not."""
    (folder / "a.py").write_text("import sys\nprint('out')\nprint('err', file=sys.stderr)\n")
    done = lmcore_run(*["--output", "rank0", "--nproc-per-node", "2", "--device", "cpu", "a.py"])
    assert done.stdout == "out\n"
    assert sorted(done.stderr.splitlines()) == ["[rank 1] err", "err"]


@pytest.mark.parametrize(
    "line, own, words",
    [
        ("train.py --lr 1 --nproc-per-node 2", "--nproc-per-node 2", "train.py --lr 1"),
        ("a.py --nproc_per_node=2 --device cpu", "--nproc_per_node=2 --device cpu", "a.py"),
        ("--device cpu -m m --nproc-per-node 2", "--device cpu --nproc-per-node 2", "-m m"),
        ("a.py --nproc-per-node 2 --standalone", "--nproc-per-node 2 --standalone", "a.py"),
        ("a.py --device x --nproc-per-node", "--nproc-per-node", "a.py --device x"),
        ("a.py --device x --output all", "", "a.py --device x --output all"),
        ("-- a.py --nproc-per-node 2", "", "a.py --nproc-per-node 2"),
        ("--nproc-per-node 3 a.py --nproc-per-node 2 b", "--nproc-per-node 3", ""),
        ("--nproc-per-node 3 -m m --nproc_per_node=2", "--nproc-per-node 3", ""),
    ],
)
def test_flags_after_the_script(line: str, own: str, words: str) -> None:
    """From `--nproc-per-node` on they are lmcore's, if all of them are and none is before."""
    argv = line.split()
    wanted = words or line.removeprefix(own).strip()
    assert _with_flags_at_end(*_split(argv), argv) == (own.split(), wanted.split())


def test_processes_of_a_flag_after_the_script(folder: Path) -> None:
    """Both workers get the arguments without it; a worker's own arguments stay its own."""
    (folder / "show.py").write_text(SHOW)
    for line in ("show.py -x --nproc-per-node 2 --device cpu", "--nproc-per-node 2 show.py "):
        own = [] if "-x" in line else ["--nproc-per-node", "7"]
        done = lmcore_run(*line.split(), *own)
        assert done.returncode == 0, done.stderr
        found = [json.loads(text.removeprefix("[rank 1] ")) for text in done.stdout.splitlines()]
        assert [worker["WORLD_SIZE"] for worker in found] == ["2", "2"]
        assert [worker["argv"] for worker in found] == [["show.py", *(own or ["-x"])]] * 2


def test_below_another_launcher(folder: Path) -> None:
    """The script runs as the launcher's process; another number of processes is an error."""
    (folder / "show.py").write_text(SHOW)
    slurm = {
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_JOB_ID": "7",
    }
    done = lmcore_run("--device", "cpu", "show.py", **slurm)
    assert json.loads(done.stdout)["RANK"] == "1", done.stderr
    done = lmcore_run("--nproc-per-node", "3", "show.py", **slurm)
    assert done.returncode == 2
    assert "error: `--nproc-per-node 3`: a launcher started 2 here" in done.stderr


def test_plugins_that_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that starts lmcore again leaves them out, too; an unknown name is an error."""
    monkeypatch.setenv("LMCORE_SELECTION", "")
    monkeypatch.setenv("LMCORE_PLUGIN_OFF", "a")
    selection = Selection("cpu", "lmcore", "1", Probe("cpu", ProbeState.PRESENT, 1, 0, ()), "only")
    _hand_down(RunSection(plugin_off=("b", "c")), selection)
    assert os.environ["LMCORE_PLUGIN_OFF"] == "a,b,c"
    assert Selection.from_json(os.environ["LMCORE_SELECTION"]) == selection


def test_a_plugin_that_is_not_installed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It cannot be turned off."""
    (folder / "a.py").touch()
    assert main(["run", "--plugin-off", "nothing", "a.py"]) == 2
    assert "the plugin `nothing`, which is not installed" in capsys.readouterr().err
