"""Sentences by rules, and of texts that were split before."""

from __future__ import annotations

import pickle
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.base.errors import ConfigError, MissingPackageError
from lmcore.data.prepare.sentences import SentenceOptions, build_splitter


@pytest.mark.parametrize(
    "lang, text, sentences",
    [
        ("english", "Dr. Smith came. He left!", ["Dr. Smith came.", "He left!"]),
        ("de", "Das ist z. B. gut. Am 3. Mai.", ["Das ist z. B. gut.", "Am 3. Mai."]),
        ("tr", "Merhaba. Nas\u0131ls\u0131n?", ["Merhaba.", "Nas\u0131ls\u0131n?"]),
        (
            "zh",
            "\u4f60\u597d\u3002\u6211\u662f\u4eba\u3002",
            ["\u4f60\u597d\u3002", "\u6211\u662f\u4eba\u3002"],
        ),
        ("en", "A title\n\nHe came. ", ["A title", "He came."]),
    ],
)
def test_sentences_of_several_languages(lang, text, sentences):
    """Abbreviations and signs of the language are known, without any data."""
    splitter = build_splitter(SentenceOptions("sentencex", lang))
    assert splitter.split(text) == sentences
    assert pickle.loads(pickle.dumps(splitter)).split(text) == sentences


@given(st.text(st.characters(codec="utf-8"), max_size=80))
def test_no_text_is_lost(text):
    """With the white space kept, the sentences joined are the text."""
    splitter = build_splitter(SentenceOptions("sentencex", "en", keep_newlines=True))
    assert "".join(splitter.split(text)) == text


def test_language_is_a_code_or_a_name():
    """A language that is neither is answered with those there are."""
    with pytest.raises(ConfigError, match="did you mean `english`"):
        build_splitter(SentenceOptions("sentencex", "englisch"))


def test_missing_package_names_the_command(monkeypatch):
    """Without sentencex the answer is what installs it."""
    monkeypatch.setitem(sys.modules, "sentencex", None)
    with pytest.raises(MissingPackageError, match="pip install sentencex"):
        build_splitter(SentenceOptions("sentencex"))


def test_lines_are_sentences():
    """Texts that were split before have a sentence on each line; blank ones are none."""
    splitter = build_splitter(SentenceOptions("lines"))
    assert splitter.split("a\r\n\nb c \n \nd") == ["a", "b c ", "d"]
    kept = build_splitter(SentenceOptions("lines", keep_newlines=True))
    assert kept.split("a\n\nb") == ["a\n", "b"]


def test_unknown_splitter_and_useless_model_are_refused():
    """Options without effect, and unknown splitters, are errors."""
    with pytest.raises(ConfigError, match="did you mean `punkt`"):
        build_splitter(SentenceOptions("punct"))
    with pytest.raises(ConfigError, match="has no effect"):
        build_splitter(SentenceOptions("sentencex", punkt_model="x"))
