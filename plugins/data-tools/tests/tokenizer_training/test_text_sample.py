"""The sample of lines that a vocabulary is trained on."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.base.errors import DataError, counted
from lmcore_data_tools.tokenizer_training.text_sample import ReadProgress, TextSample, read_sample

BIG = 1 << 20


@given(st.lists(st.text(), max_size=5))
def test_all_is_kept_where_there_is_room(texts: list[str]) -> None:
    """The lines of documents that fit are all there, in order, ends included."""
    sample = TextSample(BIG)
    for text in texts:
        sample.add(text)
    assert "".join(sample.lines) == "".join(texts)
    assert sample.kept_bytes == sample.bytes == len("".join(texts).encode())


@given(st.integers(1, 4000), st.integers(10, 400))
def test_limit_is_kept(limit: int, count: int) -> None:
    """Never more than the limit is kept, and what is kept is some of the lines in their order."""
    sample = TextSample(limit)
    lines = [f"{i:05} {'x' * (i % 50)}\n" for i in range(count)]
    for line in lines:
        sample.add(line)
        assert sample.kept_bytes == sum(map(len, sample.lines)) <= limit
    rest = iter(lines)
    assert all(line in rest for line in sample.lines)


def test_sample_is_spread_over_all() -> None:
    """Every part of the input has its share of the lines that were kept."""
    sample = TextSample(60_000)
    for i in range(100_000):
        sample.add(f"{i:06}\n")
    assert 30_000 < sample.kept_bytes <= 60_000
    tenths = [int(line) // 10_000 for line in sample.lines]
    share = len(tenths) / 10
    assert all(0.85 * share < tenths.count(i) < 1.15 * share for i in range(10))


@given(st.text(st.sampled_from("aé漢 "), max_size=4))
def test_long_lines_come_in_parts(piece: str) -> None:
    """A line that trainers would pass over is divided, in front of a space if there is one."""
    text = (piece + "b") * 3000
    sample = TextSample(BIG)
    sample.add(text)
    assert "".join(sample.lines) == text
    assert all(len(line.encode()) <= 4000 for line in sample.lines)
    if " " in piece.strip():
        assert all(line.startswith(" ") for line in sample.lines[1:])


def write_jsonl(path: Path) -> None:
    """Write two documents as compressed JSON lines."""
    with gzip.open(path, "wt", encoding="utf-8") as stream:
        for text in ("one\n\ntwo", "iki ğ"):
            stream.write(json.dumps({"text": text, "n": 1}) + "\n\n")


def write_plain(path: Path) -> None:
    """Write a plain text of two paragraphs."""
    path.write_text("one\n\n\ntwo\r\niki ğ\n", encoding="utf-8")


@pytest.mark.parametrize(
    "name,write,lines",
    [
        ("in.jsonl.gz", write_jsonl, ["one\n\n", "two", "iki ğ"]),
        ("in.txt", write_plain, ["one\n\n\n", "two\n", "iki ğ\n"]),
    ],
)
def test_formats(
    name: str, write: Callable[[Path], None], lines: list[str], tmp_path: Path
) -> None:
    """JSON lines and plain text are read; of plain text the blank lines are known by number."""
    write(tmp_path / name)
    seen: list[ReadProgress] = []
    sample = read_sample([str(tmp_path / name)], keys=("text",), limit=BIG, progress=seen.append)
    assert sample.lines == lines
    assert seen[-1].documents == sample.documents
    assert seen[-1].line().startswith(f"read {counted(sample.documents, 'document')}, ")


BAD = '{"text": "a"}\n{"text": 3}\n{"other": "b"}\nno json\n{"text": "\\ud800"}\n{"text": "c"}\n'


def test_bad_documents_are_counted(tmp_path: Path) -> None:
    """With `skip` documents that cannot be used are left out, and counted by reason."""
    (tmp_path / "in.jsonl").write_text(BAD, encoding="utf-8")
    sample = read_sample([str(tmp_path / "in.jsonl")], keys=("text",), limit=BIG, on_error="skip")
    assert sample.lines == ["a", "c"]
    assert sample.skipped == {
        "not a string": 1, "key missing": 1, "broken JSON": 1, "not encodable": 1
    }  # fmt: skip


def test_first_bad_document_stops(tmp_path: Path) -> None:
    """Else the first one is an error that names file and line."""
    (tmp_path / "in.jsonl").write_text(BAD, encoding="utf-8")
    with pytest.raises(DataError, match=r"in\.jsonl` line 2: not a string"):
        read_sample([str(tmp_path / "in.jsonl")], keys=("text",), limit=BIG)


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": " \\n"}\n'])
def test_no_text(content: str, tmp_path: Path) -> None:
    """Input without a letter of text is an error."""
    (tmp_path / "in.jsonl").write_text(content, encoding="utf-8")
    path = str(tmp_path / "in.jsonl")
    with pytest.raises(DataError, match="no text") as caught:
        read_sample([path], keys=("text",), limit=BIG)
    assert str(caught.value.why).endswith(f" in `{path}`")
    with pytest.raises(DataError, match="no text") as caught:
        read_sample([path, path], keys=("text",), limit=BIG)
    assert str(caught.value.why).endswith(" in 2 inputs")


def test_documents_are_counted_as_by_prepare(tmp_path: Path) -> None:
    """A folder of texts, JSON lines and a table has as many documents for both commands."""
    from lmcore.data.prepare.run import PrepareRequest, prepare
    from lmcore.data.tokenizer import ByteTokenizer

    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("one\n\ntwo\nthree\n")
    (folder / "b.txt").write_text("four")
    (folder / "c.jsonl").write_text('{"text": "a\\nb"}\n\n{"text": ""}\n{"text": 5}\n')
    (folder / "d.csv").write_text("text\nx\ny\n")
    (folder / "README").write_text("about")
    sample = read_sample([str(folder)], keys=("text",), limit=BIG, on_error="skip")
    request = PrepareRequest(
        (str(folder),), str(tmp_path / "out"), ByteTokenizer(), on_error="skip"
    )
    report = prepare(request)
    assert sample.documents == report.documents == 6
    assert dict(sample.skipped) == report.skipped == {"not a string": 1}
    assert "about" not in "".join(sample.lines)
