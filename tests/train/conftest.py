"""Whole runs of `lmcore train` at a tiny scale, in this process or in a separate one."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from few_words import COLORS, SPECIAL, WORDS
from suite.warm import WarmPopen

from lmcore.checkpoint import find_checkpoint, load_checkpoint, read_manifest
from lmcore.cli.main import main
from lmcore.data.indexed.metadata import DatasetMetadata, write_metadata
from lmcore.data.indexed.writer import IndexedDatasetWriter
from lmcore.data.prepare.plain_text import prepare_text
from lmcore.data.tokenizer import Tokenizer, build_tokenizer

ROOT = Path(__file__).resolve().parents[2]

TINY = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 4"
    " --make-vocab-size-divisible-by 8 --num-threads 1 --sample-tokens 0 --eval-iters 0"
    " --log-interval 1 --progress plain --cpu-peak-seconds 0"
)
"""Without the measurement of the peak, which takes longer than such a run; so MFU is unknown."""


CALL_MAIN = """
import sys
from lmcore.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@dataclass(frozen=True)
class Run:
    """A run that ended: its status, what it printed and what it left."""

    status: int
    out: str
    err: str
    directory: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl`."""
        text = (self.directory / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    @property
    def summary(self) -> dict[str, Any]:
        """The content of `summary.json`."""
        found: dict[str, Any] = json.loads((self.directory / "summary.json").read_text())
        return found

    def curve(self) -> list[tuple[Any, ...]]:
        """Return what must be equal, bit for bit, in two equal runs."""
        names = ("step", "consumed_samples", "consumed_tokens", "loss", "learning_rate")
        more = ("grad_norm", "valid_loss")
        return [tuple(row.get(name) for name in names + more) for row in self.rows]

    def saved(self, step: int | None = None) -> dict[str, torch.Tensor]:
        """Read all tensors of a checkpoint: the newest, or the checkpoint of a step."""
        inside = "" if step is None else f"checkpoints/iter_{step:07d}"
        checkpoint = find_checkpoint(self.directory / inside)
        entries = read_manifest(checkpoint).tensors
        tensors = {
            name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            for name, entry in entries.items()
        }
        load_checkpoint(checkpoint, tensors)
        return tensors


def argv_of(flags: str, prefix: str | None, directory: Path) -> list[str]:
    """Return the arguments of a tiny run; *flags* replace the tiny ones of the same name."""
    words = flags.split()
    given = {word for word in words if word.startswith("--")}
    if "--task-valid-data" in given:  # the run validates on all of it
        given.add("--eval-iters")
    pairs = zip(TINY.split()[::2], TINY.split()[1::2], strict=True)
    argv = ["train"] + [word for pair in pairs if pair[0] not in given for word in pair]
    if prefix is not None and given.isdisjoint({"--data-path", "--task-data", "--mock-data"}):
        argv += ["--data-path", prefix]
    if "--save" not in given:
        argv += ["--save", str(directory)]
    return argv + words


@pytest.fixture(scope="session")
def data_prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Six thousand characters of the bundled text: an epoch is about 350 samples of 16 tokens."""
    folder = tmp_path_factory.mktemp("data")
    text = (resources.files("lmcore.data") / "bundled/shakespeare.txt").read_text("utf-8")
    (folder / "text.txt").write_text(text[:6_000], "utf-8")
    tokenizer = build_tokenizer("ByteTokenizer", vocab_file=None, merge_file=None, vocab_size=None)
    prepare_text(folder / "text.txt", tokenizer, folder / "text", document_characters=256)
    return str(folder / "text_text_document")


def train_here(directory: Path, flags: str, prefix: str | None) -> Run:
    """Run `lmcore train` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(argv_of(flags, prefix, directory))
    return Run(status, out.getvalue(), err.getvalue(), directory)


@pytest.fixture
def train(data_prefix: str, tmp_path: Path) -> Callable[..., Run]:
    """Runs `lmcore train` in this process."""

    def go(name: str, flags: str, prefix: str | None = data_prefix) -> Run:
        return train_here(tmp_path / name, flags, prefix)

    return go


@pytest.fixture(scope="session")
def train_once(data_prefix: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Runs `lmcore train` in this process, once for the same flags.

    Tests share the run and only read it: to continue it, give `--load` and another directory.
    """
    known: dict[tuple[str, str | None], Run] = {}

    def go(flags: str, prefix: str | None = data_prefix) -> Run:
        if (flags, prefix) not in known:
            run = train_here(tmp_path_factory.mktemp("shared") / "run", flags, prefix)
            assert run.status == 0, run.err
            known[flags, prefix] = run
        return known[flags, prefix]

    return go


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Run, str], Run]:
    """Copies what a shared run left into the test's own folder, and returns the copy."""

    def copy(run: Run, name: str) -> Run:
        shutil.copytree(run.directory, tmp_path / name)
        return replace(run, directory=tmp_path / name)

    return copy


@pytest.fixture
def arguments(data_prefix: str, tmp_path: Path) -> Callable[[str, str], list[str]]:
    """Returns the arguments of a run in the folder of a name."""
    return lambda name, flags: argv_of(flags, data_prefix, tmp_path / name)


@pytest.fixture
def start(data_prefix: str, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts `lmcore train` as a separate process, which is ended with the test.

    *before* is Python code that it executes first.
    """
    processes: list[WarmPopen] = []

    def go(name: str, flags: str, *, env: Mapping[str, str] | None = None, before: str = "") -> Any:
        program = ["-c", before + CALL_MAIN] if before else ["-m", "lmcore.cli.main"]
        process = WarmPopen(
            [sys.executable, *program, *argv_of(flags, data_prefix, tmp_path / name)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield go
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def finish(tmp_path: Path) -> Callable[..., Run]:
    """Waits for a started process."""

    def go(process: Any, name: str) -> Run:
        out, err = process.communicate(timeout=240)  # a busy machine compiles slowly
        return Run(process.returncode, out, err, tmp_path / name)

    return go


@pytest.fixture
def as_ranks(
    arguments: Callable[[str, str], list[str]], finish: Callable[..., Run]
) -> Callable[..., Run]:
    """Trains in one process for each script, which is given the flags, and returns rank 0's run."""

    def go(name: str, flags: str, scripts: Sequence[Sequence[str]]) -> Run:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port, size = str(server.getsockname()[1]), str(len(scripts))
        host = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        host |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        workers = [
            WarmPopen(
                [sys.executable, *script, *arguments(name, flags)],
                env={**os.environ, **host, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, script in enumerate(scripts)
        ]
        runs = [finish(worker, name) for worker in workers]
        assert {run.status for run in runs} == {runs[0].status}, [run.err for run in runs]
        return runs[0]

    return go


@pytest.fixture
def signal_after() -> Callable[[Any, Path, int, signal.Signals], None]:
    """Sends a signal once the run has written so many rows."""

    def go(process: Any, directory: Path, rows: int, number: signal.Signals) -> None:
        end = time.monotonic() + 60
        path = directory / "metrics.jsonl"
        while not path.exists() or path.read_bytes().count(b"\n") < rows:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(number)

    return go


@pytest.fixture
def assert_same() -> Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], None]:
    """Compares two checkpoints bit for bit."""

    def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
        assert first.keys() == second.keys()
        differing = [name for name in first if not torch.equal(first[name], second[name])]
        assert differing == []

    return same


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a vocabulary of few words."""
    path = tmp_path_factory.mktemp("task") / "vocab.txt"
    path.write_text("\n".join([*SPECIAL, *COLORS, *WORDS]) + "\n")
    return path


@pytest.fixture(scope="session")
def tokenizer(vocabulary: Path) -> Tokenizer:
    """Return a tokenizer of BERT with few words."""
    return build_tokenizer(
        "BertWordPieceLowerCase", vocab_file=str(vocabulary), merge_file=None, vocab_size=None
    )


@pytest.fixture(scope="session")
def sentences(vocabulary: Path, tokenizer: Tokenizer) -> str:
    """Return the prefix of documents that are split into sentences."""
    drawn, prefix = np.random.default_rng(4), str(vocabulary.parent / "sentences")
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(60):
            lengths = drawn.integers(3, 7, 4)
            writer.add_document(drawn.integers(5, tokenizer.vocab_size, lengths.sum()), lengths)
        counts = (writer.documents, writer.sequences, writer.tokens)
    documents, sequences, tokens = counts
    metadata = DatasetMetadata.of(
        tokenizer,
        append_eod=False,
        documents=documents,
        sequences=sequences,
        tokens=tokens,
        dtype="uint16",
    )
    write_metadata(prefix, metadata)
    return prefix


@pytest.fixture(scope="session")
def bert(train_once: Callable[..., Any], sentences: str) -> Any:
    """Return a run that pretrained a tiny BERT."""
    run = train_once(
        "--model-family bert --train-iters 2 --split 8,1,1 --init-method-std 0.2", sentences
    )
    assert f"lmcore generate --load {run.directory} --fill-mask --prompt 'TEXT" in run.out
    return run
