"""The launcher: ranks, what is shown of failures, signals, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lmcore.base.durable import process_token
from lmcore.base.errors import DataError, OtherRankError, RunError
from lmcore.base.signals import end_word
from lmcore.runtime.launch.launcher import _remove_abandoned, launch
from lmcore.runtime.launch.worker_protocol import (
    LAUNCHED,
    LaunchInfo,
    Report,
    launch_info,
    read_report,
    report_error,
)

ENV = {name: value for name, value in os.environ.items() if not name.startswith("LMCORE")}


def run(
    script: str,
    size: int = 2,
    failed: Any = lambda _: None,
    *,
    dialogue: bool = False,
    **env: str,
) -> int:
    """Launch a script that finds `rank`, `os`, `sys` and `time`."""
    head = "import os, sys, time, signal\nrank = int(os.environ['RANK'])\n"
    command = [sys.executable, "-c", head + textwrap.dedent(script)]
    return launch(command, size, {**ENV, **env}, dialogue=dialogue, failed=failed)


def wait_for_handler(number: signal.Signals) -> None:
    """Wait until the launcher handles a signal: before, it would end this process, the tests'."""
    while signal.getsignal(number) in {signal.SIG_DFL, signal.default_int_handler}:
        time.sleep(0.01)


def test_places(tmp_path: Path) -> None:
    """Each process gets its place, and all the same address and secret of the store."""
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT LMCORE_LAUNCHED"
    script = f"""
        import json
        found = {{name: os.environ[name] for name in "{names}".split()}}
        from lmcore.runtime.store import StoreClient
        info = json.loads(found["LMCORE_LAUNCHED"])
        assert info["launcher"] == os.getppid()
        secret = bytes.fromhex(info["secret"])
        store = StoreClient("127.0.0.1", info["store_port"], secret, timeout=60.0)
        found["here"] = store.add("here", 1)
        open(os.path.join({str(tmp_path)!r}, str(rank)), "w").write(json.dumps(found))
    """
    assert run(script, 3) == 0
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert [one["RANK"] for one in found] == [one["LOCAL_RANK"] for one in found] == ["0", "1", "2"]
    assert {one["WORLD_SIZE"] + one["LOCAL_WORLD_SIZE"] for one in found} == {"33"}
    assert len({(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in found}) == 1
    assert sorted(one["here"] for one in found) == [1, 2, 3]
    (secret,) = {json.loads(one["LMCORE_LAUNCHED"])["secret"] for one in found}
    assert secret not in repr(LaunchInfo(secret=secret))


def test_the_store_is_rank_0s(tmp_path: Path) -> None:
    """A variable of an earlier torchrun does not make every process wait for its store."""
    script = f"""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE"):
            open(f"{tmp_path}/{{rank}}", "w").close()
    """
    assert run(script, TORCHELASTIC_USE_AGENT_STORE="True") == 0
    assert list(tmp_path.iterdir()) == []


def test_output(capfd: pytest.CaptureFixture[str]) -> None:
    """Rank 0 prints as it is; of the others only standard error is shown, line by line, marked."""
    assert run("print('out', rank); print('err', rank, file=sys.stderr)") == 0
    shown = capfd.readouterr()
    assert shown.out == "out 0\n"
    assert sorted(shown.err.splitlines()) == ["[rank 1] err 1", "err 0"]


def test_output_of_all_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    """Each line of another rank has its rank; of a progress bar its last state is shown."""
    script = """
        import os, sys
        rank = os.environ["RANK"]
        print("out", rank)
        sys.stderr.write("1/3\\r2/3\\r3/3\\n" if rank == "1" else "")
        sys.stdout.write("at the end" if rank == "1" else "")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    assert launch(command, 2, ENV, all_output=True) == 0
    shown = capfd.readouterr()
    assert sorted(shown.out.splitlines()) == ["[rank 1] at the end", "[rank 1] out 1", "out 0"]
    assert shown.err == "[rank 1] 3/3\n"


def test_standard_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rank 0 has the launcher's, the others none; each worker leads a new session."""
    (tmp_path / "in").write_text("an answer")
    script = f"""
        assert os.getsid(0) == os.getpid()
        open(os.path.join({str(tmp_path)!r}, str(rank)), "w").write(sys.stdin.read())
    """
    before = os.dup(0)
    try:
        with (tmp_path / "in").open("rb") as stream:
            os.dup2(stream.fileno(), 0)
        assert run(script) == 0
    finally:
        os.dup2(before, 0)
        os.close(before)
    assert [(tmp_path / name).read_text() for name in "01"] == ["an answer", ""]


def test_the_port_for_a_store_of_torchs() -> None:
    """A server that sets SO_REUSEADDR can listen at MASTER_PORT while the launcher reserves it."""
    script = """
        import socket
        if rank == 0:
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            socket.create_server(address).close()  # sets SO_REUSEADDR
    """
    assert run(script) == 0


def test_the_first_failure_counts(capfd: pytest.CaptureFixture[str]) -> None:
    """Its error is shown whole; what the others say because of it is one line."""
    script = """
        from lmcore.base.errors import DataError, OtherRankError
        from lmcore.runtime.launch.worker_protocol import report_error
        if rank == 1:
            time.sleep(0.3)
            error = DataError("the corpus is cut off", hint="mend it")
        else:
            error = OtherRankError("rank 1 stopped the run", why="it says: the corpus is cut off")
        raise SystemExit(report_error(error, os.environ).status)
    """
    assert run(script, 3) == 1
    assert capfd.readouterr().err == (
        "error: the corpus is cut off\n\nhint: mend it\n\nfrom rank 1 of 3\n"
        "  ranks 0, 2: stopped because of it\n"
    )


def test_other_failures_are_short(capfd: pytest.CaptureFixture[str]) -> None:
    """Of another rank's traceback the last line is shown."""
    script = """
        from lmcore.runtime.launch.worker_protocol import report_error
        time.sleep(0.2 * rank)
        try:
            raise ValueError(f"bad data {rank}")
        except ValueError as error:
            status = report_error(error, os.environ).status
        time.sleep(0.5)
        raise SystemExit(status)
    """
    assert run(script) == 1
    assert capfd.readouterr().err.endswith(
        "ValueError: bad data 0\n\nfrom rank 0 of 2\n  rank 1: ValueError: bad data 1\n"
    )


def test_the_same_failure(capfd: pytest.CaptureFixture[str]) -> None:
    """An error that all ranks report is shown once, with its exit status."""
    script = """
        from lmcore.base.errors import ConfigError
        from lmcore.runtime.launch.worker_protocol import report_error
        raise SystemExit(report_error(ConfigError("no such flag"), os.environ).status)
    """
    assert run(script, 3) == 2
    shown = capfd.readouterr().err
    assert shown.count("no such flag") == 1
    assert "all 3 ranks report the same error" in shown


def test_killed(capfd: pytest.CaptureFixture[str]) -> None:
    """A process that dies is the cause, whatever another one meets because of it."""
    script = """
        from lmcore.runtime.launch.worker_protocol import report_error
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit(report_error(RuntimeError("the pipe broke"), os.environ).status)
    """
    assert run(script) == 1
    shown = capfd.readouterr().err
    assert shown.startswith("error: rank 1 of 2 was killed by SIGKILL\nwhy: most often the kernel")
    assert "  rank 0: " in shown


SUMMARY = """
    import json
    from pathlib import Path
    from lmcore.base.errors import DataError, OtherRankError
    from lmcore.runtime.launch.worker_protocol import name_summary, report_error
    summary = Path({path!r})
    if rank == 0:
        name_summary(summary, os.environ)
        summary.write_text(json.dumps({{"status": "failed: RuntimeError: closed by peer", "n": 4}}))
        raise SystemExit(report_error(RuntimeError("closed by peer"), os.environ).status)
    {rank_1}
"""


@pytest.mark.parametrize(
    "rank_1, status",
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 of 2 was killed by SIGKILL"),
        ("sys.exit(7)", "rank 1 of 2 ended with exit status 7, without an error message"),
        ("time.sleep(0.3)", "RuntimeError: closed by peer"),
    ],
)
def test_the_summary_has_the_first_failure(tmp_path: Path, rank_1: str, status: str) -> None:
    """Rank 0 wrote what it met; the launcher knows which rank failed first."""
    path = tmp_path / "summary.json"
    assert run(SUMMARY.format(path=str(path), rank_1=rank_1)) == 1
    assert json.loads(path.read_text()) == {"status": f"failed: {status}", "n": 4}


ROW = {"step": 7, "consumed_samples": 28, "consumed_tokens": 448, "skipped_iterations": 1}
COUNTS = {"iteration": 7} | {key: value for key, value in ROW.items() if key != "step"}


@pytest.mark.parametrize(
    "rows, counts", [(json.dumps(ROW) + "\n", COUNTS), (json.dumps(ROW) + "\n{", COUNTS), ("", {})]
)
def test_the_summary_of_a_killed_rank_0(tmp_path: Path, rows: str, counts: Any) -> None:
    """The launcher writes the first failure and the counts of the last row."""
    (tmp_path / "metrics.jsonl").write_text(rows)
    path = tmp_path / "summary.json"
    script = f"""
        from pathlib import Path
        from lmcore.runtime.launch.worker_protocol import name_summary
        if rank == 0:
            name_summary(Path({str(path)!r}), os.environ)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    directories: list[Path] = []
    assert run(script, failed=directories.append) == 1
    assert directories == [tmp_path]
    assert run("time.sleep(0.01); sys.exit(3)", failed=directories.append) == 1
    assert directories == [tmp_path], "training had not begun"
    status = "failed: rank 0 of 2 was killed by SIGKILL"
    assert json.loads(path.read_text()) == {"status": status, **counts}


def test_the_others_are_ended(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process that waits for a dead one is ended, together with its children."""
    monkeypatch.setattr("lmcore.runtime.launch.launcher._GRACE_SECONDS", 0.5)
    script = f"""
        if rank == 0:
            import subprocess
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
            time.sleep(600)
        while not os.path.exists({str(tmp_path / "child")!r}):
            time.sleep(0.01)
        sys.exit(3)
    """
    begin = time.monotonic()
    assert run(script) == 1
    assert time.monotonic() - begin < 20
    shown = capfd.readouterr().err
    assert "rank 1 of 2 ended with exit status 3, without an error message" in shown
    assert "  rank 0: still running; terminated" in shown
    child = int((tmp_path / "child").read_text())
    end = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and time.monotonic() < end:
        if Path(f"/proc/{child}/stat").read_text().split()[2] == "Z":
            break
        time.sleep(0.02)
    else:
        assert not Path(f"/proc/{child}").exists()


def test_signals_are_passed_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A signal to the launcher comes to each process once; the launcher waits for them."""
    script = f"""
        heard = []
        signal.signal(signal.SIGINT, lambda *_: heard.append(1))
        open(os.path.join({str(tmp_path)!r}, str(rank)), "w").close()
        end = time.monotonic() + 30
        while not heard and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.3)
        print(len(heard), file=sys.stderr)
        raise SystemExit(130)
    """

    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        wait_for_handler(signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    assert run(script) == 130
    assert sorted(capfd.readouterr().err.splitlines()) == ["1", "[rank 1] 1", "interrupted"]


def test_interrupts_of_a_dialogue(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes to rank 0 alone, and any number of them does not end the run."""
    monkeypatch.setattr("lmcore.runtime.launch.launcher._GRACE_SECONDS", 0.0)
    monkeypatch.setattr("lmcore.runtime.launch.launcher.SAME_SIGNAL_SECONDS", 0.0)
    script = f"""
        heard = []
        signal.signal(signal.SIGINT, lambda *_: heard.append(1))
        def write(name):
            open(os.path.join({str(tmp_path)!r}, name), "w").close()
        write(f"begun{{rank}}")
        end = time.monotonic() + 30
        while rank == 0 and len(heard) < 3 and time.monotonic() < end:
            time.sleep(0.01)
            write(f"heard{{len(heard)}}")
        if rank == 0:
            write("ended")
        while not os.path.exists(os.path.join({str(tmp_path)!r}, "ended")):
            time.sleep(0.01)
        print(len(heard), file=sys.stderr)
    """

    def interrupt() -> None:
        while not all((tmp_path / f"begun{rank}").exists() for rank in range(2)):
            time.sleep(0.01)
        wait_for_handler(signal.SIGINT)
        for number in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            while not (tmp_path / f"heard{number + 1}").exists():
                time.sleep(0.01)

    threading.Thread(target=interrupt, daemon=True).start()
    assert run(script, dialogue=True) == 0
    assert sorted(capfd.readouterr().err.splitlines()) == ["3", "[rank 1] 0"]


@pytest.mark.parametrize(
    "number, status, word",
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
@pytest.mark.parametrize("times", [1, 2])
def test_ended_by_signals(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    status: int,
    word: str,
    times: int,
) -> None:
    """One signal ends processes that do not handle it, two signals also hanging ones; no error."""
    monkeypatch.setattr("lmcore.runtime.launch.launcher._GRACE_SECONDS", 0.5)
    monkeypatch.setattr("lmcore.runtime.launch.launcher.SAME_SIGNAL_SECONDS", 0.05)
    script = f"""
        handler = signal.SIG_IGN if {times} == 2 else signal.SIG_DFL
        signal.signal(signal.SIGINT, handler)
        signal.signal(signal.SIGTERM, handler)
        open(os.path.join({str(tmp_path)!r}, str(rank)), "w").close()
        time.sleep(60)
    """

    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        wait_for_handler(number)
        for _ in range(times):
            time.sleep(0.1)
            os.kill(os.getpid(), number)

    start = time.monotonic()
    threading.Thread(target=interrupt).start()
    assert run(script) == status
    assert time.monotonic() - start < 30
    assert capfd.readouterr().err == f"{word}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_process(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    """It ends the other processes, too, at once; the run was not at fault."""
    script = f"""
        open(os.path.join({str(tmp_path)!r}, str(rank)), "w").close()
        while len(os.listdir({str(tmp_path)!r})) < 2:
            time.sleep(0.01)
        if rank == 1:
            os.kill(os.getpid(), {int(number)})
        time.sleep(60)
    """
    monkeypatch.setattr("lmcore.runtime.launch.launcher._GRACE_SECONDS", 600.0)
    start = time.monotonic()
    assert run(script) == 128 + number
    assert time.monotonic() - start < 30
    assert capfd.readouterr().err == f"{end_word(number)}\n"


_RAISES = """try:
                raise ValueError("broken")
            except ValueError as error:
                sys.exit(report_error(error, os.environ).status)"""


@pytest.mark.parametrize(
    "end, what",
    [
        ("sys.exit(3)", "rank 1 of 2 ended with exit status 3, without an error message"),
        (_RAISES, "ValueError: broken"),
    ],
)
def test_a_process_that_fails_before_it_connects(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, end: str, what: str
) -> None:
    """The launcher reports its end to the processes that wait for it at the store."""
    script = f"""
        import json
        from lmcore.runtime.launch.worker_protocol import report_error
        if rank == 1:
            {end}
        from lmcore.runtime.store import StoreClient
        info = json.loads(os.environ["LMCORE_LAUNCHED"])
        secret = bytes.fromhex(info["secret"])
        store = StoreClient("127.0.0.1", info["store_port"], secret, timeout=60.0)
        assert store.wait(["never"], 60.0, stop=["failed"]) is False
        print(json.loads(store.get("failed"))["what"], file=sys.stderr)
    """
    monkeypatch.setattr("lmcore.runtime.launch.launcher._GRACE_SECONDS", 600.0)
    start = time.monotonic()
    assert run(script) == 1
    assert time.monotonic() - start < 30
    assert capfd.readouterr().err.splitlines()[0] == what


def test_what_cannot_be_started(tmp_path: Path) -> None:
    """A program that is not there is an error, not a traceback."""
    with pytest.raises(RunError, match="process 1 of 2 cannot be started") as caught:
        launch([str(tmp_path / "nothing")], 2, ENV)
    assert "No such file" in str(caught.value.why)


def test_reports(tmp_path: Path) -> None:
    """A worker's error comes to the launcher as it is; of a bug its traceback."""
    env = LaunchInfo(str(tmp_path / "0.json"), "5e").to_env()
    assert launch_info(env) == LaunchInfo(str(tmp_path / "0.json"), "5e")
    assert launch_info({}) == LaunchInfo()
    for stale in ("x", "[]", '{"report_file": 5}', '{"report_file": "/nowhere/0.json"}'):
        assert launch_info({LAUNCHED: stale}) == LaunchInfo()
    told = report_error(OtherRankError("rank 1 stopped the run"), env)
    assert read_report(tmp_path / "0.json") == told
    assert (told.secondary, told.status) == (True, 1)
    assert not Report.of(DataError("cut off")).secondary
    with pytest.raises(KeyError) as caught:
        json.loads("{}")["x"]
    assert Report.of(caught.value).text.startswith("Traceback (most recent call last)")
    assert read_report(tmp_path / "1.json") is None


def test_folders_of_killed_launchers_are_removed(tmp_path: Path):
    """Folders of dead processes of this machine go, all others stay."""
    place, _, random = process_token().split("-")
    dead = tmp_path / f"lmcore-launch-{place}-{2**22 + 1}-{random}-abcdefgh"
    others = [
        tmp_path / f"lmcore-launch-{place}-{os.getppid()}-{random}-abcdefgh",
        tmp_path / f"lmcore-launch-00000000-{2**22 + 1}-{random}-abcdefgh",
        tmp_path / "lmcore-launch-abcdefgh",
    ]
    for path in (dead, *others):
        path.mkdir()
    _remove_abandoned(tmp_path)
    assert not dead.exists()
    assert all(path.is_dir() for path in others)
