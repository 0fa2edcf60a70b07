"""`lmcore data clean` from the command line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError
from lmcore.cli.data import run
from lmcore_data_tools.clean.chain import STEPS
from lmcore_data_tools.clean.command import _EPILOG


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four documents, two of them alike, in the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "in.jsonl"
    rows = [{"text": text} for text in ("one", "two and more", "one", "schÃ¶n")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


FILES = ["--input", "in.jsonl", "--output", "out.jsonl"]
TOKENS = ["--tokenizer-type", "ByteTokenizer"]


def test_summary(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The summary has a row for each step, and the next command; progress goes to stderr."""
    flags = ["--min-characters", "4", "--dropped", "dropped.jsonl"]
    assert run(["clean", "fix", "length", "exact", *FILES, *flags]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[:4] == [
        "out.jsonl",
        "  2 documents, 44 bytes of JSON",
        "dropped.jsonl",
        "  dropped documents, with reasons",
    ]
    assert [line.split() for line in lines[5:9]] == [
        ["step", "documents", "kept"],
        ["fix", "4", "4", "changed:", "1"],
        ["length", "4", "2", "dropped:", "2", "short"],
        ["exact", "2", "2"],
    ]
    assert lines[-1] == "next: lmcore data prepare --input out.jsonl ..."
    assert captured.err == ""  # a log gets a line every ten seconds
    assert Path("out.jsonl").read_text(encoding="utf-8").splitlines()[1] == '{"text": "schön"}'


def test_json(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` prints all of it for scripts."""
    run(["clean", "exact", *FILES, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (report["documents"], report["kept"], report["output"]) == (4, 3, "out.jsonl")
    assert report["steps"] == [
        {
            "step": "exact",
            "documents": 4,
            "kept": 3,
            "changed": 0,
            "added": 0,
            "dropped": {"duplicate": 1},
        }
    ]


def test_filter(corpus: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With `-` standard output has the documents alone, and stderr the summary."""
    assert run(["clean", "exact", "--input", "in.jsonl", "--output", "-"]) == 0
    captured = capfd.readouterr()
    assert [json.loads(line)["text"] for line in captured.out.splitlines()] == [
        "one",
        "two and more",
        "schÃ¶n",
    ]
    assert "1 duplicate" in captured.err


def test_tokens_are_counted(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tokenizer that is named counts tokens."""
    run(["clean", "length", *FILES, *TOKENS, "--min-tokens", "4"])
    assert "2 short" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        (["clean", *FILES], "url, fix, language"),
        (["clean", "exakt", *FILES], "unknown step `exakt`"),
        (["clean", "length", *FILES], "needs `--tokenizer-type` or `--min-characters`"),
        (["clean", "exact", *FILES, "--vocab-file", "v"], "needs `--tokenizer-type`"),
        (
            ["clean", "length", *FILES, *TOKENS, "--min-characters", "4"],
            "exclude each other",
        ),
        (["clean", "near", *FILES, "--bands", "3"], "`--bands 3` does not divide `--hashes 100`"),
        (["clean", "near", *FILES, "--similarity", "1.5"], "`--similarity 1.5`: out of range"),
    ],
)
def test_wrong_flags(corpus: Path, flags: list[str], message: str) -> None:
    """Wrong flags are reported before anything is read, and nothing is written."""
    with pytest.raises(ConfigError) as caught:
        run(flags)
    assert message in caught.value.render()
    assert [one.name for one in corpus.parent.iterdir()] == ["in.jsonl"]


def test_help_lists_the_steps() -> None:
    """The help lists every step, in order."""
    listed = _EPILOG.partition("\n\n")[0].splitlines()[1:]
    assert [line.split()[0] for line in listed] == list(STEPS)


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ended_by_a_signal(corpus: Path, workers: str, number: signal.Signals) -> None:
    """SIGTERM and Ctrl-C end it as the shell expects and leave no temporary file."""
    flags = ["--input", "in.jsonl", "-", "--output", "out.jsonl.gz", "--workers", workers]
    command = [sys.executable, "-m", "lmcore.cli.main", "data", "clean", "exact", "near", *flags]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not list(corpus.parent.glob(".*.tmp/0/*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)  # it waits for standard input now
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert [one.name for one in corpus.parent.iterdir()] == ["in.jsonl"]
