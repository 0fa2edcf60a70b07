"""`lmcore data train-tokenizer` from the command line, and what other commands do with it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError, DataError
from lmcore.cli.data import run
from lmcore.data.indexed.metadata import read_metadata

_SMALL = ("SentencePieceTokenizer",)
"""Types whose vocabularies have not every byte, and must not be larger than the text allows."""


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Some documents, in the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "in.jsonl"
    lines = [
        json.dumps({"text": f"the house by the sea, number {i}\n", "id": i}) for i in range(99)
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "kind",
    [
        *("GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase", "HFTokenizer"),
        *("SentencePieceTokenizer", "Llama2Tokenizer"),
    ],
)
def test_next_command_works(
    kind: str,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command that is shown next prepares data with the new tokenizer."""
    argv = ["--input", str(text), "--output-dir", str(tmp_path / "new dir")]
    size = "30" if kind in _SMALL else "290"
    assert run(["train-tokenizer", *argv, "--tokenizer-type", kind, "--vocab-size", size]) == 0
    captured = capsys.readouterr()
    assert "bytes of text per token" in captured.out
    assert "training on" in captured.err
    of_sentences = kind.startswith("Bert") or kind == "SentencePieceTokenizer"
    assert ("for BERT, T5 or ICT add `--split-sentences`" in captured.out) == of_sentences
    words = shlex.split(captured.out.rpartition("next: lmcore data ")[2])
    assert run(words) == 0
    metadata = read_metadata("new dir_text_document")
    assert metadata is not None
    assert (metadata.tokenizer["type"], metadata.documents) == (kind, 99)
    assert metadata.append_eod


def test_next_command_has_the_keys_and_the_format(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The keys and the format of the input are part of the next command that is shown."""
    text.rename("in.dat")
    Path("in.dat").write_text(Path("in.dat").read_text().replace('"text"', '"body"'))
    argv = ["train-tokenizer", "--input", "in.dat", "--output-dir", "v", "--vocab-size", "290"]
    assert run([*argv, "--json-keys", "body", "--input-format", "jsonl"]) == 0
    words = shlex.split(capsys.readouterr().out.rpartition("next: lmcore data ")[2])
    assert words[3:5] == ["--input-format", "jsonl"]
    assert run(words) == 0
    assert Path("v_body_document.idx").exists()


def test_json(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` prints the report alone on standard output, and less than asked for is said."""
    argv = ["train-tokenizer", "--input", str(text), "--output-dir"]
    assert run([*argv, str(tmp_path / "a"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["documents"] == 99
    assert report["tokenizer"]["vocab_file"] == str(tmp_path / "a/vocab.json")
    assert report["vocab_size"] < 32000
    run([*argv, str(tmp_path / "b")])
    assert "fewer than the 32,000 requested" in capsys.readouterr().out


def test_skipped_documents(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Documents that cannot be used stop the command, or are counted."""
    with text.open("a") as stream:
        stream.write('\n{"text": 3}\n')
    argv = ["train-tokenizer", "--input", str(text), "--vocab-size", "290"]
    with pytest.raises(DataError, match="line 100: not a string"):
        run([*argv, "--output-dir", str(tmp_path / "a")])
    assert run([*argv, "--output-dir", str(tmp_path / "b"), "--on-error", "skip"]) == 0
    assert "skipped documents: 1 not a string" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags,problem",
    [
        (["--vocab-size", "0"], "out of range"),
        (["--model-type", "wordpiece"], "unknown choice"),
        (["--tokenizer-type", "NullTokenizer"], "cannot be trained"),
        (["--vocab-size", "256"], "bytes of its type: 257"),
        (["--vocab-size", "258", "--special-tokens", "<a>", "<b>"], "type: 259"),
        (["--vocab-size", "4", "--tokenizer-type", "BertWordPieceCase"], "type: 5"),
        (["--vocab-size", "2", "--tokenizer-type", "SentencePieceTokenizer"], "type: 3"),
        (["--vocab-size", "10", "--tokenizer-type", "Llama2Tokenizer"], "type: 259"),
        (["--character-coverage", "1.5"], "out of range"),
    ],
)
def test_wrong_flags(flags: list[str], problem: str, text: Path, tmp_path: Path) -> None:
    """Invalid values of flags are reported before anything is read."""
    argv = ["train-tokenizer", "--input", "nowhere", "--output-dir", str(tmp_path / "new")]
    with pytest.raises(ConfigError, match=problem) as caught:
        run([*argv, *flags])
    assert "did you mean `HFTokenizer`" not in caught.value.render()
    assert not (tmp_path / "new").exists()
