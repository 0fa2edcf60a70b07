"""`lmcore data retro`: its steps, its options, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcore.cli.main import main
from lmcore.data.chunks.neighbours import open_neighbours
from lmcore.data.dataset.gpt import GPTDataset
from lmcore.data.indexed.dataset import IndexedDataset

WORDS = [f"w{n}" for n in range(60)]
ENCODER = ["--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "1"]
SMALL = ["--seq-length", "32", *ENCODER, "--micro-batch-size", "2", "--eval-iters", "1"]
CHUNKS = ["--retro-chunk-length", "16", "--retro-query-num-neighbors-save", "3"]
STEPS = ["--train-iters", "10", "--eval-interval", "5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has two datasets of bytes, `a` and `b`, and the run `bert`."""
    folder = tmp_path_factory.mktemp("retro")
    draw = np.random.default_rng(4)
    for name in ("a", "b"):
        with (folder / f"{name}.jsonl").open("w") as file:
            for _ in range(40):
                words = draw.choice(WORDS, int(draw.integers(5, 40)))
                sentences = [" ".join(words[at : at + 5]) + " ." for at in range(0, len(words), 5)]
                file.write(json.dumps({"text": "\n".join(sentences)}) + "\n")
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *WORDS]))
    common = ["--input", f"{folder}/a.jsonl", "--output-prefix", f"{folder}/a", "--workers", "1"]
    bert = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(vocabulary)]
    assert main(["data", "prepare", *common, *bert, "--presplit-sentences"]) == 0
    for name in ("a", "b"):
        paths = ["--input", f"{folder}/{name}.jsonl", "--output-prefix", f"{folder}/{name}"]
        more = ["--tokenizer-type", "ByteTokenizer", "--append-eod", "--workers", "1"]
        assert main(["data", "prepare", *paths, *more]) == 0
    data = ["--data-path", f"{folder}/a_text_sentence", "--seq-length", "32"]
    run = ["--train-iters", "2", "--eval-iters", "0", "--save", f"{folder}/bert"]
    assert main(["train", "--model-family", "bert", *data, *ENCODER, *run]) == 0
    return folder


@pytest.fixture
def retro(folder: Path, tmp_path: Path) -> Callable[..., int]:
    def call(*argv: str, data: tuple[str, ...] = ("a_text_document",), name: str = "p") -> int:
        paths = [word if word[0].isdigit() else f"{folder}/{word}" for word in data]
        project = ["--retro-project-dir", f"{tmp_path}/{name}"]
        chunks = CHUNKS[2:] if "--retro-chunk-length" in argv else CHUNKS
        return main(
            ["data", "retro", "--data-path", *paths, *SMALL, *STEPS, *chunks, *project, *argv]
        )

    return call


def error(capsys: Any, call: Callable[..., int], *argv: str, **more: Any) -> str:
    assert call(*argv, **more) != 0
    return str(capsys.readouterr().err)


def test_neighbours_of_every_part(retro: Any, folder: Path, tmp_path: Path, capsys: Any) -> None:
    """Samples of training, validation and test have neighbours, by the order of their samples."""
    assert retro("--retro-encoder", f"{folder}/bert", "--split", "60,20,20") == 0
    shown = capsys.readouterr().out
    assert f"{tmp_path}/p/database: " in shown
    assert "exact search" in shown
    indexed = IndexedDataset(folder / "a_text_document")
    for part, documents, count in (
        ("train", (0, 24), 20),
        ("valid", (24, 32), 6),
        ("test", (32, 40), 2),
    ):
        samples = GPTDataset(
            indexed,
            document_range=documents,
            num_samples=count,
            sequence_length=32,
            seed=1234,
            cache_dir=tmp_path / "cache",
            name=part,
        )
        found = open_neighbours(tmp_path / "p", part, description=samples.order, verify=True)
        assert found.num_samples == count
        assert found.num_neighbors == 3
        tokens = found.tokens(count - 1, 2, 2)
        assert tokens.shape == (2, 2, 32)
        rows = found.database.rows(found.chunks(0).astype(np.int64).ravel())
        assert (rows[:, 1] < 24).all(), "only documents of training are in the database"
        assert f"neighbours of {count} samples" in shown


def test_every_source_of_a_blend(retro: Any, folder: Path, tmp_path: Path) -> None:
    """Each source has neighbours of as many samples as the blend takes, among chunks of both."""
    blend = ("0.3", "a_text_document", "0.7", "b_text_document")
    assert retro("--retro-encoder", f"{folder}/bert", data=blend) == 0
    found = sorted(one.name.partition("-")[0] for one in (tmp_path / "p/neighbours").iterdir())
    assert found == ["train", "train", "valid", "valid"]
    record = json.loads((tmp_path / "p/database/database.json").read_text())
    assert [Path(one).name for one in record["data_paths"]] == [
        "a_text_document",
        "b_text_document",
    ]
    counts = {
        json.loads((one / "neighbours.json").read_text())["source"].rpartition("/")[2]: json.loads(
            (one / "neighbours.json").read_text()
        )["num_samples"]
        for one in (tmp_path / "p/neighbours").glob("train-*")
    }
    assert counts["a_text_document"] >= 6
    assert counts["b_text_document"] >= 14
    path = next((tmp_path / "p/neighbours").glob("train-*"))
    chosen = np.load(path / "shard-00000.npy")
    rows = open_database(tmp_path).rows(chosen[chosen >= 0].astype(np.int64))
    assert set(rows[:, 0].tolist()) == {0, 1}


def test_training_reads_them(retro: Any, folder: Path, tmp_path: Path, capsys: Any) -> None:
    """A run with the same options finds the neighbours of a blend, one of another order none."""
    blend = ("0.3", "a_text_document", "0.7", "b_text_document")
    cyclic = ["--retro-cyclic-train-iters", "5"]
    assert retro("--retro-encoder", f"{folder}/bert", *cyclic, data=blend) == 0
    paths = [word if word[0].isdigit() else f"{folder}/{word}" for word in blend]
    project = ["--retro-project-dir", f"{tmp_path}/p", *CHUNKS[:2], "--model-family", "retro"]
    train = ["train", "--data-path", *paths, *SMALL, *project, "--save", f"{tmp_path}/run"]
    assert main([*train, *STEPS, *cyclic]) == 0
    capsys.readouterr()
    assert main([*train[:-1], f"{tmp_path}/other", *STEPS, "--seed", "9"]) != 0
    assert "in their order of this run" in capsys.readouterr().err


def open_database(tmp_path: Path) -> Any:
    from lmcore.data.chunks.database import ChunkDatabase

    return ChunkDatabase(tmp_path / "p/database")


def test_steps_one_by_one(retro: Any, folder: Path, tmp_path: Path, capsys: Any) -> None:
    """They may be done by several commands; a later one knows the encoder of the index."""
    assert retro("--retro-tasks", "chunks") == 0
    assert sorted(one.name for one in (tmp_path / "p").iterdir()) == ["database"]
    assert "is no index of chunks" in error(capsys, retro, "--retro-tasks", "neighbours")
    assert retro("--retro-tasks", "index-build", "--retro-encoder", f"{folder}/bert") == 0
    assert not (tmp_path / "p/neighbours").exists()
    assert retro("--retro-tasks", "query-pretraining-neighbors") == 0
    assert retro("--retro-encoder", f"{folder}/bert", name="all") == 0
    assert contents(tmp_path / "p") == contents(tmp_path / "all")


def test_faiss(retro: Any, folder: Path, tmp_path: Path) -> None:
    """A flat index of Faiss has the same neighbours."""
    pytest.importorskip("faiss")
    assert retro("--retro-encoder", f"{folder}/bert", "--retro-index-str", "Flat") == 0
    assert retro("--retro-encoder", f"{folder}/bert", name="exact") == 0
    for one in (tmp_path / "p/neighbours").glob("*/*.npy"):
        other = tmp_path / "exact" / one.relative_to(tmp_path / "p")
        assert (np.load(one) == np.load(other)).mean() > 0.99


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(one.relative_to(folder)): one.read_bytes()
        for one in sorted(folder.rglob("*"))
        if one.is_file()
    }


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--retro-tasks", "db-build,indx"], "there is no step `indx`"),
        (
            ["--retro-query-num-neighbors-query", "2"],
            "`--retro-query-num-neighbors-save 3` is more",
        ),
        (["--retro-index-ntrain", "9"], "no effect without `--retro-index-str`"),
        (["--model-family", "bert"], "read no neighbours"),
        (["--retro-chunk-length", "24", "--retro-encoder", "bert"], "is not divisible by"),
        (["--retro-tasks", "neighbors"], "is no index of chunks"),
        (["--retro-blok-size", "9"], "--retro-block-size"),
        ([], "--retro-encoder"),
    ],
)
def test_what_does_not_fit(
    retro: Any, folder: Path, capsys: Any, argv: list[str], words: str
) -> None:
    """It is refused with the reason, before anything is computed."""
    argv = [
        f"{folder}/bert" if word == "bert" and argv[0] != "--model-family" else word
        for word in argv
    ]
    assert words in error(capsys, retro, *argv)


def test_other_parts(retro: Any, folder: Path, capsys: Any, tmp_path: Path) -> None:
    """A project of other data, chunks or encoder is refused by each step, and keeps its files."""
    assert retro("--retro-encoder", f"{folder}/bert") == 0
    before = contents(tmp_path / "p")
    found = error(capsys, retro, data=("b_text_document",))
    assert "is a database of chunks with another data" in found
    other = ["--retro-chunk-length", "8"]
    assert "another length of the chunks" in error(capsys, retro, *other)
    found = error(capsys, retro, "--retro-bert-max-chunk-length", "9")
    assert "with another encoder" in found
    found = error(capsys, retro, "--retro-bert-max-chunk-length", "9", "--retro-tasks", "neighbors")
    assert "built by another encoder" in found
    assert contents(tmp_path / "p") == before


def test_another_search_is_refused_first(
    retro: Any, folder: Path, capsys: Any, tmp_path: Path
) -> None:
    """Neighbours of another search are known before an index is trained for this one."""
    pytest.importorskip("faiss")
    assert retro("--retro-encoder", f"{folder}/bert") == 0
    before = contents(tmp_path / "p")
    assert "with another index" in error(capsys, retro, "--retro-index-str", "IVF2,Flat")
    assert contents(tmp_path / "p") == before


def test_micro_batches_do_not_matter(folder: Path, tmp_path: Path) -> None:
    """A global batch is enough: it need not be a multiple of the default micro-batch."""
    argv = ["data", "retro", "--data-path", f"{folder}/a_text_document", *STEPS, *CHUNKS]
    argv += ["--seq-length", "32", *ENCODER, "--eval-iters", "1", "--global-batch-size", "2"]
    argv += ["--retro-project-dir", f"{tmp_path}/p", "--retro-encoder", f"{folder}/bert"]
    assert main(argv) == 0
    (path,) = (tmp_path / "p/neighbours").glob("train-*/neighbours.json")
    assert json.loads(path.read_text())["num_samples"] == 20


@pytest.mark.parametrize("name", ["bert", "bert/checkpoints/iter_0000002"])
def test_a_run_is_no_project(
    retro: Any, folder: Path, tmp_path: Path, capsys: Any, name: str
) -> None:
    """The directory of a run or a checkpoint is refused, and stays as it was."""
    shutil.copytree(folder / "bert", tmp_path / "bert")
    before = contents(tmp_path)
    found = error(capsys, retro, "--retro-encoder", f"{folder}/bert", name=name)
    assert "is the directory of a run or of a checkpoint" in found
    assert contents(tmp_path) == before


def test_no_encoder(retro: Any, folder: Path, capsys: Any, tmp_path: Path) -> None:
    """A decoder is no encoder of chunks."""
    data = ["--data-path", f"{folder}/a_text_document", "--eval-iters", "0"]
    save = ["--train-iters", "1", "--save", f"{tmp_path}/gpt"]
    assert main(["train", *data, *SMALL[:-2], *save]) == 0
    found = error(capsys, retro, "--retro-encoder", f"{tmp_path}/gpt")
    assert "no encoder of chunks" in found
    assert "no such" in error(capsys, retro, "--retro-encoder", f"{tmp_path}/nowhere").lower()


def test_help(capsys: Any) -> None:
    """It shows the options of the command, and says where the others are."""
    assert main(["data", "retro", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--retro-index-str" in shown
    assert "every option and file of `lmcore train`" in " ".join(shown.split())


def with_small_blocks(folder: Path, project: Path) -> list[str]:
    argv = ["data", "retro", "--data-path", f"{folder}/a_text_document", *SMALL, *STEPS, *CHUNKS]
    argv += ["--retro-project-dir", str(project), "--retro-encoder", f"{folder}/bert"]
    argv += ["--retro-block-size", "8", "--retro-doc-block-size", "9"]
    return argv


def start(folder: Path, project: Path) -> subprocess.Popen[bytes]:
    """Start the command in a process, with small blocks."""
    command = [sys.executable, "-m", "lmcore", *with_small_blocks(folder, project)]
    with (project.parent / "log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def test_killed_and_continued_and_two_at_once(folder: Path, tmp_path: Path) -> None:
    """A process that was killed, and two processes at once, end with the files of one."""
    assert main(with_small_blocks(folder, tmp_path / "alone")) == 0
    whole = contents(tmp_path / "alone")
    killed = start(folder, tmp_path / "other")
    while killed.poll() is None and not list((tmp_path / "other").rglob("index/shard-*.json")):
        time.sleep(0.01)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    both = [start(folder, tmp_path / "other") for _ in range(2)]
    for one in both:
        assert one.wait(timeout=300) == 0, (tmp_path / "log").read_text()
    found = contents(tmp_path / "other")
    hidden = {name for name in found if Path(name).name.startswith(".")}
    assert {name: found[name] for name in found.keys() - hidden} == whole


@pytest.mark.parametrize(
    "data", [("a_text_document",), ("2", "a_text_document", "1", "b_text_document")]
)
def test_a_run_reads_them(
    retro: Any, folder: Path, tmp_path: Path, capsys: Any, data: tuple[str, ...]
) -> None:
    """`lmcore train` takes the project with the same options, of one dataset and of a blend."""
    split = ("--split", "60,20,20")
    assert retro("--retro-encoder", f"{folder}/bert", *split, data=data) == 0
    paths = [word if word[0].isdigit() else f"{folder}/{word}" for word in data]
    run = ["train", "--model-family", "retro", "--data-path", *paths, *SMALL, *STEPS, *split]
    run += ["--retro-project-dir", f"{tmp_path}/p", "--retro-chunk-length", "16"]
    assert main([*run, "--save", f"{tmp_path}/run"]) == 0
    rows = [json.loads(one) for one in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row.get("valid_loss")] == [5, 10]
    capsys.readouterr()
    assert main([*run, "--save", f"{tmp_path}/more", "--seed", "7"]) != 0
    assert "in their order of this run" in " ".join(capsys.readouterr().err.split())
