"""Whole runs of Retro: resumed, in other layouts, with neighbours that do not fit."""

from __future__ import annotations

import dataclasses
import gzip
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


Draw = Callable[[ChunkDatabase, list[Any]], Any]
"""Function of a database and the chunks of samples that returns neighbours, [n, L, 3]."""


def make_project(
    folder: Path,
    prefix: str,
    samples: dict[str, int],
    length: int,
    chunk: int,
    draw: Draw,
    index: str = "nearest",
) -> None:
    """Make a database of training documents, and neighbours of the samples of a run.

    *samples* has the number of samples of each part, and as `kept` how many of training have
    neighbours; *index* is the fingerprint of what drew them.
    """
    tokenizer, indexed = build_tokenizer("ByteTokenizer"), IndexedDataset(prefix)
    ranges = split_ranges(indexed.document_count, parse_split("8,1,1"), needed=("train", "valid"))
    documents = [Documents(indexed, indexed.sequence_range(ranges["train"]))]
    path = database_path(folder)
    database = build_database(path, documents, tokenizer, chunk_length=chunk, block=9)
    for part, own in ranges.items():
        dataset = GPTDataset(
            indexed,
            document_range=own,
            num_samples=samples[part],
            sequence_length=length,
            seed=1234,
            cache_dir=folder,
            name=part,
        )
        count = samples.get("kept", samples[part]) if part == "train" else samples[part]
        record = NeighboursRecord(
            part=part,
            samples=dataset.order,
            source="text",
            seq_length=length,
            chunk_length=chunk,
            num_neighbors=3,
            num_queried=3,
            num_samples=count,
            block=8,
            database=database.record.fingerprint,
            index=index,
        )
        path = neighbours_path(folder, part, dataset.order)
        begin_neighbours(path, record)
        chunks = [dataset[i][:-1].reshape(-1, chunk) for i in range(count)]
        found = draw(database, chunks).astype(np.int32)
        for number, start in enumerate(range(0, count, 8)):
            neighbours_store(path).write(number, found[start : start + 8])


@pytest.fixture(scope="session")
def project(data_prefix: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a database of the data, and drawn neighbours of the samples of a run with `FLAGS`."""

    def make(samples: int = SAMPLES["train"], *, chunk: int = CHUNK, drawn: int = 1) -> Path:
        folder = tmp_path_factory.mktemp("project")

        def draw(database: ChunkDatabase, chunks: list[Any]) -> Any:
            size = (len(chunks), LENGTH // chunk, 3)
            return np.random.default_rng(drawn).integers(-1, database.chunks, size)

        make_project(
            *(folder, data_prefix, {**SAMPLES, "kept": samples}, LENGTH, chunk, draw, str(drawn))
        )
        return folder

    return make


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
    pytest.importorskip("lmcore_serve")
    assert main(["serve", "--load", str(whole.directory), "--device", "cpu", "--port", "0"]) != 0
    assert "its texts have neighbours, which no interface takes" in capsys.readouterr().err
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
        pytest.param("--tensor-model-parallel-size 2", marks=pytest.mark.full),
        pytest.param("", marks=pytest.mark.full),
        pytest.param("--zero-stage 3", marks=pytest.mark.full),
    ],
)
def test_processes(
    train: Any, as_ranks: Any, project: Callable[..., Path], data_prefix: str, more: str
) -> None:
    """Two processes take the steps of one, from the samples on."""
    flags = f"{FLAGS} --data-path {data_prefix} --retro-project-dir {project()}"
    flags += " --make-vocab-size-divisible-by 16"
    whole = train("whole", flags)
    assert whole.status == 0, whole.err
    run = as_ranks("ranks", f"{flags} {more}", [RANK, RANK])
    assert run.status == 0, run.err
    for one, other in zip(run.rows, whole.rows, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=CLOSE)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=CLOSE * 10)


@pytest.mark.distributed
@pytest.mark.full
def test_another_layout_continues(
    train: Any, as_ranks: Any, project: Callable[..., Path], data_prefix: str
) -> None:
    """Two processes that divide every layer continue the run of one, and one process theirs."""
    flags = f"{FLAGS} --data-path {data_prefix} --retro-project-dir {project()}"
    flags += " --make-vocab-size-divisible-by 16"
    whole = train("whole", flags)
    assert whole.status == 0, whole.err
    half, divide = "checkpoints/iter_0000003", "--tensor-model-parallel-size 2"
    load = f"--load {whole.directory}/{half}"
    divided = as_ranks("divided", f"{flags} {divide} {load}", [RANK, RANK])
    assert divided.status == 0, divided.err
    begun = as_ranks("begun", f"{flags} {divide}", [RANK, RANK])
    assert begun.status == 0, begun.err
    joined = train("joined", f"{flags} --load {begun.directory}/{half}")
    assert joined.status == 0, joined.err
    for run in (divided, joined):
        assert [row["step"] for row in run.rows] == [4, 5, 6]
        assert run.summary["test_loss"] == pytest.approx(whole.summary["test_loss"], rel=CLOSE)
        for one, other in zip(run.rows, whole.rows[3:], strict=True):
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


def nearest(database: ChunkDatabase, chunks: list[Any]) -> Any:
    """Return the chunks with the most similar counts of bytes, without the chunk itself."""

    def counts(tokens: Any) -> Any:
        found = np.stack([np.bincount(one, minlength=257) for one in tokens]).astype(np.float32)
        return found / np.linalg.norm(found, axis=1, keepdims=True)

    flat = [chunk for sample in chunks for chunk in sample]
    scores = counts(flat) @ counts(database.own_tokens(0, database.chunks)).T
    scores[scores > 1 - 1e-5] = 0  # the chunk itself
    best = np.argpartition(-scores, 3, axis=1)[:, :3]
    return best.reshape(len(chunks), -1, 3)


def test_pretraining(train: Any, shared_data: Path, tmp_path: Path) -> None:
    """The validation loss of a short pretraining with similar chunks falls."""
    source = shared_data / "corpora/wiki/squad-wikipedia-articles-a.jsonl.gz"
    with gzip.open(source, "rt") as lines, (tmp_path / "text.jsonl").open("w") as stream:
        stream.writelines(line for _, line in zip(range(10), lines, strict=False))
    arguments = ["--input", str(tmp_path / "text.jsonl"), "--output-prefix", str(tmp_path / "text")]
    assert main(["data", "prepare", *arguments, "--tokenizer-type", "ByteTokenizer"]) == 0
    prefix, folder = f"{tmp_path}/text_text_document", tmp_path / "project"
    folder.mkdir()
    make_project(folder, prefix, {"train": 360, "valid": 96, "test": 24}, 64, 16, nearest)
    run = train(
        "run",
        "--model-family retro --seq-length 64 --retro-chunk-length 16 --hidden-size 32"
        " --retro-encoder-layers 1 --micro-batch-size 8 --train-iters 45 --eval-interval 15"
        f" --eval-iters 3 --lr 4e-3 --split 8,1,1 --retro-project-dir {folder}",
        prefix,
    )
    assert run.status == 0, run.err
    losses = [row["valid_loss"] for row in run.rows if row.get("valid_loss") is not None]
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0], losses
