"""Tokenizers against GPT-2's pattern, hand-made merges and known ids."""

from __future__ import annotations

import json
import pickle
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import regex
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lmcore.base.errors import ConfigError, DataError, MissingPackageError
from lmcore.data import native
from lmcore.data.tokenizer import (
    ByteTokenizer,
    GPT2BPETokenizer,
    NullTokenizer,
    build_tokenizer,
    tokenizer_types,
    word_cache,
)
from lmcore.data.tokenizer.bpe_files import byte_alphabet
from lmcore.data.tokenizer.gpt2 import split_words

NATIVE = pytest.param(
    "native", marks=pytest.mark.skipif(not native.available, reason="needs lmcore._native")
)
ENGINES = [NATIVE, "tokenizers", "python"]

# As published with GPT-2.
PUBLISHED = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
ASCII = st.text(st.characters(max_codepoint=127))
TRICKY = st.text(
    st.sampled_from(" \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0'stredvmlLl09²\u02bc_é—😀")
)


@given(TEXT | ASCII | TRICKY)
@example("a \t b\x1c\x1d c  ' s's 'll'LL 'reve")
@example("9\u00b2\u0669x\u02bc_\u00e9\u2014 \U0001f600  \u00a0\x85\n\r\x0b")
def test_words_are_those_of_the_published_pattern(text):
    """Both fast patterns cut any text exactly where GPT-2's pattern does."""
    assert split_words(text) == regex.findall(PUBLISHED, text)


def test_words_of_every_ascii_pair_are_those_of_the_published_pattern():
    """The ASCII pattern agrees on all pairs of ASCII characters, alone and between letters."""
    characters = [chr(i) for i in range(128)]
    text = [a + b for a in characters for b in characters]
    for pair in text:
        for case in (pair, f"a{pair}b", f" {pair} "):
            assert split_words(case) == regex.findall(PUBLISHED, case), repr(case)


def test_byte_alphabet_maps_bytes_to_distinct_visible_characters():
    """Space is Ġ, newline Ċ, letters themselves, and no two bytes share a character."""
    alphabet = byte_alphabet()
    assert alphabet[ord(" ")] == "Ġ"
    assert alphabet[ord("\n")] == "Ċ"
    assert alphabet[ord("a")] == "a"
    assert alphabet[0xAD] == "Ń"
    assert len(set(alphabet)) == 256
    assert not any(c.isspace() or unicodedata.category(c) == "Cc" for c in alphabet)


@pytest.mark.parametrize("engine", ENGINES)
def test_hand_made_merges_give_the_tokens_worked_out_by_hand(bpe_files, engine):
    """Rules apply in order of priority: "hello world" is hello, Ġwor, ld."""
    tokenizer = GPT2BPETokenizer(*map(str, bpe_files), engine=engine)
    vocabulary = json.loads(bpe_files[0].read_text(encoding="utf-8"))
    expected = [vocabulary[token] for token in ("hello", "Ġwor", "ld")]
    assert tokenizer.encode("hello world") == expected
    assert tokenizer.engine == engine
    assert tokenizer.decode(expected) == "hello world"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "text, ids",
    [
        ("Hello world", [15496, 995]),
        ("", []),
        ("<|endoftext|>", [27, 91, 437, 1659, 5239, 91, 29]),
    ],
)
def test_gpt2_gives_the_known_ids(gpt2_files, engine, text, ids):
    """GPT-2's published ids come out, and a special token's text is ordinary text."""
    assert _engine_of(gpt2_files, engine).encode(text) == ids


def test_gpt2_sizes(gpt2):
    """GPT-2 has 50,257 ids; the last one ends a document."""
    assert (gpt2.vocab_size, gpt2.eod) == (50257, 50256)
    assert gpt2.decode([15496, gpt2.eod]) == "Hello<|endoftext|>"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXT | ASCII | TRICKY)
def test_engines_agree_and_round_trip(gpt2, gpt2_files, text):
    """C++, library and Python give the same ids for any text, and decoding gives the text back."""
    python = _engine_of(gpt2_files, "python")
    ids = gpt2.encode(text)
    assert ids == python.encode(text)
    assert ids == _engine_of(gpt2_files, "tokenizers").encode(text)
    assert gpt2.decode(ids) == text
    assert python.decode(ids) == text


_engines: dict[tuple[str, str, str], GPT2BPETokenizer] = {}


def _engine_of(files: tuple[str, str], engine: str) -> GPT2BPETokenizer:
    if (*files, engine) not in _engines:
        _engines[*files, engine] = GPT2BPETokenizer(*files, engine=engine)
    return _engines[*files, engine]


def test_engines_agree_on_words_with_many_rules(gpt2, gpt2_files):
    """Long words without a break, where rules compete, come out the same."""
    python = _engine_of(gpt2_files, "python")
    rng = np.random.default_rng(0)
    for alphabet in ("ab", "aeinst", "0123456789", "=-", "éàш"):
        for size in (5, 15, 16, 40, 64, 65, 255, 257, 300):
            word = "".join(rng.choice(list(alphabet), size))
            assert gpt2.encode(word) == python.encode(word) == gpt2.encode(word)


def test_whole_library_pipeline_gives_the_same_ids(gpt2, gpt2_files, shared_data):
    """The `tokenizers` package's own GPT-2 pipeline agrees on real web text."""
    import gzip

    import tokenizers

    model = tokenizers.models.BPE.from_file(*gpt2_files)
    pipeline = tokenizers.Tokenizer(model)
    pipeline.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    with gzip.open(shared_data / "corpora/web/c4-sample-1000.jsonl.gz") as lines:
        texts = [json.loads(line)["text"] for _, line in zip(range(100), lines, strict=False)]
    for text, ids in zip(texts, gpt2.encode_batch(texts), strict=True):
        assert ids.dtype == np.int32
        assert ids.tolist() == pipeline.encode(text).ids


def test_cache_of_words_keeps_its_bound_and_its_answers(bpe_files, monkeypatch):
    """With room for four words every text still gets the same ids."""
    reference = GPT2BPETokenizer(*map(str, bpe_files))
    monkeypatch.setattr(word_cache, "_WORDS", 4)
    small = GPT2BPETokenizer(*map(str, bpe_files), engine="tokenizers")
    text = " ".join(str(i % 13) for i in range(200))
    assert small.encode(text) == reference.encode(text)
    assert len(small._ids_of_word) <= 4


def test_pickle_rebuilds_the_tokenizer(bpe_files):
    """A tokenizer survives the way to a worker process."""
    tokenizer = GPT2BPETokenizer(*map(str, bpe_files), engine="python")
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.engine == "python"
    assert copy.encode("hello world") == tokenizer.encode("hello world")


def test_fingerprint_follows_contents_not_places(bpe_files, tmp_path):
    """Copied files give the same fingerprint, one changed id another."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in bpe_files:
        (folder / path.name).write_bytes(path.read_bytes())
    original = GPT2BPETokenizer(*map(str, bpe_files)).fingerprint()
    copy = [str(folder / path.name) for path in bpe_files]
    assert GPT2BPETokenizer(*copy).fingerprint() == original
    vocabulary = json.loads(Path(copy[0]).read_text(encoding="utf-8"))
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    Path(copy[0]).write_text(json.dumps(vocabulary), encoding="utf-8")
    assert GPT2BPETokenizer(*copy).fingerprint() != original


def test_missing_library_falls_back_and_says_which_engine_runs(bpe_files, monkeypatch):
    """With neither C++ nor library `auto` runs Python; asking for one that is not here fails."""
    for module in ("lmcore.data.tokenizer.native", "lmcore.data.gpt2_preload"):
        monkeypatch.setattr(f"{module}.builders", None)
    with pytest.raises(ConfigError, match="the engine `native` was not built"):
        GPT2BPETokenizer(*map(str, bpe_files), engine="native")
    assert GPT2BPETokenizer(*map(str, bpe_files)).engine == "tokenizers"
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert GPT2BPETokenizer(*map(str, bpe_files)).engine == "python"
    with pytest.raises(MissingPackageError, match="pip install tokenizers"):
        GPT2BPETokenizer(*map(str, bpe_files), engine="tokenizers")


def test_vocabulary_without_end_has_no_eod(bpe_files):
    """`eod` is None where the vocabulary has no end-of-document token."""
    vocabulary = json.loads(bpe_files[0].read_text(encoding="utf-8"))
    del vocabulary["<|endoftext|>"]
    bpe_files[0].write_text(json.dumps(vocabulary), encoding="utf-8")
    assert GPT2BPETokenizer(*map(str, bpe_files)).eod is None


@pytest.mark.parametrize(
    "content, message",
    [
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b"{}", "is not a JSON object"),
        (b'{"a": "1"}', "the id of token `a` is `1`"),
        (b'{"a": -1}', "the id of token `a` is `-1`"),
        (b'{"a": true}', "the id of token `a` is `True`"),
        (b'{"a": 3, "b": 3}', "share the id 3"),
        (b'{"a":\n"\xff"}', "line 2 is not UTF-8"),
        (b'{"a": 0}', "has no token for the byte 0"),
    ],
)
def test_broken_vocabulary_is_named(bpe_files, content, message):
    """A vocabulary that is no map of tokens to ids is refused with its file."""
    bpe_files[0].write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        GPT2BPETokenizer(*map(str, bpe_files))
    assert str(bpe_files[0]) in caught.value.what


@pytest.mark.parametrize(
    "rules, message",
    [
        ("#version: 0.2\nh e\nl\n", "line 3: `l` is not a merge rule"),
        ("h e\nl l l\n", "line 2: `l l l` is not a merge rule"),
        ("h e\n\nl l\n", "line 2: `` is not a merge rule"),
        ("h e\nh e\n", "line 2: the rule `h e` repeats line 1"),
        ("#version: 0.2\nh e\nq z\n", "line 3: the rule `q z` needs the token `qz`"),
        ("h e\nhey o\n", "line 2: the rule `hey o` needs the token `hey`"),
        ("h e\nl l\nhe ll\n", "produces the token `hello` "),
    ],
)
def test_broken_or_foreign_merges_are_named_with_their_line(bpe_files, rules, message):
    """A rule that cannot be read, or that does not fit the vocabulary, is refused by line."""
    bpe_files[1].write_text(rules, encoding="utf-8")
    with pytest.raises(DataError, match=message) as caught:
        GPT2BPETokenizer(*map(str, bpe_files))
    assert str(bpe_files[1]) in caught.value.what


def test_files_of_two_tokenizers_are_refused(gpt2_files, shared_data):
    """GPT-2's vocabulary with another tokenizer's merges is refused, and the other way round."""
    tiny = shared_data / "tokenizers/gpt2-tiny"
    with pytest.raises(DataError, match=r"gpt2-tiny-merges\.txt"):
        GPT2BPETokenizer(gpt2_files[0], str(tiny / "gpt2-tiny-merges.txt"))
    with pytest.raises(DataError, match=r"gpt2-tiny-vocab\.json"):
        GPT2BPETokenizer(str(tiny / "gpt2-tiny-vocab.json"), gpt2_files[1])


@pytest.mark.parametrize("which", [0, 1])
def test_missing_file_is_named(bpe_files, which):
    """A file that is not there gives an error with its path and flag."""
    bpe_files[which].unlink()
    with pytest.raises(DataError) as caught:
        GPT2BPETokenizer(*map(str, bpe_files))
    assert str(bpe_files[which]) in caught.value.what
    assert ("--vocab-file", "--merge-file")[which] in caught.value.hint


@given(TEXT)
def test_bytes_round_trip(text):
    """The byte tokenizer gives the UTF-8 bytes and the text back."""
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    (batch,) = tokenizer.encode_batch([text])
    assert batch.tolist() == tokenizer.encode(text)


def test_bytes_that_are_not_utf8_become_replacement_characters():
    """A cut character decodes to U+FFFD, the end of a document to nothing."""
    assert ByteTokenizer().decode([0xC3, 256, 0x41]) == "�A"
    with pytest.raises(ValueError, match="257"):
        ByteTokenizer().decode([257])


def test_null_reads_ids():
    """The null tokenizer reads numbers, ends documents with V and has V + 1 ids."""
    tokenizer = NullTokenizer(100)
    assert tokenizer.encode("5 99\n0") == [5, 99, 0]
    assert (tokenizer.eod, tokenizer.vocab_size) == (100, 101)
    assert tokenizer.decode([5, 100]) == "5 100"


@pytest.mark.parametrize("text", ["5 x", "1.5", "100", "-1"])
def test_null_refuses_what_is_no_id(text):
    """Words and ids outside the vocabulary are refused."""
    with pytest.raises(DataError):
        NullTokenizer(100).encode(text)


def test_build_gives_the_types():
    """Each name builds its type, and `describe` has what rebuilds it."""
    assert set(tokenizer_types()) > {"ByteTokenizer", "GPT2BPETokenizer", "NullTokenizer"}
    assert build_tokenizer("ByteTokenizer").describe() == {"type": "ByteTokenizer"}
    null = build_tokenizer("NullTokenizer", vocab_size=7)
    assert null.describe() == {"type": "NullTokenizer", "vocab_size": 7}


def test_build_from_description(bpe_files):
    """A description rebuilds an equal tokenizer."""
    first = build_tokenizer(
        "GPT2BPETokenizer", vocab_file=str(bpe_files[0]), merge_file=str(bpe_files[1])
    )
    described = first.describe()
    second = build_tokenizer(described.pop("type"), **described)
    assert second.fingerprint() == first.fingerprint()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"tokenizer_type": "ByteTokeniser"}, "did you mean `ByteTokenizer`"),
        ({"tokenizer_type": "NullTokenizer"}, "--vocab-size"),
        ({"tokenizer_type": "NullTokenizer", "vocab_size": 0}, "`--vocab-size 0`"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v"}, "needs `--merge-file`"),
    ],
)
def test_build_refuses(arguments, message):
    """Unknown types and missing options are refused with the way out."""
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(**arguments)


def test_build_takes_types_of_plugins():
    """A plugin's type is built by name, and cannot take a built-in name."""

    def factory(*, vocab_file, merge_file, vocab_size):
        return NullTokenizer(vocab_size)

    built = build_tokenizer("TheirTokenizer", vocab_size=3, extra={"TheirTokenizer": factory})
    assert built.vocab_size == 4
    with pytest.raises(ConfigError, match="built in"):
        build_tokenizer("ByteTokenizer", extra={"ByteTokenizer": factory})


@pytest.mark.parametrize("engine", ENGINES)
def test_lone_surrogates_are_refused_alike(bpe_files, engine):
    """Both engines refuse text that is not Unicode in the same way."""
    with pytest.raises(UnicodeEncodeError):
        GPT2BPETokenizer(*map(str, bpe_files), engine=engine).encode("a\ud800")
