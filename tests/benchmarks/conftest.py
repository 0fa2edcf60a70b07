"""Fixtures of the benchmarks' tests: the scripts, a small vocabulary and a small corpus."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmcore.data.tokenizer.bpe_files import byte_alphabet

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MERGES = ("h e", "t h", "Ġ t", "i n", "Ġt he")
WORDS = ["the", "thin", "heather", "moved", "in", "a", "wind", "that", "nobody", "saw"]


@pytest.fixture
def importable(monkeypatch):
    """Let a test import the scripts; they are forgotten afterwards."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "path", list(sys.path))  # a script adds its folder, too
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == BENCHMARKS:
            del sys.modules[name]


@dataclass(frozen=True)
class Text:
    """Files in GPT-2's formats, and documents.

    Attributes:
        vocab, merges: A vocabulary of all bytes and a few words.
        bert: A BERT vocabulary of letters.
        corpus: JSON lines.
    """

    vocab: Path
    merges: Path
    corpus: Path
    bert: Path


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Text:
    """A vocabulary and a corpus."""
    folder = tmp_path_factory.mktemp("text")
    names = ("vocab.json", "merges.txt", "corpus.jsonl", "vocab.txt")
    made = Text(*(folder / name for name in names))
    tokens = [*byte_alphabet(), *(pair.replace(" ", "") for pair in MERGES), "<|endoftext|>"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    made.vocab.write_text(json.dumps(vocabulary), encoding="utf-8")
    made.merges.write_text("\n".join(["#version: 0.2", *MERGES, ""]), encoding="utf-8")
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    made.bert.write_text("\n".join(pieces), encoding="utf-8")
    dice = random.Random(0)
    documents = (" ".join(dice.choices(WORDS, k=300)) for _ in range(40))
    lines = [json.dumps({"text": f"{document}."}) + "\n" for document in documents]
    made.corpus.write_text("".join(lines), encoding="utf-8")
    return made
