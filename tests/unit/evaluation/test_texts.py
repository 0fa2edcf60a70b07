"""Texts scored as they are read: the same results whatever waits, in bounded memory."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lmcore.base.errors import DataError
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.evaluation import encode_pieces
from lmcore.evaluation import texts as evaluated_texts
from lmcore.evaluation.exact_sum import ExactSum
from lmcore.evaluation.journal import Journal
from lmcore.evaluation.likelihood import Likelihoods
from lmcore.evaluation.passes import AnyPass
from lmcore.evaluation.requests import RequestMaker
from lmcore.evaluation.score import LogLikelihood
from lmcore.evaluation.task import Continued, Text, TextFile
from lmcore.evaluation.texts import TextScores, score_texts
from lmcore.inference.load import LoadedModel

Make = Callable[..., LoadedModel]


def texts() -> list[Text | TextFile]:
    """Return texts of all lengths; a file is one of them, and one is empty."""
    made: list[Text | TextFile] = [
        Text(f"{n} " * (n % 13) + "x" * (n * 7 % 50), f"{n} words " * 3) for n in range(40)
    ]
    made.insert(20, TextFile(Path("book"), lambda: iter(["It is a ", "lon", "g book. " * 30])))
    return [*made, Text("", "")]


def scored(model: Likelihoods, given: Sequence[Any], **more: Any) -> TextScores:
    maker = RequestMaker(ByteTokenizer(), model.positions, 16)
    return score_texts(model, given, maker, **more)


def test_what_waits_changes_no_bit(loaded: Make) -> None:
    """Sums and records are the same for any number of requests that wait, and in order."""
    one = loaded()
    one.model.float()
    found: list[Any] = []
    for tokens in (1, 500, 100_000):
        records: list[dict[str, Any]] = []
        result = scored(Likelihoods(one), texts(), held_tokens=tokens, record=records.append)
        found.append((result.score, result.count, records))
    assert found[0] == found[1] == found[2]
    score, count, records = found[0]
    assert count == len(records) == len(texts()) == 42
    assert [each["example"] for each in records] == list(range(42))
    assert score.logprob == math.fsum(value for each in records for value in each["logprobs"])
    assert score.bytes == sum(each["bytes"] for each in records)
    maker = RequestMaker(ByteTokenizer(), 32, 16)
    alone = Likelihoods(one).of(maker.of(texts()[20]))
    assert records[20]["logprobs"] == [each.logprob for each in alone]
    assert (records[20]["words"], records[20]["file"]) == (63, "book")


def test_a_stopped_evaluation_is_continued(loaded: Make, tmp_path: Path) -> None:
    """Windows that the file has are not computed again, and no bit differs."""
    one = loaded()
    one.model.float()
    whole = scored(Likelihoods(one), texts())
    seen: list[int] = []

    def stop(done: int, _seconds: float) -> None:
        seen.append(done)
        if len(seen) == 3:
            raise KeyboardInterrupt

    path = tmp_path / "a.part"
    model = Likelihoods(one, tokens=1)
    with closing(Journal(path)) as journal, pytest.raises(KeyboardInterrupt):
        scored(model, texts(), held_tokens=200, journal=journal, progress=stop)
    count: list[int] = []
    with closing(Journal(path)) as journal:
        rest = scored(model, texts(), journal=journal, progress=lambda done, _: count.append(done))
    assert rest.score == whole.score
    assert count[-1] == len([w for each in texts() for w in maker_windows(each)]) - seen[-1]


def maker_windows(example: Text | TextFile) -> list[Any]:
    return RequestMaker(ByteTokenizer(), 32, 16).of(example)


def test_other_examples_after_texts(loaded: Make) -> None:
    with pytest.raises(DataError, match="example 2 is a `Continued` after texts"):
        scored(Likelihoods(loaded()), [Text("a b", "a b"), Continued("a", " b")])


class Nothing:
    """Pool that computes nothing."""

    size = 1

    def compute(self, passes: Sequence[AnyPass], _own: Any) -> list[list[LogLikelihood]]:
        return [[LogLikelihood(-1.0, True, len(r.targets)) for r in one.requests] for one in passes]


def test_memory_is_bounded(loaded: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times as much text takes no more memory, as one file and as many texts."""
    monkeypatch.setattr(encode_pieces, "PIECE", 2000)
    monkeypatch.setattr(evaluated_texts, "_CHUNK", 2000)
    model = Likelihoods(loaded(), pool=Nothing())

    def pieces(count: int) -> Iterator[str]:
        return (f"It is line {number} of a text.\n" for number in range(count))

    def many(count: int) -> Iterator[Text]:
        return (Text(one * 3, one) for one in pieces(count // 3))

    def peak(given: Any) -> int:
        tracemalloc.start()
        with closing(Journal(tmp_path / "a.part")) as journal:
            scored(model, given, held_tokens=2000, journal=journal)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        (tmp_path / "a.part").unlink()
        return found

    peaks = []
    for count in (600, 2400):
        one = TextFile(Path("book"), lambda count=count: pieces(count))  # type: ignore[misc]
        peaks.append((peak([one]), peak(many(count))))
    for small, large in zip(*peaks, strict=True):
        assert large < 1.2 * small


def test_sums_are_exact() -> None:
    """One by one, they give the result of `math.fsum`."""
    values = [1e16, 1.0, -1e16, 0.1, 3e-20, -0.1, 1e300, -1e300] * 3
    total = ExactSum()
    for one in values:
        total.add(one)
    assert total.value == math.fsum(values)
    total.add(-math.inf)
    assert total.value == -math.inf
