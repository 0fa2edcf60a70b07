"""`--mock-data`: runs without data, their tokenizer, and how they continue."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from lmcore.cli.main import main
from lmcore.data.indexed.dataset import IndexedDataset

MOCK = "--mock-data --train-iters 4 --make-vocab-size-divisible-by 1"


@pytest.mark.parametrize(
    "flags, tokens, rows",
    [
        ("", 257, 257),  # bytes
        ("--vocab-size 99", 100, 100),
        ("--padded-vocab-size 128", 128, 128),
        ("--vocab-size 99 --pad-vocab-size-to 128", 100, 128),
        ("--tokenizer-type NullTokenizer --pad-vocab-size-to 128", 128, 128),
    ],
)
def test_a_run_without_data(train: Any, flags: str, tokens: int, rows: int) -> None:
    """Its vocabulary follows from the flags; a model without training has the loss of chance."""
    run = train("run", f"{MOCK} {flags} --eval-interval 2 --eval-iters 1", None)
    assert run.status == 0, run.err
    assert f"vocabulary {tokens} padded to {rows}" in run.err
    assert "mock data: 1,116,547 tokens" in run.err
    assert run.rows[0]["loss"] == pytest.approx(math.log(tokens), abs=0.1)
    assert "valid_loss" in run.rows[1]
    data = run.directory / "data" / "mock_data_1234_text_document"
    largest = max(int(IndexedDataset(data).get(index).max()) for index in range(512))
    assert largest == tokens - 1


def test_it_continues_with_the_same_samples(train: Any, train_once: Any, assert_same: Any) -> None:
    """A run that stops continues bit for bit, also where its prepared data is gone."""
    flags = f"{MOCK} --vocab-size 99 --eval-interval 2 --eval-iters 1"
    whole = train_once(flags, None)
    first = train("part", f"{flags} --exit-interval 2", None)
    shutil.rmtree(first.directory / "data")
    assert main(["train", "--continue", str(first.directory), "--exit-interval", "9"]) == 0
    assert first.curve() == whole.curve()
    assert_same(first.saved(), whole.saved())
    other = train("other", f"{flags} --seed 5 --load {whole.directory}", None)
    assert other.status == 2, "another seed is another stream"


def test_sentences_of_an_encoder(train: Any, tmp_path: Path) -> None:
    """BERT is trained on random sentences, with the tokenizer that it needs."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(300))]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", "utf-8")
    flags = f"{MOCK} --model-family bert --vocab-file {tmp_path / 'vocab.txt'}"
    run = train("run", flags, None)
    assert run.status == 0, run.err
    assert run.rows[0]["lm_loss"] == pytest.approx(math.log(305), abs=0.1)
    assert (run.directory / "data/mock_data_1234_text_sentence.bin").is_file()
    run = train("bytes", f"{MOCK} --model-family bert", None)
    assert run.status == 2
    assert "BERT cannot be trained with the tokenizer `ByteTokenizer`" in run.err


def test_beside_other_data(train: Any, tmp_path: Path) -> None:
    """Other data, a task and Retro are refused."""
    for flags, what in (
        ("--data-path x", "`--data-path x` and `--mock-data` exclude each other"),
        ("--corpus shakespeare", "`--mock-data` exclude each other"),
        ("--valid-data-path x", "`--valid-data-path x` needs separate training data"),
        (
            f"--model-family retro --retro-project-dir {tmp_path} --seq-length 128",
            "Retro cannot be trained with `--mock-data`",
        ),
    ):
        run = train("run", f"{MOCK} {flags}", None)
        assert run.status == 2
        assert what in run.err


@pytest.mark.distributed
def test_on_two_processes(train_once: Any, start: Any, finish: Any, data_prefix: str) -> None:
    """Both processes read the same documents, which one of them writes."""
    del data_prefix
    alone = train_once(f"{MOCK} --vocab-size 99 --global-batch-size 4", None)
    flags = f"{MOCK} --vocab-size 99 --global-batch-size 4 --micro-batch-size 2 --nproc-per-node 2"
    run = finish(start("two", flags), "two")
    assert run.status == 0, run.err
    losses = [row["loss"] for row in alone.rows]
    assert [row["loss"] for row in run.rows] == pytest.approx(losses, rel=1e-5)
