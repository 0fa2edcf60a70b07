"""Whole runs of Retro: resumed, in other layouts, with neighbours that do not fit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcore.cli.main import main
from lmcore.config.derived.split import parse_split
from lmcore.data.blend.train_split import split_ranges
from lmcore.data.chunks.database import ChunkDatabase, Documents, build_database
from lmcore.data.chunks.neighbours import (
    NeighboursRecord,
    begin_neighbours,
    database_path,
    neighbours_path,
    neighbours_store,
)
from lmcore.data.dataset.gpt import GPTDataset
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.tokenizer import build_tokenizer

RANK = ["-m", "lmcore.cli.main"]
LENGTH, CHUNK = 16, 4
SAMPLES = {"train": 24, "valid": 12, "test": 4}
FLAGS = (
    "--model-family retro --micro-batch-size 2 --global-batch-size 4 --train-iters 6 --lr 1e-2"
    " --eval-interval 3 --eval-iters 1 --split 8,1,1 --save-interval 3 --init-method-std 0.2"
    f" --num-layers 3 --retro-first-layer 2 --retro-chunk-length {CHUNK}"
)
DROPOUT = (
    "--hidden-dropout 0.1 --attention-dropout 0.1"
    " --retro-encoder-hidden-dropout 0.1 --retro-encoder-attention-dropout 0.2"
)
CLOSE = 2e-6


@pytest.fixture(scope="session")
def project(data_prefix: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a database of the data, and drawn neighbours of the samples of a run with `FLAGS`."""
    tokenizer = build_tokenizer("ByteTokenizer")

    def make(
        samples: int = SAMPLES["train"], *, chunk: int = CHUNK, seed: int = 1234, drawn: int = 1
    ) -> Path:
        folder = tmp_path_factory.mktemp("project")
        indexed = IndexedDataset(data_prefix)
        documents = [Documents(indexed, (0, len(indexed)))]
        path = database_path(folder)
        database = build_database(path, documents, tokenizer, chunk_length=chunk, block=9)
        split = parse_split("8,1,1")
        ranges = split_ranges(indexed.document_count, split, needed=("train", "valid"))
        for part, documents_range in ranges.items():
            dataset = GPTDataset(
                indexed,
                document_range=documents_range,
                num_samples=SAMPLES[part],
                sequence_length=LENGTH,
                seed=seed,
                cache_dir=folder,
                name=part,
            )
            count = samples if part == "train" else SAMPLES[part]
            _draw(folder, part, dataset.order, database, count, drawn)
        return folder

    return make


def _draw(
    folder: Path, part: str, order: str, database: ChunkDatabase, count: int, seed: int
) -> None:
    chunk = database.record.chunk_length
    record = NeighboursRecord(
        part=part,
        samples=order,
        source="text",
        seq_length=LENGTH,
        chunk_length=chunk,
        num_neighbors=3,
        num_queried=3,
        num_samples=count,
        block=8,
        database=database.record.fingerprint,
        index=str(seed),
    )
    path = neighbours_path(folder, part, order)
    begin_neighbours(path, record)
    numbers = np.random.default_rng(seed)
    for number, rows in enumerate(record.rows):
        size = (rows, LENGTH // chunk, 3)
        drawn = numbers.integers(-1, database.chunks, size).astype(np.int32)
        neighbours_store(path).write(number, drawn)


def said(run: Any) -> str:
    """Return what a run wrote as one line."""
    return " ".join(run.err.split())


def test_resuming(
    train: Any, project: Callable[..., Path], assert_same: Any, tmp_path: Path, capsys: Any
) -> None:
    """A run that resumes is the uninterrupted one, bit for bit, with dropout and recomputation."""
    flags = f"{FLAGS} {DROPOUT} --recompute full --retro-project-dir {project()}"
    whole = train("whole", flags)
    assert whole.status == 0, whole.err
    assert "model     Retro, " in whole.err
    assert whole.summary["test_loss"] is not None
    load = f"--load {whole.directory}/checkpoints/iter_0000003"
    more = train("more", f"{flags} {load}")
    assert more.status == 0, more.err
    assert more.curve() == whole.curve()[3:]
    assert_same(more.saved(), whole.saved())
    capsys.readouterr()
    ask = ["generate", "--load", str(whole.directory), "--prompt", "Where", "--device", "cpu"]
    ask += ["--tokens", "8", "--greedy", "--json"]
    assert main(ask) == 0
    alone = capsys.readouterr()
    assert "none are given: it continues the prompt without" in " ".join(alone.err.split())
    file = tmp_path / "neighbours.jsonl"
    file.write_text('["the king of all"]\n', encoding="utf-8")
    assert main([*ask, "--retro-neighbors", str(file)]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["text"] != json.loads(alone.out)["text"]
    assert len(read["tokens"]) == 8 or read["finished"]
    beam = [one for one in ask if one != "--greedy"]
    assert main([*beam, "--retro-neighbors", str(file), "--beam-width", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == read["tokens"]
    for flag, words in {
        "--no-cache": "models with an encoder",
        "--quantization int8": "Retro",
    }.items():
        assert main([*ask, *flag.split()]) != 0
        assert words in capsys.readouterr().err
    other = train("other", f"{FLAGS} {DROPOUT} --retro-project-dir {project(drawn=2)} {load}")
    assert other.status != 0
    assert "order" in said(other)
    gated = train("gated", f"{flags} {load} --retro-attention-gate 0.5")
    assert gated.status == 0, gated.err
    assert "retro_attention_gate" in gated.err
    assert gated.curve() != whole.curve()[3:]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "more",
    [
        "--tensor-model-parallel-size 2",
        pytest.param("", marks=pytest.mark.full),
        pytest.param("--zero-stage 3", marks=pytest.mark.full),
    ],
)
def test_processes(
    train: Any, as_ranks: Any, project: Callable[..., Path], data_prefix: str, more: str
) -> None:
    """Two processes take the steps of one."""
    flags = f"{FLAGS} --data-path {data_prefix} --retro-project-dir {project()}"
    flags += " --make-vocab-size-divisible-by 16"
    whole = train("whole", flags)
    assert whole.status == 0, whole.err
    run = as_ranks("ranks", f"{flags} {more}", [RANK, RANK])
    assert run.status == 0, run.err
    for one, other in zip(run.rows, whole.rows, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=CLOSE)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=CLOSE * 10)


def test_neighbours_count(train: Any, project: Callable[..., Path]) -> None:
    """Other neighbours give other losses; with a closed gate they are as of GPT."""
    first = train("first", f"{FLAGS} --retro-project-dir {project()}")
    second = train("second", f"{FLAGS} --retro-project-dir {project(drawn=2)}")
    assert first.rows[1]["loss"] != second.rows[1]["loss"]
    gpt = train("gpt", FLAGS.partition(" --retro-")[0].replace("retro", "gpt"))
    closed = f"{FLAGS} --retro-project-dir {project()} --retro-attention-gate 0 --clip-grad 0"
    shut = train("shut", closed)
    assert shut.rows[0]["loss"] == pytest.approx(gpt.rows[0]["loss"], rel=1e-6)


def test_samples_repeat(train: Any, project: Callable[..., Path]) -> None:
    """With neighbours of two steps, the third step has the samples of the first."""
    few = f"--retro-project-dir {project(samples=8)}"
    flags = FLAGS.replace("--lr 1e-2", "--lr 1e-30").replace("--eval-iters 1", "--eval-iters 0")
    run = train("run", f"{flags} {few} --retro-cyclic-train-iters 2")
    assert run.status == 0, run.err
    losses = [row["loss"] for row in run.rows]
    assert losses[:2] * 3 == losses
    assert losses[0] != losses[1]
    refused = train("refused", f"{flags} {few}")
    assert refused.status != 0
    assert "has neighbours of 8 train samples, and the run reads 24" in said(refused)
    without = train("without", f"{flags} {few} --no-retro-verify-neighbor-count")
    assert without.status == 0, without.err
    assert [row["loss"] for row in without.rows][:2] == losses[:2]
    assert without.rows[2]["loss"] != losses[2]


@pytest.mark.parametrize(
    "made, more, message",
    [
        (None, "", "the run names none"),
        ({}, "--seed 5", "has no neighbours of the valid samples"),
        ({"chunk": 8}, "", "`--retro-chunk-length 4` is not the length of the chunks in"),
        ({}, "--retro-num-neighbors 4", "is more than the 3 neighbours of each chunk in"),
        ({}, "--seq-length 18", "`--seq-length 18` is not divisible by `--retro-chunk-length 4`"),
    ],
)
def test_what_does_not_fit(
    train: Any, project: Callable[..., Path], made: Any, more: str, message: str
) -> None:
    """Neighbours are compared with the run before it begins."""
    place = "" if made is None else f" --retro-project-dir {project(**made)}"
    run = train("run", f"{FLAGS}{place} {more}")
    assert run.status != 0
    assert message in said(run)
    assert not (run.directory / "metrics.jsonl").exists()


def test_another_tokenizer(
    train: Any, project: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database of other tokens is refused."""
    from lmcore.data.chunks import database

    read = database.read_record

    def other(*given: Any) -> Any:
        found = read(*given)
        if isinstance(found, database.DatabaseRecord):
            return dataclasses.replace(found, tokenizer="another")
        return found

    folder = project()
    monkeypatch.setattr(database, "read_record", other)
    monkeypatch.setattr(
        database.DatabaseRecord, "fingerprint", property(lambda _: _fingerprint(folder))
    )
    run = train("run", f"{FLAGS} --retro-project-dir {folder}")
    assert run.status != 0
    assert "were made with another tokenizer than the run's" in said(run)


def _fingerprint(folder: Path) -> str:
    text = next((folder / "neighbours").glob("train-*/neighbours.json")).read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return str(found["database"])
