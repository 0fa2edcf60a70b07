"""Punkt: the sentences are NLTK's, with and without the white space between them."""

from __future__ import annotations

import pickle
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nltk.tokenize import punkt

from lmcore.base.errors import ConfigError, DataError, MissingPackageError
from lmcore.data.prepare.sentences import SentenceOptions, build_splitter

_WORDS = """
    Dr. Smith went p.m. U.S. They he Louis Mo. ... ! ? 3.5 percent e.g. J. end. Été. ( )
    "Yes." He, fig. 3 。 a.b.
"""
WORDS = st.sampled_from(_WORDS.split())
GAPS = st.sampled_from([" ", "  ", "\n", "\n\n", ""])
TEXTS = st.lists(st.tuples(WORDS, GAPS), max_size=40).map(
    lambda pairs: "".join(word + gap for word, gap in pairs)
)


class Keeping(punkt.PunktLanguageVars):
    """NLTK's pattern with the white space moved before the look-ahead, as Megatron has it."""

    _period_context_fmt = r"""
        \S*
        %(SentEndChars)s
        \s*
        (?=(?P<after_tok>
            %(NonWord)s
            |
            (?P<next_tok>\S+)
        ))"""


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS)
def test_sentences_are_nltks(nltk_data, parameters, text):
    """Tables read from files give the sentences of NLTK's own tokenizer."""
    expected = punkt.PunktSentenceTokenizer(parameters).tokenize(text)
    assert build_splitter(SentenceOptions()).split(text) == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS)
def test_white_space_stays_with_keep_newlines(nltk_data, parameters, text):
    """With `keep_newlines` they match NLTK with Megatron's pattern."""
    expected = punkt.PunktSentenceTokenizer(parameters, lang_vars=Keeping()).tokenize(text)
    assert build_splitter(SentenceOptions(keep_newlines=True)).split(text) == expected


def test_line_ends_are_kept_or_not(nltk_data):
    """Spaces and line ends between two sentences belong to the first one, or are dropped."""
    text = "They came. \n\nHe spoke. See fig. 3 there."
    plain = build_splitter(SentenceOptions()).split(text)
    assert plain == ["They came.", "He spoke.", "See fig. 3 there."]
    kept = build_splitter(SentenceOptions(keep_newlines=True)).split(text)
    assert kept == ["They came. \n\n", "He spoke. ", "See fig. 3 there."]


def test_text_of_more_than_a_million_characters_is_cut_first(nltk_data, parameters):
    """A text is cut after every million characters, even within a word, as in Megatron."""
    text = ("x" * 998 + ". ") * 1100
    tokenizer = punkt.PunktSentenceTokenizer(parameters)
    expected = tokenizer.tokenize(text[:1_000_000]) + tokenizer.tokenize(text[1_000_000:])
    assert build_splitter(SentenceOptions()).split(text) == expected
    assert len(expected) == 1100


@pytest.mark.parametrize("keep_newlines", [False, True])
def test_splitter_goes_to_other_processes(nltk_data, keep_newlines):
    """A pickled splitter splits as before, and describes itself alike."""
    splitter = build_splitter(SentenceOptions(keep_newlines=keep_newlines))
    other = pickle.loads(pickle.dumps(splitter))
    text = "Dr. Smith came.\nHe left."
    assert other.split(text) == splitter.split(text)
    assert other.describe() == splitter.describe()


def test_description_follows_the_tables(nltk_data):
    """Other tables, other description: a resumed run must not mix them."""
    before = build_splitter(SentenceOptions()).describe()
    assert before == build_splitter(SentenceOptions()).describe()
    table = nltk_data / "tokenizers/punkt_tab/english/abbrev_types.txt"
    table.write_text(f"{table.read_text()}\nzz")
    assert build_splitter(SentenceOptions()).describe() != before


def test_model_may_be_given(nltk_data):
    """`--punkt-model` names a directory, and language codes are understood as names."""
    folder = nltk_data / "tokenizers/punkt_tab/english"
    given_ = build_splitter(SentenceOptions(punkt_model=str(folder)))
    assert given_.describe() == build_splitter(SentenceOptions(lang="en")).describe()


def test_missing_tables_say_where_and_what_else(nltk_data):
    """Without tables of the language the message says where it looked and what there is."""
    (nltk_data / "tokenizers/punkt").mkdir()
    (nltk_data / "tokenizers/punkt/turkish.pickle").write_bytes(b"")
    with pytest.raises(ConfigError, match="no Punkt tables for `--lang turkish`") as caught:
        build_splitter(SentenceOptions(lang="tr"))
    text = caught.value.render()
    assert f"  {nltk_data}\n" in text
    assert "has english" in text
    assert "pickles, which can run code and are not read" in text
    assert "--sentence-splitter sentencex" in text


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("abbrev_types.txt", None, "cannot read"),
        ("sent_starters.txt", b"\xff", "is not UTF-8"),
        ("collocations.tab", b"a\tb\nab\n", "line 2 is not a pair"),
        ("ortho_context.tab", b"a\t1\tb\n", "line 1 is not a pair"),
        ("ortho_context.tab", b"a\tx\n", "`x` is not a number"),
    ],
)
def test_damaged_tables_are_named(nltk_data, name, content, message):
    """A table that is missing or damaged is an error with its file and line."""
    path = nltk_data / "tokenizers/punkt_tab/english" / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        build_splitter(SentenceOptions())
    assert name in caught.value.what


@pytest.mark.parametrize("lang", ["../english", "", "a/b", "x" * 50])
def test_language_is_no_path(nltk_data, lang):
    """A language that is no word never becomes part of a path."""
    with pytest.raises(ConfigError, match="unknown `--lang"):
        build_splitter(SentenceOptions(lang=lang))


def test_missing_package_names_the_command(nltk_data, monkeypatch):
    """Without nltk the answer is what installs it."""
    for name in ("nltk", "nltk.tokenize", "nltk.tokenize.punkt"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackageError, match="pip install nltk"):
        build_splitter(SentenceOptions())
