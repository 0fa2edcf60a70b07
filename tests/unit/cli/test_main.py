"""The console entry: commands, exit statuses, and what a failure looks like."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError, RunError
from lmcore.cli import commands
from lmcore.cli import main as entry
from lmcore.cli.commands import known_commands
from lmcore.cli.main import main
from lmcore.model.checkpoint_format import CheckpointFormat, formats
from lmcore.model.command import Command
from lmcore.plugin import registrations

SCRIPT = "import sys; from lmcore.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[list[str]], int]], None]:
    """Install a function as `lmcore try`."""

    def install(run: Callable[[list[str]], int]) -> None:
        module = types.ModuleType("try_command")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "try_command", module)
        monkeypatch.setattr(
            commands, "COMMANDS", {"a": (Command("try", "Try.", "try_command:run"),)}
        )

    return install


def test_help_lists_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No argument, `--help` and `help` list every command with its line, on stdout, status 0."""
    monkeypatch.setenv("COLUMNS", "100")
    texts = []
    for argv in ([], ["--help"], ["-h"], ["help"]):
        assert main(argv) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1
    for one in known_commands().values():
        assert f"  {one.name:<12}{one.summary}\n" in texts[0]


def test_help_of_a_command(
    command: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """`lmcore help try` is `lmcore try --help`."""
    command(lambda argv: print(argv) or 0)
    assert main(["help", "try"]) == 0
    assert capsys.readouterr().out == "['--help']\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` prints the name and the version."""
    assert main(["--version"]) == 0
    name, version = capsys.readouterr().out.split()
    assert name == "lmcore"
    assert version[0].isdigit()


def test_arguments_and_status_pass(command: Callable[..., None]) -> None:
    """The command gets the arguments after its name; its status is the program's."""
    seen: list[list[str]] = []
    command(lambda argv: seen.append(argv) or 7)
    assert main(["try", "--x", "1"]) == 7
    assert seen == [["--x", "1"]]


@pytest.mark.parametrize(
    "argv,message",
    [
        (["trian"], "error: unknown command `trian`\n\nhint: did you mean `train`? known: "),
        (["--lr", "1"], "error: unknown flag `--lr` before a command\n\nhint: `lmcore --help`"),
    ],
)
def test_unknown_command(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt command names the nearest one; status 2."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(message)


@pytest.mark.parametrize(
    "error,status",
    [(ConfigError("bad", why="w", hint="h"), 2), (RunError("bad", why="w", hint="h"), 1)],
)
def test_expected_errors_are_messages(
    command: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    status: int,
) -> None:
    """An expected error is printed on stderr without a traceback; its kind gives the status."""

    def fail(argv: list[str]) -> int:
        raise error

    command(fail)
    assert main(["try"]) == status
    captured = capsys.readouterr()
    assert captured.err == "error: bad\nwhy: w\n\nhint: h\n"
    assert captured.out == ""


def test_bugs_keep_their_traceback(command: Callable[..., None]) -> None:
    """Unexpected exceptions are not caught."""

    def fail(argv: list[str]) -> int:
        raise ZeroDivisionError

    command(fail)
    with pytest.raises(ZeroDivisionError):
        main(["try"])


def test_another_broken_pipe_is_a_failure() -> None:
    """A pipe that breaks elsewhere is not taken for a closed stdout."""
    broken = SCRIPT.replace("sys.exit(", "import lmcore.cli.config as c; c.run = fail; sys.exit(")
    definition = "def fail(argv): raise BrokenPipeError('worker')\n"
    run = subprocess.run(
        [sys.executable, "-c", definition + broken, "config", "show"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "BrokenPipeError: worker" in run.stderr


def test_a_path_that_is_too_deep(
    command: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Directories that Python cannot make are an error of the path; other recursion is a bug."""

    def make(argv: list[str]) -> int:
        tmp_path.joinpath("d/" * 1500).mkdir(parents=True)
        return 0

    def endless(argv: list[str]) -> int:
        return endless(argv)

    command(make)
    assert main(["try"]) == 1
    assert "a path has too many directories" in capsys.readouterr().err
    command(endless)
    with pytest.raises(RecursionError):
        main(["try"])


def test_interrupt(command: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    """Control-C ends with status 130 and no traceback."""

    def wait(argv: list[str]) -> int:
        raise KeyboardInterrupt

    command(wait)
    assert main(["try"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_help_exits_with_success(command: Callable[..., None]) -> None:
    """A command that has printed its help has succeeded."""

    def helped(argv: list[str]) -> int:
        raise SystemExit(0)

    command(helped)
    assert main(["try", "--help"]) == 0


@pytest.mark.parametrize("command", ["config show", "plugins", "ops list", "doctor"])
def test_closed_pipe_is_quiet(command: str) -> None:
    """`lmcore config show | head -0` ends without a complaint, and with one status."""
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, *command.split()],
        stdout=writer,
        stderr=subprocess.PIPE,
        env=os.environ | {"LMCORE_PLUGINS": ""},
        check=False,
    )
    os.close(writer)
    assert run.stderr in {b"", b"using the CPU: no accelerator plugin is installed\n"}
    assert run.returncode == 141


def test_a_launchers_rank_before_the_command_is_passed_over(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """DeepSpeed's launcher puts it there; the rank itself is read from the environment."""
    assert main(["--local_rank=3", "--version"]) == 0
    assert capsys.readouterr().out.startswith("lmcore ")
    assert main(["--local_rank", "--version"]) == 2


@pytest.mark.parametrize("command", ["", "train", "config show", "data", "data split", "ops"])
def test_help_fits_a_narrow_terminal(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No line exceeds 60 columns, but examples of commands, which are copied whole."""
    monkeypatch.setenv("COLUMNS", "60")
    assert main([*command.split(), "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 60 and not line.startswith("  lmcore ")] == []


@pytest.mark.parametrize("argv", [["--version"], ["config", "show"], ["data", "corpora"]])
def test_full_output_device_is_one_line(argv: list[str]) -> None:
    """Standard output on a full disk ends a command with one line and status 1."""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *argv],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "error: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize(
    "argv, status",
    [(["checkpoint", "inspect", "."], 2), (["train"], 2), (["--version"], 0), (["data", "-h"], 0)],
)
def test_a_current_directory_that_was_removed(argv: list[str], status: int, tmp_path: Path) -> None:
    """It is named; MKL would end the process with a message about torch's own file."""
    done = subprocess.run(
        [sys.executable, "-c", f"import os; os.rmdir(os.getcwd()); {SCRIPT}", *argv],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert ("error: the current directory does not exist any more" in done.stderr) == (status == 2)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("argv, status", [(["config", "show"], 0), (["config", "show", "--x"], 2)])
def test_a_closed_standard_stream_changes_no_status(
    closed: str, argv: list[str], status: int
) -> None:
    """A command whose standard streams are closed works, and prints to the null device."""
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", SCRIPT, *argv],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr


def test_a_path_that_is_not_unicode_is_printed(tmp_path: Path) -> None:
    """A command that has done its work does not fail at the name of its output."""
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
    prefix = os.fsdecode(os.fsencode(tmp_path) + b"/o\xff")
    argv = ["data", "prepare", "--input", str(tmp_path / "x.jsonl"), "--output-prefix", prefix]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *argv, "--tokenizer-type", "ByteTokenizer"],
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},  # as in most locales
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "o\\udcff_text_document" in done.stdout


def test_no_file_gets_the_descriptor_of_a_closed_stream() -> None:
    """Output of a library to a closed standard error never ends up in another file."""
    script = (
        "import sys; from lmcore.cli import main; main.main(['--version']);"
        " sys.exit(open('/dev/zero').fileno() <= 2)"
    )
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-c", script], check=False
    )
    assert done.returncode == 0


@pytest.mark.parametrize("error", [OSError(28, "full"), OSError(28, "full", "/data/x")])
def test_other_full_disk_keeps_its_traceback(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An `OSError` of another file is not taken for one of standard output."""
    monkeypatch.setattr(entry, "_start", lambda arguments: (_ for _ in ()).throw(error))
    with pytest.raises(OSError, match="full"):
        main(["try"])


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENAMETOOLONG, errno.ELOOP])
def test_a_path_that_the_system_refuses_is_a_message(
    number: int,
    command: Callable[[Callable[[list[str]], int]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A directory that may not be searched is the user's to fix, wherever a command meets it."""

    def refused(_arguments: list[str]) -> int:
        raise OSError(number, os.strerror(number), "closed/run")

    command(refused)
    assert main(["try"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: cannot use `closed/run`\nwhy: {os.strerror(number)}")


def test_memory_error_is_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A `MemoryError` that no command explains is a message with status 1."""

    def run(name: str, arguments: list[str]) -> int:
        raise MemoryError("Unable to allocate 14.9 GiB")

    monkeypatch.setattr(entry, "_run", run)
    assert main(["try"]) == 1
    assert "not enough memory on the host\nwhy: Unable to allocate" in capsys.readouterr().err


def test_an_interrupt_while_python_ends(tmp_path: Path) -> None:
    """The second Ctrl-C ends the program at once, without a traceback of the interpreter."""
    code = """
import atexit, os, signal, sys
from lmcore.cli import main
def interrupted(_arguments):
    raise KeyboardInterrupt
main._start = interrupted
atexit.register(os.kill, os.getpid(), signal.SIGINT)
sys.argv = ["lmcore", "train"]
sys.exit(main.main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr == "interrupted\n"


def test_a_command_leaves_no_records_of_its_plugins(
    command: Callable[[Callable[[list[str]], int]], None],
) -> None:
    """A program that runs several commands has the core's formats after each of them."""
    ours = CheckpointFormat("ours", title="Ours", described="", matches=lambda _: False, read="a:b")

    def run(_arguments: list[str]) -> int:
        registrations._keep("lmcore_add_formats", formats(), {"ours": ours})
        return 0 if "ours" in formats() else 1

    command(run)
    before = dict(formats())
    assert main(["try"]) == 0
    assert formats() == before
