"""Documents and corpora for the tests of cleaning."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from lmcore_data_tools.clean.chain import CleanRequest
from lmcore_data_tools.clean.document import Document
from lmcore_data_tools.clean.filter import language
from lmcore_data_tools.clean.run import CleanReport, clean

_load = functools.cache(language._load)


@pytest.fixture(autouse=True)
def language_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the detector's model once for all tests of a process."""
    monkeypatch.setattr(language, "_load", _load)


@pytest.fixture(scope="session")
def passages(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of LAMBADA's first passages, a test set to be cut out of corpora."""
    with (shared_data / "evals/lambada/lambada_test.part1.jsonl").open("rb") as lines:
        some = [lines.readline() for _ in range(100)]
    path = tmp_path_factory.mktemp("passages") / "lambada.jsonl"
    path.write_bytes(b"".join(some))
    return str(path)


def document(text: str = "", url: str = "") -> Document:
    """Return a document that is not in any file."""
    record = {"text": text, "url": url}
    return Document("made.jsonl", 1, json.dumps(record).encode(), record, text, url)


@pytest.fixture
def make_document() -> Callable[..., Document]:
    """Return a function that makes a document of a text and an address."""
    return document


@pytest.fixture
def corpus(tmp_path: Path) -> Callable[[Iterable[Any]], str]:
    """Return a function that writes records (or texts) as JSON lines and returns the path."""

    def write(records: Iterable[Any], name: str = "corpus.jsonl") -> str:
        path = tmp_path / name
        rows = [row if isinstance(row, dict) else {"text": row} for row in records]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write


class Cleaned:
    """Results of a run: its report, the documents, and the lines about dropped ones."""

    def __init__(self, report: CleanReport, output: Path, dropped: Path) -> None:
        self.report = report
        self.raw = output.read_bytes()
        self.records = [json.loads(line) for line in self.raw.splitlines()]
        self.texts = [record["text"] for record in self.records]
        self.dropped = [json.loads(line) for line in dropped.read_bytes().splitlines()]


@pytest.fixture
def run_steps(tmp_path: Path) -> Callable[..., Cleaned]:
    """Return a function that takes a file through steps and returns what is left."""

    def run(steps: str, path: str, **settings: Any) -> Cleaned:
        output, dropped = tmp_path / "out.jsonl", tmp_path / "dropped.jsonl"
        chain, paths = tuple(steps.split()), (str(output), str(dropped))
        request = CleanRequest(chain, (path,), *paths, overwrite=True, **settings)
        return Cleaned(clean(request), output, dropped)

    return run
