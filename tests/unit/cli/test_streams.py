"""Standard streams whose reader ends, and encodings that lack characters."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from model_states import GPT2, RandomState

from lmcore.cli.streams import outlive_readers
from lmcore.conversion.native.write import write_lmcore
from lmcore.data.tokenizer import ByteTokenizer

PRINT = """
import sys, lmcore.cli.config as command
from lmcore.cli.main import main
def run(argv):
    print("a \\ufffd \\u00fc \\udcfc")
    print("b \\u2581", file=sys.stderr)
    return 0
command.run = run
sys.exit(main(["config", "show"]))
"""


C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""Variables of a process whose standard streams and arguments are ASCII."""


def stream_to(file: int) -> io.TextIOWrapper:
    """Return a stream as Python opens standard output."""
    return io.TextIOWrapper(io.BufferedWriter(io.FileIO(file, "w")), encoding="utf-8")


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_reader_that_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines reach the reader until it ends, and are dropped afterwards, by subprocesses too."""
    reader, writer = os.pipe()
    with stream_to(writer) as stream:
        monkeypatch.setattr(sys, name, stream)
        print("before", file=stream)
        with outlive_readers():
            outliving = getattr(sys, name)
            print("one", file=outliving, flush=True)
            assert os.read(reader, 99) == b"before\none\n"
            os.close(reader)
            print("two", file=outliving, flush=True)
            outliving.buffer.write(b"three\n" * 100_000)
            done = subprocess.run(["echo", "four"], stdout=outliving, check=False)
            assert done.returncode == 0
        assert getattr(sys, name) is stream
        print("five", file=stream, flush=True)


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that cannot be written are an error; messages are not."""
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stderr", full)
        with outlive_readers():
            print("message", file=sys.stderr, flush=True)
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(OSError, match="No space left"), outlive_readers():
            print("result")
        assert sys.stdout is full


def test_streams_that_are_no_files_stay(capsys: pytest.CaptureFixture[str]) -> None:
    """Output that a program captures is left to it."""
    before = sys.stdout
    with outlive_readers():
        assert sys.stdout is before
        print("x")
    assert capsys.readouterr().out == "x\n"


@pytest.mark.parametrize(
    "variables, printed",
    [
        (
            C_LOCALE,
            rb"a \ufffd \xfc " + b"\xfc",
        ),
        ({"PYTHONIOENCODING": "ascii"}, rb"a \ufffd \xfc \udcfc"),
        ({"PYTHONIOENCODING": "latin-1"}, rb"a \ufffd " + b"\xfc " + rb"\udcfc"),
        ({"PYTHONIOENCODING": "utf-8"}, "a \ufffd \u00fc ".encode() + rb"\udcfc"),
    ],
)
def test_characters_that_the_encoding_lacks(variables: dict[str, str], printed: bytes) -> None:
    """They are escapes, bytes of a path in the C locale themselves; the command does not fail."""
    others = {name: one for name, one in os.environ.items() if name != "PYTHONIOENCODING"}
    done = subprocess.run(
        [sys.executable, "-c", PRINT], env=others | variables, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, printed + b"\n")
    assert done.stderr.startswith(b"b ")


def in_the_c_locale(folder: Path, *argv: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command of lmcore in its own interpreter, with the bytes of UTF-8 as arguments."""
    env = {name: one for name, one in os.environ.items() if name != "PYTHONIOENCODING"}
    command = [sys.executable, "-m", "lmcore.cli.main", *argv]
    return subprocess.run(
        list(map(os.fsencode, command)),
        env=env | C_LOCALE,
        cwd=folder,
        capture_output=True,
        check=False,
    )


def test_paths_in_the_c_locale(tmp_path: Path) -> None:
    """A path that is not ASCII is found; a message about it shows its bytes as escapes."""
    (tmp_path / "d\u00fcr").mkdir()
    done = in_the_c_locale(tmp_path, "checkpoint", "inspect", "d\u00fcr")
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.startswith(
        rb"error: no checkpoint in `d\udcc3\udcbcr`" + b"\nwhy: it is empty"
    )


def test_prompts_in_the_c_locale(tmp_path: Path) -> None:
    """The bytes of a prompt are UTF-8 there too: the model reads the characters."""
    write_lmcore(RandomState(GPT2), tmp_path / "run", ByteTokenizer())
    prompt = "Gr\u00fc\u00dfe"
    command = ["generate", "--device", "cpu", "--load", "run", "--greedy", "--tokens", "1"]
    done = in_the_c_locale(tmp_path, *command, "--prompt", prompt, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompt"] == prompt
    plain = in_the_c_locale(tmp_path, *command, "--prompt", prompt)
    assert plain.returncode == 0, plain.stderr
    # A terminal that has no such character shows a question mark in its place.
    assert plain.stdout.startswith(b"Gr??e")
