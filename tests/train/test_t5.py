"""Whole runs of T5: resumed, in other layouts, shared with Hugging Face, pretrained shortly."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcore.cli.main import main
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.data.indexed.metadata import DatasetMetadata, write_metadata
from lmcore.data.indexed.writer import IndexedDatasetWriter
from lmcore.data.tokenizer import tokenizer_from

RANK = ["-m", "lmcore.cli.main"]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
FLAGS = (
    "--model-family t5 --micro-batch-size 2 --global-batch-size 4 --train-iters 6 --lr 1e-2"
    " --eval-interval 3 --eval-iters 1 --split 8,1,1 --save-interval 3 --init-method-std 0.2"
    " --decoder-num-layers 1"
)
ORIGINAL = (
    "--position-embedding-type relative --normalization RMSNorm --no-add-bias-linear"
    " --no-t5-head-bias --no-t5-scaled-attention --t5-scaled-head --t5-feed-forward relu"
)
PP = "--pipeline-model-parallel-size 2"
CLOSE = 2e-6


@pytest.fixture(scope="session")
def spans(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Writes sentences of random words, and returns their prefix."""

    def write(sentinels: int = 20, sentences: int = 4) -> str:
        folder = tmp_path_factory.mktemp("spans")
        words = [*SPECIAL, *(f"word{number}" for number in range(40))]
        (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
        tokenizer = tokenizer_from(
            TokenizerSettings(
                "BertWordPieceLowerCase",
                vocab_file=str(folder / "vocab.txt"),
                vocab_extra_ids=sentinels,
            )
        )
        drawn, prefix = np.random.default_rng(4), str(folder / "text")
        with IndexedDatasetWriter(prefix, np.uint16) as writer:
            for _ in range(60):
                lengths = drawn.integers(8, 13, sentences)
                writer.add_document(drawn.integers(5, 45, lengths.sum()), lengths)
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

    return write


@pytest.mark.parametrize("kind", ["", ORIGINAL], ids=["megatron", "original"])
def test_resuming(
    train: Any, spans: Callable[..., str], assert_same: Any, tmp_path: Path, kind: str, capsys: Any
) -> None:
    """A run that resumes is the uninterrupted one, bit for bit, with dropout and recomputation."""
    flags = f"{FLAGS} {kind} --hidden-dropout 0.1 --attention-dropout 0.1 --recompute full"
    prefix = spans()
    whole = train("whole", flags, prefix)
    assert whole.status == 0, whole.err
    assert "model     T5, " in whole.err
    assert whole.summary["test_loss"] is not None
    command = f"lmcore generate --load {whole.directory} --prompt TEXT"
    assert f"answers         {command}\n" in whole.out
    more = train("more", f"{flags} --load {whole.directory}/checkpoints/iter_0000003", prefix)
    assert more.status == 0, more.err
    assert more.curve() == whole.curve()[3:]
    assert_same(more.saved(), whole.saved())
    capsys.readouterr()
    load = ["--load", str(whole.directory)]
    ask = ["generate", *load, "--prompt", "w3 w5", "--device", "cpu", "--tokens", "4"]
    assert main([*ask, "--greedy", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["tokens"]) == 4 or answer["finished"]
    assert main([*ask, "--beam-width", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == answer["tokens"]
    assert main([*ask, "--greedy"]) == 0
    assert capsys.readouterr().out.strip() == answer["text"].strip(), "without the prompt"
    for flag, words in {
        "--no-cache": "models with an encoder",
        "--quantization int8": "T5",
    }.items():
        assert main([*ask, *flag.split()]) != 0
        assert words in capsys.readouterr().err


@pytest.mark.distributed
@pytest.mark.parametrize(
    "more",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel",
        pytest.param(f"{PP} --pipeline-schedule gpipe --recompute full", marks=pytest.mark.full),
        pytest.param(f"{PP} --compile", marks=pytest.mark.full),
        pytest.param("", marks=pytest.mark.full),
        pytest.param("--zero-stage 1", marks=pytest.mark.full),
    ],
)
def test_processes(train: Any, as_ranks: Any, spans: Callable[..., str], more: str) -> None:
    """Two processes take the steps of one."""
    prefix = spans()
    flags = f"{FLAGS} --data-path {prefix} --make-vocab-size-divisible-by 16"
    whole = train("whole", flags, prefix)
    assert whole.status == 0, whole.err
    run = as_ranks("ranks", f"{flags} {more}", [RANK, RANK])
    assert run.status == 0, run.err
    for one, other in zip(run.rows, whole.rows, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=CLOSE)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=CLOSE * 10)


@pytest.mark.distributed
def test_a_pipeline_continues(
    train: Any, as_ranks: Any, spans: Callable[..., str], assert_same: Any
) -> None:
    """A run of encoder and decoder in two processes is the run of one, and continues bit for bit.

    One process continues it, and it continues the run of one process.
    """
    prefix = spans()
    flags = f"{FLAGS} {ORIGINAL} --data-path {prefix} --make-vocab-size-divisible-by 16"
    whole = train("whole", flags, prefix)
    assert whole.status == 0, whole.err
    divided = as_ranks("divided", f"{flags} {PP}", [RANK, RANK])
    assert divided.status == 0, divided.err
    assert "stages    encoder layers 0-1 | decoder layers 0" in divided.err
    half = "checkpoints/iter_0000003"
    again = as_ranks("again", f"{flags} {PP} --load {divided.directory}/{half}", [RANK, RANK])
    assert again.status == 0, again.err
    assert again.curve() == divided.curve()[3:]
    assert_same(again.saved(), divided.saved())
    joined = train("joined", f"{flags} --load {divided.directory}/{half}", prefix)
    parted = as_ranks("parted", f"{flags} {PP} --load {whole.directory}/{half}", [RANK, RANK])
    for run in (divided, joined, parted):
        assert run.status == 0, run.err
        assert run.summary["test_loss"] == pytest.approx(whole.summary["test_loss"], rel=CLOSE)
        for one, other in zip(run.rows[::-1], whole.rows[::-1], strict=False):
            assert one["loss"] == pytest.approx(other["loss"], rel=CLOSE)
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=CLOSE * 10)


def test_a_run_goes_away_and_back(
    train: Any, spans: Callable[..., str], tmp_path: Path, assert_same: Any
) -> None:
    """A run becomes a model of transformers, which another run is trained from."""
    prefix = spans()
    run = train("run", f"{FLAGS} {ORIGINAL}", prefix)
    assert run.status == 0, run.err
    away = tmp_path / "away"
    command = ["checkpoint", "convert", str(run.directory), str(away), "--to", "huggingface"]
    assert main(command) == 0
    config = json.loads((away / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "t5"
    # [PAD] is 0; [BOS] and [EOS] follow the 45 words.
    names = ("decoder_start_token_id", "eos_token_id", "pad_token_id")
    assert [config[name] for name in names] == [45, 46, 0]
    tuned = train("tuned", f"{FLAGS} --load {away}".replace(" --decoder-num-layers 1", ""), prefix)
    assert tuned.status == 0, tuned.err
    assert tuned.saved().keys() == run.saved().keys()


@pytest.mark.parametrize(
    "data, more, message",
    [
        ({"sentinels": 0}, "", "its vocabulary has no sentinels"),
        ({"sentinels": 1}, "--seq-length 128", "needs more sentinels than the tokenizer's 1"),
        ({"sentences": 1}, "--seq-length 8", "is not split into sentences, of which T5's"),
        ({}, "--decoder-seq-length 2", "`--decoder-seq-length 2` is too short for T5"),
        ({}, "--context-parallel-size 2", "is not supported by T5 models"),
    ],
)
def test_what_does_not_fit(
    train: Any, spans: Callable[..., str], data: dict[str, int], more: str, message: str
) -> None:
    """Sentinels, lengths and data are checked before the run begins."""
    run = train("run", f"{FLAGS} {more}", spans(**data))
    assert run.status != 0
    assert message in run.err
    assert not (run.directory / "metrics.jsonl").exists()


@pytest.fixture(scope="session")
def articles(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the prefix of articles, with the original T5's tokenizer and 100 sentinels."""
    folder = tmp_path_factory.mktemp("articles")
    source = shared_data / "corpora/wiki/squad-wikipedia-articles-a.jsonl.gz"
    model = shared_data / "tokenizers/t5/spiece.model"
    with gzip.open(source, "rt") as lines, (folder / "text.jsonl").open("w") as stream:
        for _, line in zip(range(12), lines, strict=False):
            text = json.loads(line)["text"].replace("\n", " ").replace(". ", ".\n")
            stream.write(json.dumps({"text": text}) + "\n")
    arguments = {
        "input": folder / "text.jsonl",
        "output-prefix": folder / "text",
        "tokenizer-type": "SentencePieceTokenizer",
        "tokenizer-model": model,
        "vocab-extra-ids": 100,
    }
    flags = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    assert main(["data", "prepare", "--presplit-sentences", *flags]) == 0
    return f"{folder}/text_text_sentence"


def test_pretraining(train: Any, articles: str) -> None:
    """The validation loss of a short pretraining falls."""
    run = train(
        "run",
        "--model-family t5 --seq-length 48 --decoder-seq-length 16 --hidden-size 32"
        " --micro-batch-size 8 --train-iters 60 --eval-interval 20 --eval-iters 6"
        " --lr 1e-2 --split 8,2,0 --num-layers 1",
        articles,
    )
    assert run.status == 0, run.err
    losses = [row["valid_loss"] for row in run.rows if row.get("valid_loss") is not None]
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0], losses
