"""Step `fix`: the same as ftfy, line by line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import ftfy
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmcore.base.errors import MissingPackageError
from lmcore_data_tools.clean.document import Document, Replace
from lmcore_data_tools.clean.filter.fix import FixStep, fixed

CHARACTERS = st.sampled_from(
    [
        *"ab \n\n\t&<>;#\r\x0b\x0c\x1b[0m\x7f\x85\u2028“”ﬁＡé\u0301",
        "Ã©",
        "â€™",
        "&amp;",
        "&lt;",
        "\ud800",
    ]
)


@pytest.mark.parametrize(
    "text, mended",
    [
        ("plain\ttext\nhere", "plain\ttext\nhere"),
        ("schÃ¶n", "schön"),
        ("donâ€™t", "don't"),
        ("a &amp; b", "a & b"),
        ("x < y\na &amp; b", "x < y\na &amp; b"),
        ("one\r\ntwo\r", "one\ntwo\n"),
        ("\ud800", "\ufffd"),
    ],
)
def test_fixed(make_document: Callable[..., Document], text: str, mended: str) -> None:
    """Mojibake, character references, line ends and halves of surrogate pairs are repaired."""
    verdict = FixStep().judge(make_document(text))
    assert verdict == (None if text == mended else Replace((mended,)))


@given(st.lists(CHARACTERS, max_size=40).map("".join))
@example("Ã©\r\na &amp; b\r\x0c\x85\u2028ﬁ <b>\n&lt;")
def test_equal_to_ftfy_on_made_text(text: str) -> None:
    """The result equals ftfy's for the whole text, however it is divided into lines."""
    assert fixed(text) == ftfy.fix_text(text)


def test_equal_to_ftfy_on_web_pages(shared_data: Path) -> None:
    """The same of web pages."""
    with gzip.open(shared_data / "corpora/web/c4-sample-1000.jsonl.gz") as lines:
        texts = [json.loads(line)["text"] for line, _ in zip(lines, range(300), strict=False)]
    changed = 0
    for text in texts:
        expected = ftfy.fix_text(text)
        assert fixed(text) == expected
        changed += text != expected
    assert 30 < changed < 300


def test_very_long_line() -> None:
    """A line that ftfy takes in pieces gives the same, too."""
    text = "a\n" + "é" * 1_000_001 + "\r\n&amp;"
    assert fixed(text) == ftfy.fix_text(text)


def test_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ftfy the command that installs it is named."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install ftfy"):
        FixStep()
