"""Reading evaluation sets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmcore.data.clean.filter.evaluation_sets import read_evaluation_sets
from lmcore.errors import DataError


def test_lambada(shared_data: Path) -> None:
    """Every line of LAMBADA gives its text."""
    texts = read_evaluation_sets(
        [str(shared_data / "evals/lambada/lambada_test.part1.jsonl")], ["text"]
    )
    assert len(texts) == 2576
    assert texts[0].startswith("In my palm is a clear stone")


def test_race(shared_data: Path) -> None:
    """The files of RACE, one object each, give articles and questions."""
    folder = shared_data / "evals/race_plus/dev"
    texts = read_evaluation_sets([f"{folder}/*.txt"], ["article", "questions"])
    assert len(texts) == 60 + 210


def test_glue(shared_data: Path) -> None:
    """A table of GLUE gives its columns, quotes and all."""
    table = shared_data / "evals/mnli/dev_matched.tsv"
    assert len(read_evaluation_sets([str(table)], ["sentence1", "sentence2"])) == 1000


def test_squad(tmp_path: Path) -> None:
    """Questions and contexts of SQuAD are found in its depth; answers are not wanted."""
    squad = {
        "data": [
            {
                "title": "T",
                "paragraphs": [
                    {
                        "context": "C",
                        "qas": [{"question": "Q1", "answers": [{"text": "A"}]}, {"question": "Q2"}],
                    }
                ],
            }
        ]
    }
    path = tmp_path / "squad.json"
    path.write_text(json.dumps(squad, indent=1), encoding="utf-8")
    assert read_evaluation_sets([str(path)], ["question", "context"]) == ["C", "Q1", "Q2"]


def test_no_such_key(tmp_path: Path) -> None:
    """A file without the keys is named together with its keys."""
    path = tmp_path / "task.jsonl"
    path.write_text('{"query": "a", "gold": 1}\n', encoding="utf-8")
    with pytest.raises(DataError, match="has no text under `text`") as caught:
        read_evaluation_sets([str(path)], ["text"])
    assert caught.value.why == "its keys: `query`, `gold`"


@pytest.mark.parametrize(
    "content, message",
    [
        (b'{"text": "a"}\n{"text": \n', "line 2: broken JSON"),
        (b'{"text": "\xff"}', "is not UTF-8"),
    ],
)
def test_damaged(tmp_path: Path, content: bytes, message: str) -> None:
    """A broken line or byte is named."""
    path = tmp_path / "task.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_evaluation_sets([str(path)], ["text"])
