"""A script runs as Python runs it, and its end is reported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError
from lmcore.runtime.launch.rank import RankInfo
from lmcore.runtime.launch.script import Script
from lmcore.runtime.launch.worker_protocol import LaunchInfo, Report, read_report

SHOW = """\
'''A script.'''
from __future__ import annotations
import json, pickle, sys, __main__
class Thing: pass
x: int = 1
shown = {name: str(value) for name, value in sorted(globals().items()) if name != "Thing"}
shown |= {"argv": sys.argv, "path": sys.path[0], "is_main": vars(__main__) is globals()}
shown["pickled"] = type(pickle.loads(pickle.dumps(Thing()))).__name__
print(json.dumps(shown))
"""
EXECUTE = """\
import os, sys
from lmcore.runtime.launch.script import Script, execute
is_module, name, *arguments = sys.argv[1:]
sys.exit(execute(Script(name, tuple(arguments), is_module == "-m"), os.environ))
"""


def run(command: list[str], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python in *folder*, which counts as it does for a user: without PYTHONSAFEPATH."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**variables, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def without_addresses(printed: str) -> object:
    return json.loads(re.sub("0x[0-9a-f]+", "0x", printed))


@pytest.mark.parametrize(
    "words",
    [["a/show.py"], ["./a/../link.py"], ["-m", "a.show"], ["-m", "a"]],
    ids=["script", "link", "module", "package"],
)
def test_as_python_runs_it(tmp_path: Path, words: list[str]) -> None:
    """Globals of `__main__`, arguments and the first entry of the path equal `python`'s."""
    (tmp_path / "a").mkdir()
    for name in ("show.py", "__main__.py"):
        (tmp_path / "a" / name).write_text(SHOW)
    (tmp_path / "link.py").symlink_to("a/show.py")
    kind = [] if words[0] == "-m" else ["--"]
    expected = run([*words, "--x", "1"], tmp_path)
    found = run(["-c", EXECUTE, *kind, *words, "--x", "1"], tmp_path)
    assert found.stderr == expected.stderr == ""
    assert without_addresses(found.stdout) == without_addresses(expected.stdout)


def test_processes_that_a_script_starts(tmp_path: Path) -> None:
    """A pool of new processes finds the functions of the script."""
    (tmp_path / "pool.py").write_text(
        "import multiprocessing\n"
        "def square(x):\n    return x * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(square, [3]))\n"
    )
    done = run(["-c", EXECUTE, "--", "pool.py"], tmp_path)
    assert (done.stdout, done.stderr) == ("[9]\n", "")


def test_tracebacks_begin_in_the_script(tmp_path: Path) -> None:
    """An uncaught exception is printed as by Python."""
    (tmp_path / "bad.py").write_text("def f():\n    1 / 0\n\nf()\n")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/__init__.py").write_text("import nothing.at_all\n")
    expected = run(["bad.py"], tmp_path)
    found = run(["-c", EXECUTE, "--", "bad.py"], tmp_path)
    assert found.stderr == expected.stderr
    assert found.returncode == expected.returncode == 1
    found = run(["-c", EXECUTE, "-m", "b.main"], tmp_path)
    assert found.stderr.splitlines()[1].endswith('b/__init__.py", line 1, in <module>')
    assert "No module named 'nothing'" in found.stderr


@pytest.mark.parametrize(
    "script, what, hint",
    [
        (Script("trian.py"), "there is no script `trian.py`", "did you mean `train.py`?"),
        (Script("train"), "there is no script `train`", "did you mean `train.py`?"),
        (Script("other"), "there is no script `other`", "options of `lmcore run` precede"),
        (Script("."), "`.` is a directory", "by `-m`"),
        (Script("train.py", is_module=True), "`-m train.py`: this is not", "without `-m`"),
        (Script("no.such", is_module=True), "no Python module `no.such`", "PYTHONPATH"),
        (Script("json", is_module=True), "no Python module `json.__main__`", "PYTHONPATH"),
        (Script("a..b", is_module=True), "no Python module `a..b`", "PYTHONPATH"),
    ],
)
def test_what_cannot_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Script, what: str, hint: str
) -> None:
    """The error names the script or module, and the nearest script of the folder."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigError) as caught:
        script.load()
    assert what in caught.value.what
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize("text", [b"if x\n", b"x = '\0'\n", b"# coding: nothing\n"])
def test_text_that_is_not_python(tmp_path: Path, text: bytes) -> None:
    """It is found before a process is started."""
    (tmp_path / "a.py").write_bytes(text)
    with pytest.raises((SyntaxError, ValueError)):
        Script(str(tmp_path / "a.py")).check()


def report_of(source: str, folder: Path, *, rank: int = 0) -> tuple[int, str, Report | None]:
    """Return status, standard error and report of a script in a process of lmcore's launcher."""
    (folder / "job.py").write_text(source)
    info = LaunchInfo(str(folder / "0.json"), launcher=os.getpid())
    env = {**info.to_env(), **RankInfo(rank, rank, 2, 2).to_env()}
    done = run(["-c", EXECUTE, "--", "job.py"], folder, **env)
    return done.returncode, done.stderr, read_report(folder / "0.json")


LMCORE = "from lmcore.runtime.launch.rank import rank_info\nrank_info({'RANK': 'x'})\n"
HOOK = "import sys\nsys.excepthook = lambda *_: (print('hook'), print('x', file=sys.stderr))\n"


@pytest.mark.parametrize(
    "source, status, text",
    [
        (
            "import sys\nsys.exit(3)",
            3,
            "error: `job.py` ended with exit status 3\nat: job.py",
        ),
        ("import sys\nsys.exit(-1)", 255, "error: `job.py` ended with exit status 255"),
        ("import sys\nsys.exit('no data')", 1, "no data"),
        ("import sys\nsys.exit(['no', 'data'])", 1, "['no', 'data']"),
        ("raise MemoryError", 1, "Traceback (most recent call last):"),
        (HOOK + "1 / 0", 1, "Traceback (most recent call last):"),
        (LMCORE, 2, "error: `RANK=x` is not a number of processes or a rank\nat: job.py, line 2: "),
    ],
)
def test_reports(tmp_path: Path, source: str, status: int, text: str) -> None:
    """The launcher gets the text and the exit status; the process itself prints no error."""
    ended, printed, report = report_of(source, tmp_path)
    assert (ended, printed) == (status, "")
    assert report is not None
    assert report.status == status
    assert report.text.startswith(text)
    assert not report.secondary
    assert "lmcore/runtime/launch/script.py" not in report.text


def test_reports_of_effects(tmp_path: Path) -> None:
    """A collective that fails because its other side has ended is not the cause."""
    message = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4273"
    _, _, report = report_of(f"raise RuntimeError({message!r})", tmp_path)
    assert report is not None
    assert report.secondary


@pytest.mark.parametrize("code, status", [("0", 0), ("", 0), ("128 + 15", 143)])
def test_what_is_not_reported(tmp_path: Path, code: str, status: int) -> None:
    """An exit with status 0 is no error; a signal, after which a script exits, is named once."""
    assert report_of(f"import sys\nsys.exit({code})", tmp_path) == (status, "", None)


def test_programs_of_a_worker_are_no_workers(tmp_path: Path) -> None:
    """A program that a worker starts prints its error, and leaves the worker's report alone."""
    command = f"[sys.executable, '-c', {EXECUTE!r}, '--', 'bad.py']"
    inner = f"import subprocess, sys\nsubprocess.run({command})"
    (tmp_path / "bad.py").write_text("1 / 0\n")
    status, printed, report = report_of(inner, tmp_path)
    assert (status, report) == (0, None)
    assert printed.endswith("ZeroDivisionError: division by zero\n")
