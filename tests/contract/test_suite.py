"""The machinery of the test suite itself: the selection, the time limits, and forked programs."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from suite import durations, selection, summary, warm
from suite.durations import Calibration, Limits, Taken
from suite.selection import SHARES, TestSet, is_named, named_tests, share_of, test_set

ROOT = Path(__file__).resolve().parents[2]

LIBRARY = Path(warm.__file__).parents[1]
NAMES = [f"tests/unit/test_{number % 37}.py::test_it[{number}]" for number in range(4000)]


# Which tests run


@pytest.mark.parametrize(
    "text, full, share",
    [("fast", False, None), ("full", True, None), ("fast+0", False, 0), ("fast+19", False, 19)],
)
def test_a_set_is_read_and_printed(text, full, share):
    """A value of the variable comes back as it was written."""
    found = TestSet.parse(text)
    assert found == TestSet(full, share)
    assert str(found) == text


@pytest.mark.parametrize("text", ["Full", "fast+", "fast+20", "fast-1", "full+1", "slow"])
def test_a_wrong_set_is_refused(text):
    """Another value is an error that says what there is."""
    with pytest.raises(pytest.UsageError, match=r"expected `fast`, `full`, or `fast\+N`"):
        TestSet.parse(text)


def test_shares_are_stable_and_about_equal():
    """The share of a test is the same in every process, and no share has much more than others."""
    assert share_of("tests/unit/test_plugins.py::test_it[a]") == 9
    sizes = Counter(map(share_of, NAMES))
    assert sorted(sizes) == list(range(SHARES))
    mean = len(NAMES) / SHARES
    assert all(0.7 * mean < size < 1.3 * mean for size in sizes.values())


def test_all_shares_together_are_the_full_set():
    """Each test of the full set is in exactly one share; the plain fast set has none of them."""
    for name in NAMES[:200]:
        assert sum(TestSet(share=share).takes(name) for share in range(SHARES)) == 1
        assert TestSet(full=True).takes(name)
        assert not TestSet().takes(name)


def test_the_commit_gives_the_share(tmp_path):
    """Without the variable the commit that is checked out decides; without one no share runs."""
    assert TestSet.of_commit("0000001f" + "0" * 32) == TestSet(share=31 % SHARES)
    assert test_set({}, tmp_path) == TestSet()
    assert test_set({"TEST_SET": "fast+3"}, tmp_path) == TestSet(share=3)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert test_set({}, tmp_path) == TestSet()
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    commit = selection.current_commit(tmp_path)
    assert len(commit) == 40
    assert test_set({}, tmp_path) == TestSet(share=int(commit[:8], 16) % SHARES)


@pytest.mark.parametrize(
    "argument, names",
    [
        ("tests/a.py", ()),
        ("tests", ()),
        ("tests/a.py::test_one", ("test_one[x]", "test_one[http://x/../y]")),
        ("tests/a.py::test_one[x]", ("test_one[x]",)),
        ("tests/a.py::test_one[http://x/../y]", ("test_one[http://x/../y]",)),
        ("tests/a.py::Class", ("Class::test_two",)),
        ("./tests/../tests/a.py::test_one[x]", ("test_one[x]",)),
        ("/repository/tests/a.py::test_one[x]", ("test_one[x]",)),
    ],
)
def test_what_is_named(argument, names):
    """A test is named by itself, its function or its class, however the path to it is written."""
    root = Path("/repository")
    everything = ["test_one[x]", "test_one[http://x/../y]", "test_one_more", "Class::test_two"]
    named = named_tests([argument], root, root)
    assert tuple(name for name in everything if is_named(f"tests/a.py::{name}", named)) == names


def test_a_name_is_relative_to_the_folder_pytest_was_started_in():
    """Below the root, paths on the command line are shorter than the paths of the tests."""
    here, root = Path("/repository/tests/unit"), Path("/repository")
    assert named_tests(["test_a.py::test_b"], here, root) == ["tests/unit/test_a.py::test_b"]


# How long they may take


def report(duration, slowness=1.0, outcome="passed", *, full=False):
    facts = [("slowness", slowness), *([("full", True)] if full else [])]
    return SimpleNamespace(duration=duration, user_properties=facts, outcome=outcome)


def test_seconds_of_a_slow_machine_count_less():
    """A test's seconds, of all phases, are divided by how slow the machine was at its end."""
    taken = Taken()
    taken.add(report(1.0, 1.0))
    taken.add(report(8.0, 1.0, "failed"))
    taken.add(report(1.0, 2.0))
    assert (taken.seconds, taken.reference, taken.outcome, taken.full) == (10, 5, "failed", False)


def test_slowness_is_measured_now_and_then():
    """It is the loop's time divided by the reference machine's, measured again after some time."""
    loops = [2 * durations.REFERENCE_LOOP, 3 * durations.REFERENCE_LOOP]
    # Each sample looks at the clock once, and again after a measurement.
    clock = [100.0, 100.0, 100.1, 100.0 + durations.SAMPLE_EVERY, 200.0]
    calibration = Calibration(iter(loops).__next__, iter(clock).__next__)
    assert [calibration.sample() for _ in range(3)] == pytest.approx([2, 2, 2.5])


def test_a_faster_loop_leaves_seconds_as_they_are() -> None:
    """Processes and files are no faster where Python's loops are."""
    assert Calibration(lambda: durations.REFERENCE_LOOP / 2).sample() == 1


def test_budgets_are_of_the_innermost_folder():
    """A test counts for the closest folder with a budget, and one of the full set for none."""
    limits = Limits({"tests": 10.0, "tests/unit": 1.0})
    assert limits.folder_of("tests/unit/data/test_a.py::test_b") == "tests/unit"
    assert limits.folder_of("tests/train/test_a.py::test_b[a/b]") == "tests"
    assert limits.folder_of("plugins/test_a.py::test_b") is None
    taken = {
        "tests/unit/data/test_a.py::test_b": Taken(reference=0.5),
        "tests/unit/test_c.py::test_d": Taken(reference=0.25),
        "tests/unit/test_c.py::test_e": Taken(reference=9.0, full=True),
        "tests/train/test_f.py::test_g": Taken(reference=3.0),
        "plugins/test_a.py::test_b": Taken(reference=7.0),
    }
    assert limits.used(taken) == {"tests/unit": 0.75, "tests": 3.0}


def test_what_exceeds_its_limit_is_named():
    """A sentence each for a test over the limit of one and a folder over twice its budget."""
    limits = Limits({"tests": 11.0, "plugins": 10.0})
    taken = {
        "tests/a.py::test_long": Taken(reference=durations.LONGEST + 1),
        "tests/a.py::test_long_and_full": Taken(reference=100.0, full=True),
        "tests/a.py::test_short": Taken(reference=3.0),
        "c.py::test_slow": Taken(reference=durations.LONGEST_SLOW, slow=True),
        "c.py::test_too_slow": Taken(reference=durations.LONGEST_SLOW + 1, slow=True),
        "plugins/b.py::test_just_so": Taken(reference=durations.LONGEST),
    }
    first, slow, second = limits.exceeded(taken)
    assert slow.startswith("c.py::test_too_slow took 61.0 s, over 60")
    assert first.startswith("tests/a.py::test_long took 21.0 s, over 20")
    assert second.startswith("tests took 24 s, over 2 times its budget of 11")


SESSION = {
    "conftest.py": """
        from suite import durations
        pytest_plugins = ["suite.selection", "suite.durations"]
        durations.LONGEST = 0.2
        durations.calibration_loop = lambda: durations.REFERENCE_LOOP
    """,
    "pytest.ini": """
        [pytest]
        markers =
            full: of the full set
            timeout: time limit
    """,
    "tests/budget.toml": """
        [seconds]
        "tests" = 100
        "tests/sub" = 0.1
    """,
    "tests/test_it.py": """
        import time
        import pytest
        from suite.selection import selected

        def test_quick(): ...

        def test_slow():
            time.sleep(0.25)

        @pytest.mark.full
        def test_full(request):
            time.sleep(0.25)
            assert request.node.get_closest_marker("timeout").args[0] >= 1000

        @pytest.fixture(scope="module")
        def cases(request):
            return selected(request, "case")

        @pytest.mark.parametrize("case", [1, pytest.param(2, marks=pytest.mark.full), 3])
        def test_cases(cases, case):
            print("cases", cases)
            assert case in cases
    """,
    "tests/sub/test_many.py": """
        import time, pytest
        @pytest.mark.parametrize("number", range(3))
        def test_part(number):
            time.sleep(0.09)
    """,
}


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """Return a function that runs a small suite, and gives pytest's status and output."""
    root = tmp_path_factory.mktemp("suite")
    for name, text in SESSION.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        lines = text.strip("\n").splitlines()
        (root / name).write_text("\n".join(line[8:] for line in lines) + "\n", encoding="utf-8")

    def run(*arguments, tests="fast"):
        env = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
        only = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # others' plugins take longer than the tests
        done = warm.run(
            [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
            cwd=root,
            env={**env, **only, "PYTHONPATH": str(LIBRARY), "TEST_SET": tests},
            capture_output=True,
            text=True,
            timeout=100,
        )
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_session_with_a_slow_test_fails(session, tmp_path):
    """The test and the folder are named, though all pass; the record has what each took."""
    workers = ["-p", "xdist", "-n", "1"] if importlib.util.find_spec("xdist") else []
    file = tmp_path / "records" / "small.json"
    status, text = session(*workers, "--record", str(file))
    assert status == 1, text
    assert "7 passed" in text
    assert "tests/test_it.py::test_slow took 0." in text
    assert "tests/sub took 0 s, over 2 times its budget of 0.1" in text
    assert "test_quick took" not in text
    record = json.loads(file.read_text(encoding="utf-8"))
    assert (record["name"], record["set"], record["outcomes"]) == ("small", "fast", {"passed": 7})
    assert len(record["tests"]) == 7
    slow = record["tests"]["tests/test_it.py::test_slow"]
    assert slow["seconds"] == slow["reference"] >= 0.25


@pytest.mark.parametrize(
    "arguments, tests, passed, cases",
    [
        (["tests/test_it.py::test_full", "tests/test_it.py::test_cases[1]"], "fast", 2, [1]),
        (["--no-time-limits"], "fast", 7, [1, 3]),
        ([], "full", 9, [1, 2, 3]),
    ],
    ids=["named", "no limits", "full set"],
)
def test_a_session_that_may_take_its_time(session, arguments, tests, passed, cases):
    """Tests of the full set have no limit, nor have its sessions; fixtures see what is selected."""
    status, text = session("-s", *arguments, tests=tests)
    assert status == 0, text
    assert f"{passed} passed" in text
    assert text.count(f"cases {cases}") == len(cases)


def test_the_tables_of_a_run(tmp_path, capsys):
    """Each environment, each folder with its budget, and the slowest tests have a line."""
    taken = {
        "tests/a.py::test_b": Taken(4.0, 2.0),
        "tests/a.py::test_c": Taken(1.0, 1.0, outcome="failed"),
        "plugins/d.py::test_e": Taken(9.0, 9.0, full=True),
    }
    record = {
        "name": "py",
        "set": "fast+7",
        "seconds": 12.0,
        "slowness": 1.5,
        "outcomes": {"passed": 2, "failed": 1},
        "tests": {name: vars(one) for name, one in taken.items()},
    }
    (head, line) = summary.environments([record])
    assert line.split() == ["py", "fast+7", "2", "1", "0", "12", "14", "1.50"]
    assert head.split()[:2] == ["environment", "set"]
    again = {**record, "tests": {"tests/a.py::test_b": vars(Taken(8.0, 8.0))}}
    lines = summary.folders([record, again], Limits({"tests": 4.0, "plugins": 5.0}))
    assert lines[1].split() == ["tests", "8.0", "4", "*"]
    assert lines[2].startswith("* over its budget")
    assert [one.split()[-1] for one in summary.slowest([record], 2)] == [
        "plugins/d.py::test_e",
        "tests/a.py::test_b",
    ]
    assert summary.main(str(tmp_path)) == 1
    assert "no record" in capsys.readouterr().err
    (tmp_path / "py.json").write_text(json.dumps(record), encoding="utf-8")
    assert summary.main(str(tmp_path)) == 0
    assert "py: plugins/d.py::test_e" in capsys.readouterr().out


# Programs that are forked


def python(*words, **more):
    """Return how a forked program ended, and what it wrote."""
    more = {"capture_output": True, "text": True, "timeout": 100, **more}
    return warm.run([sys.executable, *words], **more)


@pytest.fixture
def asked(monkeypatch):
    """The list of programs that the server was asked for."""
    found = []
    start = warm._Server.start

    def counted(server, order, streams):
        found.append(order["program"])
        return start(server, order, streams)

    monkeypatch.setattr(warm._Server, "start", counted)
    return found


SHOW = """
import json, os, sys
found = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "name": __name__, "path": sys.path[:3],
    "file": globals().get("__file__"), "cwd": os.getcwd(), "env": dict(os.environ),
    "main": sys.modules["__main__"].__name__, "stdin": sys.stdin.read(),
    "streams": [(one.encoding, one.errors, one.line_buffering, one.fileno())
                for one in (sys.stdin, sys.stdout, sys.stderr)],
}
print(json.dumps(found, sort_keys=True))
print("to the other", file=sys.stderr)
"""


@pytest.mark.parametrize(
    "words, safe",
    [
        (["-c", SHOW, "one", "-m", ""], False),
        (["-P", "-c", SHOW], False),
        (["-m", "package.shown", "one", "--two"], False),
        (["-m", "package.shown"], True),
        (["script.py", "one", "-c"], False),
        (["-P", "sub/script.py"], False),
        (["sub/script.py"], False),
        (["sub/script.py"], True),
    ],
    ids=["code", "safe code", "module", "safe module", "script", "safe script", "sub", "safe sub"],
)
def test_a_program_is_started_as_the_interpreter_does(tmp_path, asked, words, safe):
    """Arguments, path, folder, environment, streams and name match an ordinary start."""
    for name in ("package/shown.py", "script.py", "sub/script.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(SHOW, encoding="utf-8")
    env = {name: os.environ[name] for name in os.environ if name.startswith(warm.AT_START)}
    env |= {"PYTHONPATH": f"{tmp_path}:/nonexistent", "LC_ALL": "C.UTF-8", "COLOUR": "gr\u00fcn"}
    env["PYTHONSAFEPATH"] = "1" if safe else ""
    more = {"cwd": tmp_path, "env": env, "input": "given\n"}
    forked = python(*words, **more)
    assert len(asked) == 1
    usual = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, **more
    )
    assert json.loads(forked.stdout) == json.loads(usual.stdout)
    assert forked.stderr == usual.stderr == "to the other\n"


ENDS = {
    "nothing": "pass",
    "status": "import sys; sys.exit(7)",
    "true": "import sys; sys.exit(True)",
    "none": "import sys; sys.exit()",
    "words": "import sys; sys.exit('went wrong')",
    "large status": "import sys; sys.exit(258)",
    "negative status": "import sys; sys.exit(-1)",
    "exception": "def f():\n    raise KeyError('lost')\nf()",
    "interrupted": "raise KeyboardInterrupt",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "terminated": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "crash": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "at once": "import os; print('lost'); os._exit(3)",
    "exit functions": "import atexit; atexit.register(print, 'last'); 1 / 0",
    "a thread": (
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\n"
        "print('main')"
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_program_ends_as_the_interpreter_lets_it(asked, end):
    """Status, signal, traceback, exit functions and what is written at the end are the same."""
    forked = python("-c", ENDS[end])
    assert asked == [["-c", ENDS[end]]]
    usual = subprocess.run(
        [sys.executable, "-c", ENDS[end]], capture_output=True, text=True, check=False
    )
    assert forked.returncode == usual.returncode
    assert forked.stdout == usual.stdout
    assert forked.stderr == usual.stderr


def test_output_that_cannot_be_written_is_a_failure():
    """A full disk at the end of the program gives the usual exit status."""
    more = {"capture_output": False, "env": {**os.environ, "PYTHONUNBUFFERED": ""}}
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = python("-c", "print('lost')", stdout=full, stderr=subprocess.PIPE, **more)
    assert done.returncode == 120
    assert "No space left" in done.stderr


def test_a_program_is_a_child_of_this_process(asked):
    """Its id and its parent's are what they say, and its end can be waited for."""
    code = "import os, sys; print(os.getpid(), os.getppid(), os.getpgrp(), 'torch' in sys.modules)"
    with warm.WarmPopen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as one:
        found = os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)
        assert found is not None
        assert one.poll() == 0
        out = one.stdout.read()
    assert out.split() == [*map(str, (one.pid, os.getpid(), os.getpgrp())), "True"]
    assert len(asked) == 1


def test_a_session_of_its_own():
    """`start_new_session` makes the program the leader of a session."""
    code = "import os; print(os.getsid(0) == os.getpgrp() == os.getpid())"
    assert python("-c", code, start_new_session=True).stdout == "True\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_comes(number):
    """A running program gets the signals that it is sent, Ctrl-C as an exception."""
    code = "import time\nprint('ready', flush=True)\ntime.sleep(100)"
    command = [sys.executable, "-c", code]
    with warm.WarmPopen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as one:
        assert one.stdout.readline() == b"ready\n"
        assert one.poll() is None
        one.send_signal(number)
        _, err = one.communicate(timeout=100)
    assert one.returncode == -number
    assert err.endswith(b"KeyboardInterrupt\n") == (number == signal.SIGINT)


def test_time_that_is_over():
    """`run` ends the program at its time limit."""
    begin = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        python("-c", "import time; time.sleep(100)", timeout=0.3)
    assert time.monotonic() - begin < 50


def test_a_status_that_is_checked():
    """`check` makes a failure an exception."""
    with pytest.raises(subprocess.CalledProcessError) as error:
        python("-c", "import sys; sys.exit(5)", check=True)
    assert error.value.returncode == 5


@pytest.mark.parametrize("unbuffered, shown", [("1", "a\nb\n"), ("", "b\n")])
def test_streams_together_and_unbuffered(unbuffered, shown):
    """Standard error goes where output goes if asked; nothing waits where that is asked for."""
    code = "import os, sys; print('a'); print('b', file=sys.stderr); os._exit(0)"
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    merged = {"capture_output": False, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    assert python("-c", code, env=env, **merged).stdout == shown


def test_programs_draw_different_numbers():
    """Generators that seed themselves do so in each program."""
    code = "import random, numpy, uuid; print(random.random(), numpy.random.rand(), uuid.uuid4())"
    first, second = (python("-c", code).stdout.split() for _ in range(2))
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_programs_started_at_the_same_time():
    """Threads that start programs get each its own."""
    found = {}

    def start(number):
        found[number] = python("-c", f"print({number})").stdout

    threads = [threading.Thread(target=start, args=(number,)) for number in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert found == {number: f"{number}\n" for number in range(6)}


@pytest.mark.parametrize(
    "words, more, env",
    [
        (["-c", "pass"], {"preexec_fn": lambda: None}, {}),
        (["-c", "pass"], {"close_fds": False}, {}),
        (["-c", "pass"], {"umask": 0o77}, {}),
        (["-W", "error", "-c", "pass"], {}, {}),
        (["-X", "dev", "-c", "pass"], {}, {}),
        (["--version"], {}, {}),
        (["-c", "pass"], {}, {"PYTHONHASHSEED": "5"}),
        (["-c", "pass"], {}, {"PYTHONWARNINGS": "error"}),
        (["-c", "pass"], {}, {"LD_LIBRARY_PATH": "/nonexistent"}),
        (["-c", "pass"], {}, {"OMP_NUM_THREADS": "2"}),
    ],
)
def test_what_a_fork_cannot_give_is_started_as_usual(asked, words, more, env):
    """Options and variables that only a new interpreter heeds get one."""
    done = python(*words, env={**os.environ, **env}, **more)
    assert done.returncode == 0, done.stderr
    assert not asked


def test_a_folder_that_does_not_exist_is_an_error_here(tmp_path, asked):
    """It is raised by the start, and no program is left."""
    with pytest.raises(FileNotFoundError):
        python("-c", "pass", cwd=tmp_path / "nowhere")
    assert not asked


def test_the_module_has_the_rest_of_subprocess():
    """The stand-in for the module starts programs by forking, and has its constants."""
    assert warm.SUBPROCESS.Popen is warm.WarmPopen
    assert warm.SUBPROCESS.PIPE == subprocess.PIPE
    assert warm.SUBPROCESS.TimeoutExpired is subprocess.TimeoutExpired


# The budget file


def test_every_folder_of_tests_has_a_budget():
    """Each test file counts towards its folder's budget, not towards the budget of all tests."""
    limits = Limits.read(ROOT / "tests/budget.toml")
    roots = [ROOT / "tests", *ROOT.glob("plugins*")]
    files = [file.relative_to(ROOT) for root in roots for file in root.rglob("test_*.py")]
    files = [file for file in files if "template" not in file.parts]
    assert len(files) > 300
    assert [str(file) for file in files if limits.folder_of(f"{file}::test") is None] == []


def test_every_budget_is_of_a_folder():
    """A folder that was renamed or removed leaves no budget behind."""
    limits = Limits.read(ROOT / "tests/budget.toml")
    assert [folder for folder in limits.folders if not (ROOT / folder).is_dir()] == []
