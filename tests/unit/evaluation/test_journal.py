"""Results of a stopped evaluation: kept by requests and model, damaged lines left out."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

import pytest

from lmcore.base.errors import RunError
from lmcore.evaluation.journal import Journal, requests_key
from lmcore.evaluation.likelihood import Scored
from lmcore.evaluation.score import LogLikelihood

RESULTS = {0: LogLikelihood(-1.5, True, 2), 3: LogLikelihood(-0.1, False, 1)}


def test_results_come_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.part")
    assert journal.known("one") == {}
    journal.add("one", {0: RESULTS[0]})
    journal.add("two", RESULTS)
    journal.add("one", {3: RESULTS[3]})
    journal.close()
    again = Journal(tmp_path / "a.part")
    assert again.known("one") == again.known("two") == RESULTS
    again.remove()
    assert not list(tmp_path.iterdir())


def test_texts_come_back(tmp_path: Path) -> None:
    """Generated texts are kept beside log-likelihoods; neither is taken for the other."""
    journal = Journal(tmp_path / "a.part")
    journal.add_texts("one", {0: "a\nb", 2: ""})
    journal.add("one", {3: RESULTS[3]})
    journal.close()
    with closing(Journal(tmp_path / "a.part")) as again:
        assert again.texts("one") == {0: "a\nb", 2: ""}
        assert again.known("one") == {3: RESULTS[3]}
        assert again.texts("two") == {}


def test_a_line_that_is_cut_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.part"
    journal = Journal(path)
    journal.add("one", RESULTS)
    journal.add("one", {5: RESULTS[0]})
    journal.close()
    path.write_bytes(path.read_bytes()[:-9])
    with caplog.at_level(logging.WARNING), closing(Journal(path)) as again:
        assert again.known("one") == RESULTS
    assert "cannot be read and is left out" in caplog.text


def test_keys_tell_apart() -> None:
    """Another model, other tokens, another order, another division are other keys."""
    one, two = Scored((1, 2), (3,)), Scored((1,), (2, 3))
    keys = {
        requests_key("a", [one, two]),
        requests_key("b", [one, two]),
        requests_key("a", [two, one]),
        requests_key("a", [one]),
        requests_key("a", [two, two]),
    }
    assert len(keys) == 5


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="to continue the evaluation"):
        Journal(tmp_path / "nothing" / "a.part")


def test_results_of_another_evaluation_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are left in the file at the end, with a line that says so."""
    path = tmp_path / "a.part"
    journal = Journal(path)
    for key in ("one", "two", "one"):
        journal.add(key, RESULTS)
    journal.close()
    other = Journal(path)
    assert other.known("two") == RESULTS
    other.add("three", RESULTS)
    other.remove()
    assert "keeps results of another evaluation" in caplog.text
    with closing(Journal(path)) as again:
        assert (again.known("one"), again.known("two"), again.known("three")) == (RESULTS, {}, {})


def test_a_file_without_results_does_not_stay(tmp_path: Path) -> None:
    """An evaluation that fails before its first pass leaves none."""
    Journal(tmp_path / "a.part").close()
    assert not list(tmp_path.iterdir())
