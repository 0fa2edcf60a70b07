"""`lmcore data`: preparing and inspecting from the command line."""

from __future__ import annotations

import itertools
import json
import logging
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmcore.base.errors import ConfigError, DataError
from lmcore.cli.data import run
from lmcore.cli.data.training_command import training_command
from lmcore.cli.main import main
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.prepare.run import PrepareProgress


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three documents of JSON lines in the working directory."""
    monkeypatch.chdir(tmp_path)
    texts = ["one", "two three", "four"]
    lines = [json.dumps({"text": text, "title": text[:1]}) for text in texts]
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


BYTES = ["--tokenizer-type", "ByteTokenizer"]
PREPARE = ["prepare", "--input", "corpus.jsonl", "--output-prefix", "out", *BYTES]


EXAMPLE = """\
{"src": "a.example", "text": "The quick brown fox", "type": "Eng", "id": "0", "title": "First"}
{"src": "b.example", "text": "jumps over the dog", "type": "Eng", "id": "42", "title": "Second"}
"""


@pytest.mark.parametrize("key_flag", ["--json-key", "--json-keys", "--text-key"])
def test_the_familys_example_of_loose_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key_flag: str
) -> None:
    """Of `src, text, type, id, title` the keys asked for are taken, each into two files."""
    monkeypatch.chdir(tmp_path)
    Path("web.json").write_text(EXAMPLE, encoding="utf-8")
    command = ["prepare", "--input", "web.json", "--output-prefix", "out", *BYTES]
    assert run([*command, "--append-eod", key_flag, "text", "title"]) == 0
    made = {path.name for path in tmp_path.glob("out*.[bi]*")}
    assert made == {
        f"out_{key}_document.{end}" for key in ("text", "title") for end in ("bin", "idx")
    }
    for row in map(json.loads, EXAMPLE.splitlines()):
        for key in ("text", "title"):
            stored = IndexedDataset(f"out_{key}_document")
            ids = [*row[key].encode(), 256]
            assert ids in [stored.document(i).tolist() for i in range(stored.document_count)]


def test_eight_workers_write_what_one_writes(corpus: Path) -> None:
    """`--workers 1` and `--workers 8` give identical bytes."""
    corpus.write_text("".join(f'{{"text": "document {i}"}}\n' for i in range(999)), "utf-8")
    made = []
    for workers in ("1", "8"):
        assert run([*PREPARE, "--append-eod", "--overwrite", "--workers", workers]) == 0
        made.append([Path(f"out_text_document.{end}").read_bytes() for end in ("bin", "idx")])
    assert len(made[0][0]) > 2 * 999 * 10
    assert made[0] == made[1]


def test_prepare_and_inspect(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The output of `prepare` is named on stdout, and `inspect` finds no problem in it."""
    assert run([*PREPARE, "--append-eod"]) == 0
    captured = capsys.readouterr()
    assert "3 documents, 19 tokens of uint16, 38 bytes" in captured.out  # 16 bytes and 3 ends
    assert "next: lmcore train --data-path out_text_document" in captured.out
    assert captured.err == ""  # a log gets a line every ten seconds
    assert run(["inspect", "out_text_document.idx"]) == 0
    rows = dict(line.strip().split("  ", 1) for line in capsys.readouterr().out.splitlines()[1:-1])
    assert rows["documents"].strip() == "3"
    assert rows["tokens"].strip() == "19"
    assert rows["tokenizer"].strip() == "ByteTokenizer"


def test_next_command_can_be_pasted(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prefix with a space is quoted in the command that is proposed."""
    run(["prepare", "--input", "corpus.jsonl", "--output-prefix", "my text/out", *BYTES])
    out = capsys.readouterr().out
    assert "next: lmcore train --data-path 'my text/out_text_document'" in out


SMALL = "--num-layers 1 --hidden-size 16 --num-attention-heads 1 --seq-length 32 --train-iters 1"


def test_next_command_trains_on_a_book(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One text file is one document, which nothing divides: the command works as it is printed."""
    Path("book.txt").write_text("The whale.\n\nIt dives.\n" * 9)
    run(["prepare", "--input", "book.txt", "--output-prefix", "my book", *BYTES])
    out = capsys.readouterr().out
    printed = out.rpartition("next: lmcore ")[2].splitlines()
    assert "--document-per paragraph" in printed[1]
    flags = [*SMALL.split(), "--device", "cpu", "--progress", "none"]
    assert main([*shlex.split(printed[0]), *flags]) == 0


@pytest.mark.parametrize("documents, divides", [(1, False), (16, False), (17, True)])
def test_few_documents_train_without_validation(documents: int, divides: bool) -> None:
    """The default split of 17 documents is 16 and 1; of 16 it is 16 and none."""
    command = training_command("--data-path X", documents)
    assert command.startswith("lmcore train --data-path X")
    assert ("--eval-iters 0" not in command) == divides


def test_sentences_are_not_for_training(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No command is printed that would train a decoder on them, after a merge either."""
    corpus.write_text(json.dumps({"text": "One. Two.\nThree."}) + "\n")
    split = ["--presplit-sentences"]
    assert run([*PREPARE, *split]) == 0
    out = capsys.readouterr().out
    assert "next: lmcore data inspect out_text_sentence\n" in out
    assert "are for `lmcore train --model-family bert`" in out
    assert run(["merge", "--datasets", "out_text_sentence", "--output-prefix", "all"]) == 0
    assert "next: lmcore data inspect all\n" in capsys.readouterr().out
    assert "lmcore train --data-path" not in out


@pytest.mark.parametrize("workers", ["1", "2"])
def test_terminated(corpus: Path, workers: str) -> None:
    """SIGTERM ends it as the shell expects, and leaves no temporary file."""
    flags = ["--input", "corpus.jsonl", "-", "--output-prefix", "out", *BYTES, "--workers", workers]
    command = [sys.executable, "-m", "lmcore.cli.main", "data", "prepare", *flags]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not list(corpus.parent.glob("out*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)  # it waits for standard input now
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert errors == b"terminated\n"
    assert list(corpus.parent.glob("out*")) == []


def test_json(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` prints both reports for scripts."""
    run([*PREPARE, "--json-keys", "text", "title", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert [output["prefix"] for output in report["outputs"]] == [
        "out_text_document",
        "out_title_document",
    ]
    run(["inspect", "out_title_document", "--json"])
    assert json.loads(capsys.readouterr().out)["tokens"] == 3


def test_skipped_lines_are_counted(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--on-error skip` says how many lines were left out, and why; the default stops."""
    with corpus.open("a", encoding="utf-8") as file:
        file.write("{broken\n")
    with pytest.raises(DataError, match="line 4"):
        run(PREPARE)
    assert not Path("out_text_document.bin").exists()
    capsys.readouterr()
    assert run([*PREPARE, "--on-error", "skip"]) == 0
    assert "\nskipped: 1 " in capsys.readouterr().out


def test_damaged_data_set(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Inspecting a truncated dataset names the problem; status 1."""
    run(PREPARE)
    path = Path("out_text_document.bin")
    path.write_bytes(path.read_bytes()[:-2])
    capsys.readouterr()
    assert run(["inspect", "out_text_document"]) == 1
    assert "problem: " in capsys.readouterr().out


def test_unreadable_index(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of another format is named in plain words, with a command that works."""
    run([*PREPARE, "--append-eod"])
    Path("out_text_document.idx").write_bytes(b"hello\n")
    capsys.readouterr()
    assert run(["inspect", "out_text_document"]) == 1
    out = capsys.readouterr().out
    assert "does not begin with `MMIDIDX`" in out
    assert "b'" not in out
    (command,) = re.findall(r"`lmcore data (repair [^`]*)`", out)
    assert run(shlex.split(command)) == 0


def test_megatron_names(corpus: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The preparing script's names work, with a line that names today's."""
    old = ["--json-key", "title", "--loose-json"]
    with caplog.at_level(logging.INFO, logger="lmcore"):
        assert run([*PREPARE, *old]) == 0
    assert Path("out_title_document.bin").read_bytes() != b""
    assert "`--json-key title` -> `--json-keys title`" in caplog.text
    assert "`--loose-json` -> `--input-format jsonl`" in caplog.text


def test_help_aligns_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command of the help starts in the same column."""
    assert run([]) == 0
    assert "\n  corpora     List" in capsys.readouterr().out


def test_wrong_commands() -> None:
    """A misspelt command or flag names the nearest; required flags are all named."""
    with pytest.raises(ConfigError, match="unknown command `lmcore data prep`"):
        run(["prep"])
    with pytest.raises(ConfigError) as caught:
        run(["prepare", "--imput", "x"])
    assert [one.what for one in [caught.value, *caught.value.others]] == [
        "unknown flag `--imput`",
        "`--input` is required",
        "`--output-prefix` is required",
        "`--tokenizer-type` is required",
    ]


def test_progress_lines() -> None:
    """A log gets Megatron's line, a terminal a shorter one."""
    progress = PrepareProgress(documents=1000, json_bytes=2**20, seconds=2.0)
    assert progress.line() == "Processed 1000 documents (500.0 docs/s, 0.50 MB/s)."
    assert progress.bar() == "1,000 documents, 500 docs/s, 0.50 MB/s"


def test_a_log_gets_progress_by_time(
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A fast command writes no progress line into a log, a slow one a line every ten seconds."""
    corpus.write_text("".join(f'{{"text": "a document, {i}"}}\n' for i in range(3000)), "utf-8")
    argv = ["prepare", "--input", str(corpus), "--output-prefix", "out", *BYTES]
    assert run(argv) == 0
    assert not _progress(capsys.readouterr().err)
    for path in corpus.parent.iterdir():
        if path != corpus:
            path.unlink()
    clock = itertools.count(step=6)
    monkeypatch.setattr("lmcore.cli.text.progress.time", SimpleNamespace(monotonic=clock.__next__))
    assert run(argv) == 0
    assert len(_progress(capsys.readouterr().err)) == (next(clock) // 6 - 1) // 2


def _progress(text: str) -> list[str]:
    return [line for line in text.splitlines() if "ocuments" in line]


@pytest.mark.parametrize(
    "fraction, left, shown",
    [
        (
            0.5,
            75.4,
            "[############------------]  50%  10 documents, 5 docs/s, 2.00 MB/s, 1:15 left",
        ),
        (0.0, None, "[------------------------]   0%  10 documents, 5 docs/s, 2.00 MB/s"),
        (
            1.0,
            3700,
            "[########################] 100%  10 documents, 5 docs/s, 2.00 MB/s, 1:01:40 left",
        ),
    ],
)
def test_bar_shows_pace_and_time_left(fraction: float, left: float | None, shown: str) -> None:
    """The line is a bar with the remaining time if the input's size is known."""
    progress = PrepareProgress(10, 4 * 2**20, 2.0, fraction, left)
    assert progress.bar() == shown
