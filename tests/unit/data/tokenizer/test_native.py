"""Byte-level BPE in C++ against its twins in Python: the classes, the words, the lines of JSON."""

from __future__ import annotations

import importlib.util
import json
import threading
from pathlib import Path

import numpy as np
import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from lmcore.data import native
from lmcore.data.gpt2_preload import BpeContents
from lmcore.data.input.batch import LineBatch
from lmcore.data.prepare.encode import EncodePlan, _encode_documents, encode_batch
from lmcore.data.tokenizer import GPT2BPETokenizer
from lmcore.data.tokenizer.bpe_files import byte_alphabet
from lmcore.data.tokenizer.gpt2 import python_bpe
from lmcore.data.tokenizer.native import NativeEncoder, native_bpe

pytestmark = pytest.mark.skipif(not native.available, reason="needs lmcore._native")

ROOT = Path(__file__).resolve().parents[4]
ALPHABET = byte_alphabet()


def bytes_only():
    """Make a vocabulary of bytes, in which a word has one id for each byte."""
    return native_bpe({c: i for i, c in enumerate(ALPHABET)}, [])


@pytest.mark.skipif(not (ROOT / "native").is_dir(), reason="needs the sources, not the wheel")
def test_table_of_characters_is_that_of_the_installed_regex():
    """The compiled table equals today's output of native/generate_character_classes.py."""
    path = ROOT / "native/generate_character_classes.py"
    spec = importlib.util.spec_from_file_location("generate_character_classes", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.header() + "\n" == path.with_name("character_classes.hpp").read_text()


def test_every_character_is_of_the_class_that_the_pattern_gives_it(hand_made):
    """Between letters, digits and blanks each character of Unicode parts words as in Python."""
    exact = GPT2BPETokenizer(hand_made.vocab_file, hand_made.merge_file, engine="python")
    scalars = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    words = regex.compile(r"\p{L}|\p{N}|\s")
    wanted = [c for c in scalars if words.match(c)] + [chr(i) for i in range(0x300)]
    texts = [f"a{c}b {c}1 {c} {c}{c}'s" for c in wanted[::7]]
    for text, ids in zip(texts, hand_made.encode_batch(texts), strict=True):
        assert ids.tolist() == exact.encode(text), ascii(text)


@st.composite
def vocabularies(draw):
    """Draw rules of any order over few bytes, also ones that no training would find."""
    tokens = list("abc")
    merges = []
    for _ in range(draw(st.integers(1, 12))):
        pair = (draw(st.sampled_from(tokens)), draw(st.sampled_from(tokens)))
        if pair not in merges:
            merges.append(pair)
            tokens.append("".join(pair))
    return draw(st.permutations(merges))


@given(merges=vocabularies(), text=st.text("abc", min_size=1, max_size=200))
def test_merges_follow_the_definition_whatever_the_rules(merges, text):
    """Short and long words, and rules that make pairs of earlier rules, come out as defined."""
    made = {left + right for left, right in merges}
    vocabulary = {token: i for i, token in enumerate([*ALPHABET, *sorted(made)])}
    (ids,) = native_bpe(vocabulary, merges).encode_texts([text])
    assert ids.tolist() == list(python_bpe(vocabulary, merges)(text))


RULES = {
    "good": ("#version: 0.2\na b\nab c\n", True),
    "without a head": ("a b\nab c", True),
    "blank lines at the end": ("a b\nab c\n\n\n", True),
    "carriage returns": ("a b\r\nab c\r\n", False),
    "a rule twice": ("a b\nab c\na b\n", False),
    "three parts": ("a b c\nab c\n", False),
    "one part": ("ab\nab c\n", False),
    "an empty part": ("a \nab c\n", False),
    "an empty first part": (" b\nab c\n", False),
    "a blank line between": ("a b\n\nab c\n", False),
    "an unknown part": ("a b\nab d\n", False),
    "a token that no rule makes": ("a b\n", False),
    "no UTF-8": ("a b\nab c\n\udcff x\n", False),
}


@pytest.mark.parametrize("name", RULES)
def test_files_about_which_there_is_a_doubt_go_to_python(name):
    """Only files that certainly belong together are taken, with the ids that their rules give."""
    text, certain = RULES[name]
    tokens = [*ALPHABET, "ab", "abc", "", "<|endoftext|>", "[PAD]"]
    vocabulary = {token: i for i, token in enumerate(tokens) if token}
    files = of_files(json.dumps(vocabulary).encode(), text.encode(errors="surrogateescape"))
    assert (files is not None) == certain
    if files is not None:
        (ids,) = NativeEncoder(files[0]).encode_texts(["abcab<|endoftext|>"])
        assert ids.tolist()[:2] == [vocabulary["abc"], vocabulary["ab"]]
        assert len(ids) == 2 + len("<|endoftext|>")
    assert of_files(b'{"a": 0}', b"") is None


def of_files(vocabulary, merges):
    return BpeContents.of(vocabulary, merges).native


BYTES_JSON = json.dumps({c: i for i, c in enumerate(ALPHABET)}).encode()[:-1]
VOCABULARIES = {
    "good": (b', "ab": 300, "<|endoftext|>": 299}', True),
    "no end of a document": (b', "ab": 256}', True),
    "without escapes": (', "ab": 256, "[\u00e9\U0001f600]": 257}'.encode(), True),
    "a pair of surrogates": (b', "ab": 256, "<\\ud83d\\ude00>": 257}', True),
    "blanks everywhere": (b' ,\r\n\t"ab"\t:\n256 }  \r\n', True),
    "ids far apart": (b', "ab": 2147483646}', False),
    "too great an id": (b', "ab": 2147483647}', False),
    "an id of many digits": (b', "ab": 99999999999999999999}', False),
    "an id twice": (b', "ab": 0}', False),
    "a token twice": (b', "ab": 256, "ab": 257}', False),
    "a token twice, spelt otherwise": (b', "ab": 256, "\\u0061b": 257}', False),
    "a negative id": (b', "ab": -1}', False),
    "a fraction": (b', "ab": 256.0}', False),
    "an exponent": (b', "ab": 256e0}', False),
    "a leading zero": (b', "ab": 0256}', False),
    "true": (b', "ab": true}', False),
    "a string": (b', "ab": "256"}', False),
    "no id": (b', "ab"}', False),
    "no token": (b", 256}", False),
    "an inner object": (b', "ab": {"a": 256}}', False),
    "a comma too many": (b', "ab": 256,}', False),
    "no end": (b', "ab": 256', False),
    "no end of a token": (b', "ab', False),
    "something after it": (b', "ab": 256} {}', False),
    "a control character": (b', "ab": 256, "<\n>": 257}', False),
    "a wrong escape": (b', "ab": 256, "<\\x41>": 257}', False),
    "an escape cut short": (b', "ab": 256, "<\\u004', False),
    "a lone surrogate": (b', "ab": 256, "<\\ud83d>": 257}', False),
    "a lone low surrogate": (b', "ab": 256, "<\\ude00>": 257}', False),
    "no UTF-8": (b', "ab": 256, "<\xff>": 257}', False),
    "a surrogate in UTF-8": (b', "ab": 256, "<\xed\xa0\x80>": 257}', False),
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_vocabularies_about_which_there_is_a_doubt_go_to_python(name):
    """C++ takes a vocabulary only if Python would read the same; Python reads the others."""
    ending, certain = VOCABULARIES[name]
    content = BYTES_JSON + ending
    files = of_files(content, b"a b\n")
    assert (files is not None) == certain
    if files is not None:
        vocabulary = json.loads(content)
        encoder, *told = files
        assert told == [max(vocabulary.values()) + 1, vocabulary.get("<|endoftext|>")]
        (ids,) = NativeEncoder(encoder).encode_texts(["abba"])
        assert ids.tolist() == [vocabulary[token] for token in ("ab", "b", "a")]


def test_other_vocabularies_are_no_object_of_bytes():
    """A byte-order mark, an array, nothing, and an object without all bytes are left to Python."""
    whole = BYTES_JSON + b', "ab": 256}'
    assert of_files(whole, b"a b\n") is not None
    for content in (
        b"",
        b"{}",
        b"[]",
        b"1",
        b"\xef\xbb\xbf" + whole,
        whole.replace(b'"a"', b'"aa"'),
    ):
        assert of_files(content, b"a b\n") is None
    assert of_files(whole, b"#version \xff\na b\n") is None


@given(
    st.dictionaries(
        st.text(max_size=3).map(lambda text: f"<{text}>"),
        st.integers(250, 2000) | st.booleans() | st.floats() | st.none(),
        max_size=8,
    ),
    st.booleans(),
    st.sampled_from([None, 0, 1, "\t"]),
)
def test_vocabularies_that_are_taken_are_read_as_python_reads_them(tokens, ascii_only, indent):
    """Size and ids match `json`, for any tokens, escapes and blanks."""
    vocabulary = {**{c: i for i, c in enumerate(ALPHABET)}, **tokens}
    ids = list(vocabulary.values())
    content = json.dumps(vocabulary, ensure_ascii=ascii_only, indent=indent)
    files = of_files(content.encode(errors="surrogatepass"), b"")
    sound = {type(i) for i in ids} == {int} and len(set(ids)) == len(ids)
    assert (files is not None) == sound
    if files is not None:
        assert files[1] == max(ids) + 1


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
LINES = [
    b'{"text": "a\\u00e9\\ud83d\\ude00\\n\\/\\"\\\\ b"}',
    b'{"text": "\\ud83d"}',
    b'{"text": "\\ude00\\ud83d"}',
    b'{"text": "\\ud83dx"}',
    b'{"text": "\\ud83d\\u0041"}',
    b'{"text": "\xc3\xa9 \xf0\x9f\x98\x80"}',
    b'{"text": "\xed\xa0\x80"}',
    b'{"text": "\xc0\x80"}',
    b'{"text": "\xf4\x90\x80\x80"}',
    b'{"text": "\xe9"}',
    b'{"other": "\xff", "text": "a"}',
    b'{"text": "one", "text": "two"}',
    b'{"text": 1, "text": "two"}',
    b'{"text": "one", "text": 2}',
    b'{"te\\u0078t": "escaped"}',
    b'{"n": NaN, "text": "a"}',
    b'{"n": -Infinity, "text": "a"}',
    b'{"n": 01, "text": "a"}',
    b'{"n": 1., "text": "a"}',
    b'{"n": -0.5e+10, "m": 0, "text": "a"}',
    b'{"n": .5, "text": "a"}',
    b'{"n": - 1, "text": "a"}',
    b'{"n": ' + b"1" * 5000 + b', "text": "a"}',
    b'{"n": {"text": "inner"}, "text": "outer"}',
    b'{"n": {"text": "inner"}}',
    b'{"n": ' + b"[" * 70 + b"]" * 70 + b', "text": "deep"}',
    b'{"n": ' + b"[" * 5000 + b"]" * 5000 + b', "text": "deeper"}',
    b'{"text": "a",}',
    b'{"text": "a"} x',
    b'{"text": "a"',
    b'{"text": "a',
    b'{"text": "a\\',
    b'{"text": "a\\u12',
    b'{"text": "a\\q"}',
    b'{"text": "a\tb"}',
    b'{"text" "a"}',
    b"{}",
    b"[]",
    b"null",
    b"",
    b" \t\r",
    b"\x0b",
    b'\t{ "text" :\t"a" }\r',
    b'{"text": ""}',
    b'{"text": "\\u0000"}',
    b'{"text": truely}',
    b'{"a": true, "b": false, "c": null, "d": [], "e": {}, "text": "a"}',
    b'{"a": tru, "text": "a"}',
    b'{"a": [1 2], "text": "a"}',
    b'{"a": {"b" : 1,}, "text": "a"}',
]


def both_ways(tokenizer, block, *, stop=False, keys=("text",), first=1):
    """Encode a block as it is done, and as Python alone does it."""
    plan = EncodePlan(keys, end=7, dtype=np.dtype(np.uint16), stop=stop)
    batch = LineBatch("file", first, block)
    return encode_batch(batch, tokenizer, plan), _encode_documents(batch, tokenizer, plan)


def same(one, other):
    assert (one.documents, one.json_bytes) == (other.documents, other.json_bytes)
    assert one.skipped == other.skipped
    assert one.problem == other.problem
    for a, b in zip(one.keys, other.keys, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.tokens.dtype == b.tokens.dtype
        assert a.lengths.tolist() == b.lengths.tolist()
        assert a.empty == b.empty


@pytest.mark.parametrize("line", LINES)
def test_every_kind_of_line_gives_what_python_gives(hand_made, line):
    """Odd lines are accepted or refused with the same messages, in the same order."""
    good = b'{"text": "good"}'
    block = b"\n".join([good, line, line, good, b"", line, good])
    same(*both_ways(hand_made, block + b"\n", first=41))
    same(*both_ways(hand_made, block))
    same(*both_ways(hand_made, line))
    stopped, python = both_ways(hand_made, block, stop=True)
    assert stopped.problem == python.problem


@given(
    records=st.lists(st.dictionaries(st.sampled_from(["text", "t", "title"]), JSON_VALUES)),
    ascii_only=st.booleans(),
)
def test_any_records_give_what_python_gives(hand_made, records, ascii_only):
    """Both ways agree for any JSON records, with one key or two."""
    made = "\n".join(json.dumps(record, ensure_ascii=ascii_only) for record in records)
    block = made.encode(errors="surrogatepass")
    same(*both_ways(hand_made, block))
    same(*both_ways(hand_made, block, keys=("title", "text")))


@given(junk=st.lists(st.binary(max_size=40) | st.sampled_from(LINES), max_size=20))
def test_any_bytes_give_what_python_gives(hand_made, junk):
    """Broken bytes are refused alike, and nothing is read beyond them."""
    same(*both_ways(hand_made, b"\n".join(junk)))


def test_threads_share_one_encoder(hand_made):
    """Blocks that are encoded at the same time come out as alone."""
    blocks = [
        b"".join(b'{"text": "word%d of thread %d"}\n' % (i * i, t) for i in range(3000))
        for t in range(4)
    ]
    plan = EncodePlan(("text",), end=None, dtype=np.dtype(np.int32), stop=True)
    alone = [encode_batch(LineBatch("f", 1, block), hand_made, plan) for block in blocks]
    together = [None] * 4

    def work(i):
        for _ in range(3):
            together[i] = encode_batch(LineBatch("f", 1, blocks[i]), hand_made, plan)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(alone, together, strict=True):
        same(one, other)


def test_flat_ids_of_several_threads_are_those_of_one(hand_made):
    """However many threads, the arrays joined are the texts' ids in order."""
    texts = [f"text {i} " * (i % 50) for i in range(300)]
    want = np.concatenate(hand_made.encode_batch(texts))
    for threads in (1, 2, 5, 400):
        arrays, lengths = hand_made.encode_flat(texts, threads=threads)
        assert np.concatenate(arrays).tolist() == want.tolist()
        assert int(lengths.sum()) == len(want)


def test_caches_give_way_and_keep_their_answers():
    """More words than any cache holds, of every length, come out right twice."""
    encoder = bytes_only()
    words = [f"{i:x}" * (1 + i % 90) for i in range(30_000)]
    for _ in range(2):
        for word, ids in zip(words, encoder.encode_texts(words), strict=True):
            assert ids.tolist() == list(word.encode())
