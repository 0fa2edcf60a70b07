"""Whole runs of ICT: from BERT's weights to a block that is found by a sentence, held out."""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcore.cli.main import main

DOCUMENTS, LINES = 240, 6
WORDS, OWN = 80, 6
"""Words of all documents, and words that the sentences of one document are made of."""
SIZES = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32"
SHARED = "--biencoder-shared-query-context-model --retriever-score-scaling"
FLAGS = f"--model-family ict {SIZES} --micro-batch-size 24 --split 5,1,0"


def words_of(document: int) -> list[str]:
    drawn = np.random.default_rng([3, document])
    return [f"t{n}" for n in drawn.choice(WORDS, OWN, replace=False)]


def lines_of(document: int) -> list[str]:
    drawn = np.random.default_rng([4, document])
    return [" ".join([*drawn.choice(words_of(document), 4), "."]) for _ in range(LINES)]


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the prefix of documents of sentences, each document about a few words."""
    folder = tmp_path_factory.mktemp("topics")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *(f"t{n}" for n in range(WORDS))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    with (folder / "d.jsonl").open("w") as file:
        for document in range(DOCUMENTS):
            file.write(json.dumps({"text": "\n".join(lines_of(document))}) + "\n")
    more = ["--input", f"{folder}/d.jsonl", "--output-prefix", f"{folder}/d", "--workers", "1"]
    more += ["--tokenizer-type", "BertWordPieceLowerCase"]
    more += ["--vocab-file", f"{folder}/vocab.txt", "--presplit-sentences"]
    assert main(["data", "prepare", *more]) == 0
    return f"{folder}/d_text_sentence"


def test_training_and_resuming(train: Any, assert_same: Any, sentences: str) -> None:
    """Both encoders begin with BERT's weights; resuming is bitwise, accuracies are in metrics."""
    data = f"--data-path {sentences} --eval-interval 2 --eval-iters 1 --save-interval 2"
    bert = train("bert", f"--model-family bert {SIZES} --train-iters 2 --data-path {sentences}")
    assert bert.status == 0, bert.err
    flags = f"{FLAGS} {data} --train-iters 4 --biencoder-projection-dim 8"
    begun = train("begun", f"{flags} --lr 1e-20 --bert-load {bert.directory}")
    assert begun.status == 0, begun.err
    weights, theirs = begun.saved(), bert.saved()
    for tower in ("query", "block"):
        for name in ("token_embedding.weight", "blocks.0.attention.qkv.weight"):
            assert bool((weights[f"model.{tower}.{name}"] == theirs[f"model.{name}"]).all())
    whole = train("whole", flags)
    assert whole.status == 0, whole.err
    assert {"valid_retrieval_accuracy", "valid_retrieval_top5_accuracy"} <= whole.rows[1].keys()
    more = train("more", f"{flags} --load {whole.directory}/checkpoints/iter_0000002")
    assert more.status == 0, more.err
    assert more.curve() == whole.curve()[2:]
    assert_same(more.saved(), whole.saved())
    load = f"--load {whole.directory}/checkpoints/iter_0000002"
    other = train("other", f"{flags} --use-one-sent-docs {load}")
    assert other.status != 0
    assert "use_one_sent_docs" in other.err or "order" in other.err, other.err


def test_encoders_of_another_run(train: Any, assert_same: Any, sentences: str) -> None:
    """`--ict-load` takes the weights alone and begins at step 0, as `--load DIR --finetune`."""
    flags = f"{FLAGS} --data-path {sentences} --eval-iters 0"
    first = train("first", f"{flags} --train-iters 2")
    assert first.status == 0, first.err
    flags = f"{flags} --train-iters 1 --lr 1e-3 --seed 5"
    again = train("again", f"{flags} --ict-load {first.directory}")
    assert again.status == 0, again.err
    same = train("same", f"{flags} --load {first.directory} --finetune")
    assert [row["step"] for row in again.rows] == [1]
    assert again.curve() == same.curve()
    assert_same(again.saved(), same.saved())


def test_refused(train: Any, sentences: str) -> None:
    """Settings that do not go together are named before anything is trained."""
    flags = f"{FLAGS} --train-iters 1"
    bert = train("bert", f"--model-family bert {SIZES} --train-iters 1 --data-path {sentences}")
    other = f"--bert-load {bert.directory}"
    for option, words in {
        "": "cannot be trained with the tokenizer `ByteTokenizer`",
        f"--data-path {sentences} --hidden-size 16 {other}": "has other sizes than the run's",
        f"--data-path {sentences} --titles-data-path {sentences}": "titles for",
        f"--data-path {sentences} --context-parallel-size 2": "not supported by ICT models",
        f"--data-path {sentences} --bert-load nowhere": "`nowhere`",
        f"--data-path {sentences} --ict-load {bert.directory}": "of another family of models",
    }.items():
        without = flags.replace("--hidden-size 32", "") if "--hidden-size" in option else flags
        run = train("run", f"{without} {option}")
        assert run.status != 0
        assert words in run.err, run.err
        assert not (run.directory / "metrics.jsonl").exists()


@pytest.fixture(scope="module")
def trained(train_once: Callable[..., Any], sentences: str) -> Any:
    """Return a run that learnt to find blocks."""
    return train_once(
        f"{FLAGS} {SHARED} --train-iters 100 --lr 1e-3 --eval-interval 100 --eval-iters 2",
        sentences,
    )


def test_the_checkpoint_of_an_index(
    trained: Any, sentences: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """Megatron's flag names it; a search names it if it is gone, and wrong questions."""

    def error(*argv: str) -> str:
        assert main(["index", *argv]) != 0
        return str(capsys.readouterr().err)

    index, run = str(tmp_path / "index"), tmp_path / "run"
    shutil.copytree(trained.directory, run)
    build = ["build", "--data-path", sentences, "--output", index, "--device", "cpu"]
    assert "needs a run or checkpoint" in error(*build)
    assert "two checkpoints" in error(*build, str(run), "--ict-load", str(trained.directory))
    assert main(["index", *build, "--ict-load", str(run)]) == 0
    run.rename(tmp_path / "moved")
    search = ["search", index, "--device", "cpu"]
    assert "its new place by `--load DIR`" in error(*search, "t1")
    assert main(["index", *search, "t1", "--load", str(tmp_path / "moved")]) == 0
    assert "leave one of them out" in error(*search, "t1", "--questions", "file")
    monkeypatch.setattr("sys.stdin", io.StringIO("t1\n\n"))
    assert "line 2 of standard input" in error(*search, "-")


def test_held_out_text_is_found(trained: Any, sentences: str, tmp_path: Path, capsys: Any) -> None:
    """From an index to answers, far above chance, on documents that were not trained on.

    A question is a sentence of a document, and its answer another sentence of it.
    """
    assert trained.rows[-1]["valid_loss"] < 0.8 * math.log(24)
    index, held_out = str(tmp_path / "index"), range(DOCUMENTS - 40, DOCUMENTS)
    build = [str(trained.directory), "--data-path", sentences, "--output", index, "--device", "cpu"]
    assert main(["index", "build", *build]) == 0
    questions = tmp_path / "questions"
    questions.write_text(
        "".join(f"{lines_of(number)[1]}\t{[lines_of(number)[4]]}\n" for number in held_out)
    )
    capsys.readouterr()
    asked = ["--questions", str(questions), "--top", "1", "5", "--json", "--device", "cpu"]
    assert main(["index", "search", index, *asked]) == 0
    places = [json.loads(line)["place"] for line in capsys.readouterr().out.splitlines()]
    found = sum(place is not None and place <= 5 for place in places) / len(places)
    chance = 5 / DOCUMENTS
    assert found > 10 * chance, places
    evaluate = ["evaluate", str(trained.directory), "--task", "nq", "--device", "cpu"]
    results, lines = tmp_path / "results.json", tmp_path / "examples.jsonl"
    more = ["--output", str(results), "--examples", str(lines), "--task-data", f"nq={questions}"]
    assert main([*evaluate, "--index", index, *more]) == 0
    assert "top20" in capsys.readouterr().out
    metrics = json.loads(results.read_text())[str(trained.directory)]["nq"]["metrics"]
    assert metrics["top5"]["value"] == pytest.approx(found)
    assert metrics["top5"]["error"] == pytest.approx((found * (1 - found) / 39) ** 0.5)
    own = [json.loads(line)["place"] for line in lines.read_text().splitlines()]
    assert [place if place and place <= 5 else None for place in own] == places
    for words, wanted in {
        "": "needs `--index DIR`",
        f"--index {index} --text {questions}": "cannot be combined with the task `nq`",
        f"--index {index} --task-data {tmp_path}": "no file of the task `nq`",
        f"--index {tmp_path} --task-data {questions}": "no index",
    }.items():
        assert main([*evaluate, *words.split()]) != 0
        assert wanted in capsys.readouterr().err
    assert main([*evaluate, "--index", index, *more[4:], "--examples", str(questions)]) != 0
    assert "is a file that the evaluation reads" in capsys.readouterr().err
    foreign = tmp_path / "notes.txt"
    foreign.write_text("notes")
    assert main([*evaluate, "--index", index, *more[4:], "--examples", str(foreign)]) != 0
    assert "has no examples of `lmcore evaluate`" in capsys.readouterr().err
    assert foreign.read_text() == "notes"
    assert main([*evaluate[:2], "--task", "lambada", "--index", index]) != 0
    assert "needs `--task nq`" in capsys.readouterr().err
