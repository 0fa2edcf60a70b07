"""Chains of steps: order, workers, input that is damaged, and what is left on the disk."""

from __future__ import annotations

import gzip
import io
import json
import logging
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcore.base.errors import ConfigError, DataError
from lmcore_data_tools.clean.chain import STEPS, CleanRequest, plan_chain
from lmcore_data_tools.clean.line_writer import LineWriter
from lmcore_data_tools.clean.run import CleanProgress, clean
from lmcore_data_tools.clean.segment import AnyBatch, Processed, Segment, process


def web_pages(shared_data: Path, passages: str, count: int) -> list[dict[str, Any]]:
    """Return web pages, some of them again: as they are, nearly so, or with a test set inside."""
    choice = random.Random(0)
    with gzip.open(shared_data / "corpora/web/c4-sample-1000.jsonl.gz") as lines:
        pages = [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]
    with Path(passages).open(encoding="utf-8") as lines:
        passage = json.loads(lines.readline())["text"]
    for page in choice.sample(pages, count // 5):
        copy = dict(page, url=f"{page['url']}&again=1")
        kind = choice.randrange(3)
        if kind == 1:
            copy["text"] += " One more sentence at its end."
        if kind == 2:
            copy["text"] += passage + " " + choice.choice(pages)["text"]
        pages.insert(choice.randrange(len(pages)), copy)
    return pages


def test_chain_is_its_steps_one_by_one(
    shared_data: Path, passages: str, corpus: Callable, run_steps: Callable, tmp_path: Path
) -> None:
    """A chain gives the bytes and counts that its steps give with files between them."""
    settings: dict[str, Any] = {"min_characters": 512, "tasks": (passages,)}
    path = corpus(web_pages(shared_data, passages, 200))
    whole = run_steps(" ".join(STEPS), path, **settings)
    reports, dropped = [], []
    for number, step in enumerate(STEPS):
        done = run_steps(step, path, **settings)
        reports += done.report.steps
        dropped += done.dropped
        path = str(tmp_path / f"between-{number}.jsonl")
        Path(path).write_bytes(done.raw)
    assert done.raw == whole.raw
    assert tuple(reports) == whole.report.steps
    counts = {report.step: report.documents - report.kept for report in reports}
    assert all(counts[name] > 0 for name in ("url", "language", "length", "exact", "near"))
    assert next(report for report in reports if report.step == "ngram").changed > 0
    told = [(line["step"], line["reason"]) for line in whole.dropped]
    assert sorted(told) == sorted((line["step"], line["reason"]) for line in dropped)
    assert all(Path(line["source"]).name == "corpus.jsonl" for line in whole.dropped)
    assert whole.report.kept == len(whole.records) == reports[-1].kept


def test_result_does_not_depend_on_workers(
    shared_data: Path, passages: str, corpus: Callable, run_steps: Callable
) -> None:
    """Two workers write the bytes that one writes, and tell the same of what was dropped."""
    path = corpus(web_pages(shared_data, passages, 120))
    settings: dict[str, Any] = {"min_characters": 400, "tasks": (passages,)}
    chain = "url fix language length near ngram shuffle"
    one, two = (run_steps(chain, path, workers=workers, **settings) for workers in (1, 2))
    assert one.raw == two.raw
    assert one.dropped == two.dropped
    assert one.report.steps == two.report.steps


def test_unchanged_lines_keep_their_bytes(tmp_path: Path, run_steps: Callable) -> None:
    """Spaces, escapes, numbers and keys given twice come out as they went in."""
    lines = [
        b'{ "text" : "caf\\u00e9",  "n": 1.50 }',
        '{"text": "naïve", "big": 1e400, "a": 1, "a": 2}'.encode(),
        b'{"text": "\\ud800 half"}',
    ]
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines) + b"\n\n")
    chain = "length exact near shuffle"
    done = run_steps(chain, str(path), min_characters=1)
    assert sorted(done.raw.splitlines()) == sorted(lines)


def test_changed_lines_keep_their_fields(corpus: Callable, run_steps: Callable) -> None:
    """A changed text leaves the other fields in their order, also with another key."""
    path = corpus([{"id": 1, "content": "schÃ¶n \U0001f600", "text": "Ã¶", "z": [1, None]}])
    done = run_steps("fix", path, key="content")
    assert done.raw.decode() == (
        '{"id": 1, "content": "schön \U0001f600", "text": "Ã¶", "z": [1, null]}\n'
    )


def test_several_files(tmp_path: Path, run_steps: Callable) -> None:
    """Files of a pattern are one corpus; a dropped document's file and line are named."""
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "three"}\n{"text": "one"}\n'))
    done = run_steps("exact", str(tmp_path / "[ab].jsonl*"))
    assert done.texts == ["one", "two", "three"]
    (line,) = done.dropped
    assert (Path(line["source"]).name, line["line"]) == ("b.jsonl.gz", 2)
    assert (Path(line["kept"]["source"]).name, line["kept"]["line"]) == ("a.jsonl", 1)


def test_table(tmp_path: Path, run_steps: Callable) -> None:
    """A table is read as `lmcore data prepare` reads it, and comes out as JSON lines."""
    path = tmp_path / "in.csv"
    path.write_text('text,url\n"one, two",https://example.org/\nx,https://example.org/a.pdf\n')
    assert run_steps("url", str(path)).records == [
        {"text": "one, two", "url": "https://example.org/"}
    ]


BAD = [
    (b'{"text": "a"', "broken JSON"),
    (b'["a"]', "broken JSON"),
    (b"[" * 100_000, "broken JSON"),
    (b'{"text": "\xff"}', "not UTF-8"),
    (b'{"texts": "a"}', "key missing"),
    (b'{"text": 5}', "not a string"),
    (b'{"text": ' + b"9" * 5000 + b"}", "broken JSON"),
]


@pytest.mark.parametrize("line, reason", BAD)
def test_bad_line_stops(tmp_path: Path, run_steps: Callable, line: bytes, reason: str) -> None:
    """The first bad line ends it with its place; the files of an earlier run stay as they were."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b'\n{"text": \n')
    before = {"out.jsonl": b"old", "dropped.jsonl": b"older", "in.jsonl": path.read_bytes()}
    for name, content in before.items():
        (tmp_path / name).write_bytes(content)
    for chain in ("exact", "shuffle", "length"):
        with pytest.raises(DataError, match=f"in.jsonl` line 2: {reason}"):
            run_steps(chain, str(path), min_characters=1)
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == before


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_lines_skipped(
    tmp_path: Path, run_steps: Callable, caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    """Skipped lines are counted and recorded, the first of a kind in a warning."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + b"\n".join(line for line, _ in BAD))
    caplog.set_level(logging.WARNING)
    done = run_steps("exact shuffle", str(path), on_error="skip", workers=workers)
    assert done.texts == ["good"]
    counts = {"broken JSON": 4, "not UTF-8": 1, "key missing": 1, "not a string": 1}
    assert done.report.skipped == counts
    assert [(line["reason"], line["line"]) for line in done.dropped] == [
        (reason, number) for number, (_, reason) in enumerate(BAD, start=2)
    ]
    assert done.report.documents == 1
    assert "line 2: broken JSON" in caplog.text


def test_missing_key_names_the_flag(corpus: Callable, run_steps: Callable) -> None:
    """A wrong key is reported with the keys that are there and the flag to use."""
    with pytest.raises(DataError, match="key missing") as caught:
        run_steps("exact", corpus([{"txt": "a"}]))
    assert caught.value.hint == "did you mean `--key txt`?"


@pytest.mark.parametrize(
    "name, content", [("in.csv", "txt,link\na,b\n"), ("in.json", '[{"txt": "a", "link": "b"}]')]
)
def test_missing_key_of_other_formats_names_the_flag(
    tmp_path: Path, run_steps: Callable, name: str, content: str
) -> None:
    """In tables and arrays, too, text and address each have the flag of this command."""
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match="no `text`") as caught:
        run_steps("exact", str(path))
    assert caught.value.hint == "did you mean `--key txt`?"
    with pytest.raises(DataError, match="no `address`") as caught:
        run_steps("url", str(path), key="txt", url_key="address")
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("check `--url-key`, or skip")


def test_truncated_archive(tmp_path: Path, run_steps: Callable) -> None:
    """An archive that is cut short ends it, or gives what can be read of it."""
    rows = b"".join(b'{"text": "%d"}\n' % n for n in random.Random(0).sample(range(10**6), 5000))
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(gzip.compress(rows)[:-5000])
    with pytest.raises(DataError, match="cut short"):
        run_steps("exact", str(path))
    done = run_steps("exact", str(path), on_error="skip")
    assert 0 < len(done.texts) < 5000
    assert done.report.skipped["cut short"] == 1


def interrupted(written: list[int], at: int) -> Callable[..., None]:
    """Return a `LineWriter.write` that is interrupted at its *at*-th call."""
    write = LineWriter.write

    def instead(self: LineWriter, lines: Any) -> None:
        written.append(1)
        if len(written) > at:
            raise KeyboardInterrupt
        write(self, lines)

    return instead


@pytest.mark.parametrize("workers", [1, 2])
def test_interrupt_leaves_nothing(
    tmp_path: Path,
    corpus: Callable,
    run_steps: Callable,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
) -> None:
    """An interrupt while it writes leaves neither output nor temporary files; again gives all."""
    path = corpus(str(n) * 100 for n in range(2000))
    monkeypatch.setattr(LineWriter, "write", interrupted([], at=1))
    with pytest.raises(KeyboardInterrupt):
        run_steps("exact near shuffle", path, workers=workers)
    assert [one.name for one in tmp_path.iterdir()] == ["corpus.jsonl"]
    monkeypatch.undo()
    assert len(run_steps("exact", path).texts) == 2000


def test_standard_input_and_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """With `-` it is a filter, also for steps that need all documents."""
    content = io.BytesIO(b'{"text": "a"}\n{"text": "b"}\n{"text": "a"}\n')
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(content)))
    report = clean(CleanRequest(("exact",), ("-",), "-", scratch=str(tmp_path)))
    assert capfdbinary.readouterr().out == b'{"text": "a"}\n{"text": "b"}\n'
    assert (report.documents, report.kept, report.output) == (3, 2, "-")
    assert list(tmp_path.iterdir()) == []


def test_nothing_left(corpus: Callable, run_steps: Callable) -> None:
    """The output of a run that keeps no document is an empty file."""
    done = run_steps("length", corpus(["a"]), min_characters=9)
    assert (done.raw, done.report.kept) == (b"", 0)
    assert run_steps("near shuffle", corpus([])).raw == b""


def test_paths_that_collide(tmp_path: Path, corpus: Callable) -> None:
    """An input is never replaced, and two outputs are two files."""
    path = corpus(["a"])
    with pytest.raises(ConfigError, match="is both input and output"):
        clean(CleanRequest(("exact",), (path,), str(tmp_path / "." / "corpus.jsonl")))
    output = str(tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match="are the same file"):
        clean(CleanRequest(("exact",), (path,), output, output))
    with pytest.raises(ConfigError, match="only `--output`"):
        clean(CleanRequest(("exact",), (path,), output, "-"))


def test_unknown_step() -> None:
    """A misspelt step is reported with the nearest one."""
    with pytest.raises(ConfigError, match="unknown step `languages`") as caught:
        plan_chain(CleanRequest(("exact", "languages"), ("a",), "b"))
    assert "did you mean `language`?" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="unknown step `exact,fix`") as caught:
        plan_chain(CleanRequest(("exact,fix",), ("a",), "b"))
    assert "by spaces: `exact fix`" in str(caught.value.hint)


def test_a_step_twice(corpus: Callable, run_steps: Callable) -> None:
    """A step may be taken again after others, and has a row for each time."""
    done = run_steps("exact fix exact", corpus(["Ã©", "é", "é"]))
    assert done.texts == ["é"]
    assert [(one.step, one.documents, one.kept) for one in done.report.steps] == [
        ("exact", 3, 2),
        ("fix", 2, 2),
        ("exact", 2, 1),
    ]


def test_progress(tmp_path: Path, corpus: Callable) -> None:
    """Each segment reports its steps and how many documents have come through."""
    told: list[CleanProgress] = []
    path = corpus(str(n) for n in range(10))
    request = CleanRequest(
        ("length", "exact", "shuffle"), (path,), str(tmp_path / "o.jsonl"), min_characters=1
    )
    clean(request, told.append, log_interval=5)
    assert [(one.doing, one.count) for one in told][-2:] == [
        ("length, exact", 10),
        ("shuffle", 10),
    ]
    assert told[-1].line().startswith("shuffle: 10 documents (")
    assert told[-1].line().endswith(" MB/s)")


@pytest.mark.parametrize("chain", ["length", "shuffle length"])
def test_pace_counts_the_work_on_the_first_batch(
    tmp_path: Path, corpus: Callable, monkeypatch: pytest.MonkeyPatch, chain: str
) -> None:
    """The reported time of a single batch excludes the steps after it."""

    def slowly(batch: AnyBatch, segment: Segment) -> Processed:
        time.sleep(0.05)
        return process(batch, segment)

    monkeypatch.setattr("lmcore_data_tools.clean.run.process", slowly)
    told: list[CleanProgress] = []
    path = corpus(["a", "b"])
    output = str(tmp_path / "o.jsonl")
    clean(CleanRequest(tuple(chain.split()), (path,), output, min_characters=1), told.append)
    assert [one.count for one in told] == [2] * len(chain.split())
    assert all(0.05 <= one.seconds < 30 for one in told)


@pytest.fixture(autouse=True)
def no_scratch_is_left(tmp_path: Path) -> Iterator[None]:
    """No temporary file stays after any test."""
    yield
    assert list(tmp_path.rglob("*.tmp")) == []
