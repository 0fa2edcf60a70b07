"""Vocabularies trained from text, and the tokenizers that they make."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmcore.base.errors import ConfigError, DataError
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.data.tokenizer import Tokenizer, special_ids, spellings, tokenizer_from
from lmcore_data_tools.tokenizer_training.train import (
    TrainingReport,
    TrainingRequest,
    train_tokenizer,
)
from lmcore_data_tools.tokenizer_training.trainers import KINDS, Recipe

# ruff: noqa: RUF001  # Turkish has a letter that looks like another
STEMS = "ev okul kitap göz deniz ağaç çocuk şehir yol gün İstanbul ılık güzel büyük".split
ENDINGS = "lar ler da de dan den ı i ım im lık lik imizden ları lerinde".split
LOSSLESS = ("GPT2BPETokenizer", "HFTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")


def turkish() -> list[str]:
    """Return words of stems and endings, like Turkish words."""
    return [
        " ".join(stem + ending + STEMS()[(i + j) % len(STEMS())] for j, stem in enumerate(STEMS()))
        for i, ending in enumerate(ENDINGS() * 20)
    ]


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A file of Turkish documents."""
    path = tmp_path / "tr.jsonl"
    lines = [json.dumps({"text": line + ".\n\nVe " + line}) for line in turkish()]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def train(
    text: str, output: Path, kind: str, *, vocab_size: int = 400, **recipe: Any
) -> tuple[TrainingReport, Tokenizer]:
    """Train a type, and build it from what the report says."""
    request = TrainingRequest((text,), str(output), kind, Recipe(vocab_size, **recipe))
    report = train_tokenizer(request)
    return report, tokenizer_from(TokenizerSettings.described(report.tokenizer))


@pytest.mark.parametrize("kind", KINDS)
def test_every_type(kind: str, text: str, tmp_path: Path) -> None:
    """A trained tokenizer has the requested size, works unchanged, and shortens its language."""
    report, tokenizer = train(text, tmp_path / "new", kind)
    added = {"BertWordPieceCase": 2, "BertWordPieceLowerCase": 2, "SentencePieceTokenizer": 5}
    assert report.vocab_size == tokenizer.vocab_size == 400 + added.get(kind, 0)
    assert report.eod == tokenizer.eod is not None
    assert report.documents == len(turkish())
    assert report.bytes_per_token > 2.5
    sample = turkish()[3]
    ids = tokenizer.encode(sample)
    assert len(sample.encode()) / len(ids) > 2.5
    assert special_ids(tokenizer).unk not in ids
    if kind in LOSSLESS:
        for odd in (sample, "漢字 \N{SAUROPOD}", "a  b\n\n c"):
            assert tokenizer.decode(tokenizer.encode(odd)).removeprefix("<s> ") == odd
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "tr.jsonl"]


SCRIPT = """
import sys
from lmcore_data_tools.tokenizer_training.train import TrainingRequest, train_tokenizer
from lmcore_data_tools.tokenizer_training.trainers import Recipe
for kind in sys.argv[3:]:
    train_tokenizer(TrainingRequest((sys.argv[1],), sys.argv[2] + kind, kind, Recipe(400)))
"""


def test_same_text_same_files(text: str, tmp_path: Path) -> None:
    """Another process, with other hashes and another number of threads, writes the same bytes."""
    for name, threads in (("a-", "1"), ("b-", "3")):
        variables = {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        subprocess.run(
            [sys.executable, "-c", SCRIPT, text, str(tmp_path / name), *KINDS],
            env={**os.environ, **variables},
            check=True,
        )
    for kind in KINDS:
        files = sorted((tmp_path / f"a-{kind}").iterdir())
        assert files
        for path in files:
            other = tmp_path / f"b-{kind}" / path.name
            assert path.read_bytes() == other.read_bytes(), path


def test_gpt2_layout(text: str, tmp_path: Path) -> None:
    """Bytes come first, then the merges in their order, then the end of a document."""
    _, tokenizer = train(text, tmp_path / "new", "GPT2BPETokenizer", special_tokens=("<|user|>",))
    vocabulary = json.loads((tmp_path / "new/vocab.json").read_text(encoding="utf-8"))
    header, *merges = (tmp_path / "new/merges.txt").read_text(encoding="utf-8").splitlines()
    assert header == "#version: 0.2"
    assert list(vocabulary.values()) == list(range(400))
    assert [vocabulary[merge.replace(" ", "")] for merge in merges] == list(range(256, 398))
    assert (vocabulary["<|user|>"], vocabulary["<|endoftext|>"]) == (398, 399)
    assert tokenizer.encode("\n\n") == [vocabulary["ĊĊ"]]


def test_wordpiece_layout(text: str, tmp_path: Path) -> None:
    """Special tokens come first, and lower case takes accents off letters that have them."""
    _, lower = train(text, tmp_path / "lower", "BertWordPieceLowerCase", special_tokens=("[DOC]",))
    assert spellings(lower)[:6] == ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[DOC]")
    assert not any(letter in "".join(spellings(lower)) for letter in "şğü")
    _, cased = train(text, tmp_path / "cased", "BertWordPieceCase")
    assert {"ş", "##ğ", "İ"} <= set(spellings(cased))


def test_rare_letters_are_left_out(tmp_path: Path) -> None:
    """Of WordPiece's letters those are kept that make up the share asked for, and all of ASCII."""
    path = tmp_path / "in.txt"
    path.write_text("ab " * 5000 + "漢 字 z\n", encoding="utf-8")
    settings: dict[str, Any] = {"vocab_size": 30, "min_frequency": 1}
    _, all_letters = train(
        str(path), tmp_path / "all", "BertWordPieceCase", **settings, character_coverage=1.0
    )
    _, most = train(
        str(path), tmp_path / "most", "BertWordPieceCase", **settings, character_coverage=0.99
    )
    assert "漢" in spellings(all_letters)
    assert "漢" not in spellings(most)
    assert "z" in spellings(most)


def test_min_frequency(text: str, tmp_path: Path) -> None:
    """Pairs that are too rare are not joined, so that a vocabulary can stay smaller."""
    report, _ = train(
        text, tmp_path / "new", "GPT2BPETokenizer", vocab_size=5000, min_frequency=1000
    )
    assert 258 < report.vocab_size < 400


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_sentence_piece_models(model_type: str, text: str, tmp_path: Path) -> None:
    """Both models of SentencePiece can be had; T5's ids are T5's, special tokens are no text."""
    _, tokenizer = train(
        text, tmp_path / "new", "SentencePieceTokenizer",
        model_type=model_type, special_tokens=("<sep>",),
    )  # fmt: skip
    special = special_ids(tokenizer)
    assert (special.pad, special.eos, special.unk) == (0, 1, 2)
    own = spellings(tokenizer).index("<sep>")
    assert own not in tokenizer.encode("a <sep> b")


def test_sample_of_the_text(text: str, tmp_path: Path) -> None:
    """Of more text than asked for a part is trained on."""
    request = TrainingRequest(
        (text,), str(tmp_path / "new"), "GPT2BPETokenizer", Recipe(300), sample_bytes=9000
    )
    report = train_tokenizer(request)
    assert report.trained_bytes <= 9000 < report.bytes


@pytest.mark.parametrize(
    "kind,recipe,what",
    [
        ("ByteTokenizer", Recipe(400), "`--tokenizer-type ByteTokenizer` cannot be trained"),
        ("GPT2BPETokenizer", Recipe(256), "`--vocab-size 256` is too small for the special"),
        ("BertWordPieceCase", Recipe(20), "`--vocab-size 20` is too small for the letters"),
        ("GPT2BPETokenizer", Recipe(400, model_type="bpe"), "`--model-type` cannot be combined"),
        ("Llama2Tokenizer", Recipe(400, min_frequency=3), "`--min-frequency` cannot be combined"),
        ("HFTokenizer", Recipe(400, ("user",)), "`--special-tokens user`: not a special token"),
        ("HFTokenizer", Recipe(400, ("<a b>",)), "`--special-tokens <a b>`: not a special token"),
        ("Llama2Tokenizer", Recipe(260), "no SentencePiece model of 260 pieces can be trained"),
        ("SentencePieceTokenizer", Recipe(90000), "no SentencePiece model of 90000 pieces can be"),
    ],
)
def test_refusals(kind: str, recipe: Recipe, what: str, text: str, tmp_path: Path) -> None:
    """A vocabulary that cannot be trained is an error, and nothing is left behind."""
    with pytest.raises((ConfigError, DataError)) as caught:
        train_tokenizer(TrainingRequest((text,), str(tmp_path / "new"), kind, recipe))
    assert caught.value.what.startswith(what)
    assert [path.name for path in tmp_path.iterdir()] == ["tr.jsonl"]


def test_the_working_directory_is_not_replaced(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty working directory is refused: the process would be left in a deleted one."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(ConfigError, match="is the working directory"):
        train(text, Path(), "GPT2BPETokenizer")


def test_directory_in_use(text: str, tmp_path: Path) -> None:
    """A tokenizer is never written over; an empty directory will do."""
    (tmp_path / "new").mkdir()
    train(text, tmp_path / "new", "GPT2BPETokenizer")
    before = (tmp_path / "new/merges.txt").read_bytes()
    with pytest.raises(ConfigError, match="exists already"):
        train(text, tmp_path / "new", "GPT2BPETokenizer", vocab_size=300)
    assert (tmp_path / "new/merges.txt").read_bytes() == before


def test_interruption_leaves_nothing(text: str, tmp_path: Path) -> None:
    """A run that is stopped before its end leaves no directory."""

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    request = TrainingRequest((text,), str(tmp_path / "new"), "GPT2BPETokenizer", Recipe(300))
    with pytest.raises(KeyboardInterrupt):
        train_tokenizer(request, training=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["tr.jsonl"]
