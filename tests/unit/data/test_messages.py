"""Whole messages of the data path, as a user reads them; `UPDATE_GOLDEN=1` rewrites the files."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcore.base.errors import LmcoreError
from lmcore.config.derived.split import parse_split
from lmcore.data.blend.train_split import split_ranges
from lmcore.data.blend.weights import DatasetTokens, weigh
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.writer import IndexedDatasetWriter
from lmcore.data.input.options import InputOptions
from lmcore.data.prepare.run import PrepareRequest, prepare
from lmcore.data.tokenizer import ByteTokenizer, GPT2BPETokenizer, build_tokenizer
from lmcore.data.tools.merge import merge
from lmcore.data.tools.repair import RepairRequest, repair

GOLDEN = Path(__file__).parents[2] / "golden/errors"


def _prepare(text: bytes, *keys: str) -> Callable[[], object]:
    def run() -> None:
        Path("web.jsonl").write_bytes(text)
        request = PrepareRequest(
            ("web.jsonl",), "out", ByteTokenizer(), json_keys=keys or ("text",)
        )
        prepare(request)

    return run


def _prepare_file(
    name: str, content: bytes, other: str | None = None, source: str | None = None
) -> Callable[[], object]:
    def run() -> None:
        Path("in").mkdir()
        Path(name).write_bytes(content)
        if other is not None:
            Path(other).write_text("", encoding="utf-8")
        reading = InputOptions(max_document_bytes=1000)
        prepare(PrepareRequest((source or name,), "out", ByteTokenizer(), reading=reading))

    return run


def _open(cut: str, size: int, name: str = "web_text_document") -> Callable[[], object]:
    def run() -> None:
        with IndexedDatasetWriter("web_text_document", "uint16") as writer:
            writer.add_document([1, 2, 3])
        if size >= 0:
            path = Path(f"web_text_document.{cut}")
            path.write_bytes(path.read_bytes()[:size])
        IndexedDataset(name)

    return run


def _merges(bpe_files: tuple[Path, Path], rules: str) -> Callable[[], object]:
    def run() -> None:
        vocab, merges = Path("vocab.json"), Path("merges.txt")
        vocab.write_bytes(bpe_files[0].read_bytes())
        merges.write_text(rules, encoding="utf-8")
        tokenizer = GPT2BPETokenizer(vocab.name, merges.name)
        assert tokenizer.eod is None

    return run


def _datasets(second: str, run: Callable[[], object]) -> Callable[[], object]:
    def make_and_run() -> None:
        for name, dtype in (("web-00", "uint16"), ("web-01", second)):
            with IndexedDatasetWriter(name, dtype) as writer:
                writer.add_document([1, 2, 3])
        run()

    return make_and_run


def _repair_cut() -> None:
    Path("web-00.bin").write_bytes(b"\1\0")
    repair(RepairRequest("web-00"))


GOOD = b'{"text": "good"}\n'
CASES: dict[str, Callable[[], object]] = {
    "broken_json": _prepare(GOOD + b'{"text": "a\n'),
    "array": _prepare(b'[\n{"text": "a"}\n]\n'),
    "key_missing": _prepare(GOOD, "txt"),
    "not_a_string": _prepare(b'{"text": [1, 2]}\n'),
    "not_utf8": _prepare(GOOD + b'{"text": "caf\xe9"}\n'),
    "surrogate": _prepare(b'{"text": "\\ud800"}\n'),
    "empty": _prepare(b""),
    "no_text": _prepare(b'{"text": ""}\n'),
    "idx_cut": _open("idx", 40),
    "idx_header_cut": _open("idx", 20),
    "bin_cut": _open("bin", 4),
    "prefix_with_ending": _open("bin", -1, "web_text_document.bin"),
    "prefix_without_key": _open("bin", -1, "web"),
    "no_validation": lambda: split_ranges(10, parse_split("979,20,1"), needed=("train", "valid")),
    "tokenizer_unknown": lambda: build_tokenizer("GPT2BPETokeniser"),
    "tokenizer_files": lambda: build_tokenizer("GPT2BPETokenizer"),
    "merge_token_types": _datasets("int32", lambda: merge(["web-00", "web-01"], "web")),
    "merge_twice": _datasets("uint16", lambda: merge(["web-00", "web-01", "web-00"], "web")),
    "repair_cut": _datasets("uint16", _repair_cut),
    "weights_epochs": lambda: weigh([DatasetTokens("wiki_00", 5)], {"wiki": 2.0}),
    "csv_column": _prepare_file("web.csv", b"id,texte\n1,a\n"),
    "csv_delimiter": _prepare_file("web.csv", b"id;text\n1;a\n"),
    "csv_fields": _prepare_file("web.csv", b"id,text\n1,a,b\n"),
    "csv_quote": _prepare_file("web.csv", b'id,text\n1,"a\n' + b"2,b\n" * 300),
    "json_broken": _prepare_file("web.json", b'[{"text": "a"},\n{"text": }]'),
    "json_cut": _prepare_file("web.json", b'[{"text": "a"},\n'),
    "parquet_cut": _prepare_file("web.parquet", b"PAR1" + bytes(40)),
    "text_as_lines": _prepare_file("book", b"Chapter 1\n"),
    "text_too_long": _prepare_file("web.txt", b"y" * 2000),
    "archive_cut": _prepare_file("web.jsonl.gz", gzip.compress(GOOD)[:-4]),
    "input_missing": lambda: prepare(PrepareRequest(("web.jsonl",), "out", ByteTokenizer())),
}


def compare(name: str, run: Callable[[], object]) -> None:
    with pytest.raises(LmcoreError) as caught:
        run()
    text = f"{caught.value.render()}\n"
    golden = GOLDEN / f"data_{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CASES)
def test_message(name, tmp_path, monkeypatch):
    """The message says what, why and what to do, in the same words as recorded."""
    monkeypatch.chdir(tmp_path)
    compare(name, CASES[name])


@pytest.mark.parametrize(
    "name, rules", [("merges_foreign", "#version: 0.2\nh e\nq z\n"), ("merges_cut", "h e\nl l\n")]
)
def test_merges_message(name, rules, bpe_files, tmp_path, monkeypatch):
    """A vocabulary and merges that do not belong together are reported in the recorded words."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    compare(name, _merges(bpe_files, rules))


def test_vocabulary_message(tmp_path, monkeypatch):
    """A vocabulary without bytes is reported in the recorded words."""
    monkeypatch.chdir(tmp_path)
    Path("vocab.json").write_text(json.dumps({"a": 0}), encoding="utf-8")
    Path("merges.txt").write_text("", encoding="utf-8")
    compare("vocab_not_bytes", lambda: GPT2BPETokenizer("vocab.json", "merges.txt"))


def test_no_stale_recording():
    """Every recorded message belongs to a case."""
    cases = {*CASES, "merges_foreign", "merges_cut", "vocab_not_bytes"}
    assert {path.stem for path in GOLDEN.glob("data_*.txt")} == {f"data_{name}" for name in cases}
