"""`lmcore data inspect` and `lmcore data repair` from the command line."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError, DataError
from lmcore.cli.data import run
from lmcore.data.indexed.metadata import DatasetMetadata, metadata_path, write_metadata
from lmcore.data.indexed.writer import IndexedDatasetWriter
from lmcore.data.tokenizer import ByteTokenizer, build_tokenizer

BYTES = ["--tokenizer-type", "ByteTokenizer"]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """A dataset of `hi` twice and `no`, each with its end, and metadata."""
    path = f"{tmp_path}/x_text_document"
    tokenizer = ByteTokenizer()
    with IndexedDatasetWriter(path, "uint16") as writer:
        for text in ("hi", "hi", "no"):
            writer.add_document([*tokenizer.encode(text), tokenizer.eod])
    metadata = DatasetMetadata.of(
        tokenizer, append_eod=True, documents=3, sequences=3, tokens=9, dtype="uint16"
    )
    write_metadata(path, metadata)
    return path


def test_documents(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Documents are shown as text by the tokenizer that the metadata names."""
    assert run(["inspect", prefix, "--document", "0", "2"]) == 0
    shown = capsys.readouterr().out
    assert "document 0: 3 tokens\nhi" in shown
    assert "document 2: 3 tokens\nno" in shown
    run(["inspect", f"{prefix}.idx", "--document", "2", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert [one["text"][:2] for one in report["shown"]] == ["no"]
    with pytest.raises(DataError, match="documents are 0 to 2"):
        run(["inspect", prefix, "--document", "3"])


def test_documents_on_a_terminal(
    prefix: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text of a document does not command the terminal; elsewhere it is as it is."""
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        writer.add_document([*ByteTokenizer().encode("a\x1b[2Jb"), 256])
    metadata_path(prefix).unlink()
    run(["inspect", prefix, "--document", "0", *BYTES])
    assert "a\x1b[2Jb" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    run(["inspect", prefix, "--document", "0", *BYTES])
    assert "a\N{REPLACEMENT CHARACTER}[2Jb" in capsys.readouterr().out


def test_scan(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A scan shows frequent tokens with what they say, copies and ends."""
    assert run(["inspect", prefix, "--scan", "--top", "2"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "duplicates 1 document equal to an earlier one" in lines
    assert "such as 1 equals 0" in lines
    assert "end with 256 3 documents" in lines
    assert "256 elsewhere 0 times" in lines
    assert lines[-1] == '104 2 "h"'


def test_without_metadata(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The ids are shown, and ends are looked for where their id is named."""
    metadata_path(prefix).unlink()
    assert run(["inspect", prefix, "--scan", "--document", "2"]) == 0
    shown = capsys.readouterr().out
    assert "not searched; give the token with `--eod`" in shown
    assert shown.endswith("document 2: 3 tokens\n110 111 256\n")
    run(["inspect", prefix, "--scan", "--eod", "256", "--json"])
    assert json.loads(capsys.readouterr().out)["scan"]["ended"] == 3


def test_altered_tokenizer(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A tokenizer that is not the recorded one is an error; a scan goes without it, and says so."""
    path = metadata_path(prefix)
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "fingerprint": "0" * 64}))
    with pytest.raises(ConfigError, match="have changed"):
        run(["inspect", prefix, "--document", "0"])
    assert run(["inspect", prefix, "--scan"]) == 0
    assert "no text: the tokenizer files" in capsys.readouterr().out


def test_given_tokenizer(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Data without metadata is read as text with a tokenizer that flags name; so is its end."""
    metadata_path(prefix).unlink()
    assert run(["inspect", prefix, "--document", "2", *BYTES]) == 0
    assert "document 2: 3 tokens\nno" in capsys.readouterr().out
    run(["inspect", prefix, "--scan", "--json", *BYTES])
    assert json.loads(capsys.readouterr().out)["scan"]["ended"] == 3
    small = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "110"]
    assert run(["inspect", prefix, "--scan", *small]) == 1
    assert "4 tokens outside the ids of the tokenizer's vocabulary" in capsys.readouterr().out
    with pytest.raises(DataError, match="document 0 cannot be decoded"):
        run(["inspect", prefix, "--document", "0", *small[:-1], "7"])


def test_options_of_a_tokenizer_need_its_type(prefix: str) -> None:
    """Nothing is guessed where neither flags nor metadata say what type it is."""
    metadata_path(prefix).unlink()
    with pytest.raises(ConfigError, match="no tokenizer type is given"):
        run(["inspect", prefix, "--document", "0", "--vocab-file", "v.json"])


def test_files_that_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags alone locate moved files; another tokenizer causes a warning."""
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhi\nno\n", encoding="utf-8")
    tokenizer = build_tokenizer("BertWordPieceCase", vocab_file=str(vocabulary))
    prefix = f"{tmp_path}/x_text_document"
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        writer.add_document(tokenizer.encode("no hi"))
    metadata = DatasetMetadata.of(
        tokenizer, append_eod=False, documents=1, sequences=1, tokens=2, dtype="uint16"
    )
    write_metadata(prefix, metadata)
    moved = vocabulary.rename(tmp_path / "moved.txt")
    with pytest.raises(ConfigError, match="cannot be built"):
        run(["inspect", prefix, "--document", "0"])
    assert run(["inspect", prefix, "--document", "0", "--vocab-file", str(moved)]) == 0
    assert "2 tokens\nno hi" in capsys.readouterr().out


def test_another_tokenizer(
    prefix: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A tokenizer that is not the recorded one is used as asked, with a warning."""
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "300"]
    assert run(["inspect", prefix, "--document", "2", *null]) == 0
    assert "document 2: 3 tokens\n110 111 256" in capsys.readouterr().out
    assert "was prepared with another tokenizer than the one given" in caplog.text


def test_repair(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing index is made again by what the metadata says; then there is nothing to repair."""
    index = Path(f"{prefix}.idx")
    sound = index.read_bytes()
    index.unlink()
    assert run(["repair", prefix]) == 0
    shown = capsys.readouterr().out
    assert "the index is missing" in shown
    assert f"new: {prefix}.idx" in shown
    assert index.read_bytes() == sound
    run(["repair", prefix])
    assert "nothing to repair" in capsys.readouterr().out
    run(["repair", prefix, "--hyphens", "--json"])
    assert json.loads(capsys.readouterr().out)["prefix"].endswith("/x-text-document")


def test_merge_takes_megatrons_flag(prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    """`--multimodal` of the merging script changes nothing, and a line says so."""
    output = f"{Path(prefix).parent}/merged"
    flags = ["--datasets", prefix, "--output-prefix", output, "--multimodal"]
    with caplog.at_level(logging.INFO, logger="lmcore"):
        assert run(["merge", *flags]) == 0
    assert "changes nothing here:\n  `--multimodal`: modes are kept" in caplog.text
