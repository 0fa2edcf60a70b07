"""BERT's WordPiece, against the definition written out letter by letter."""

from __future__ import annotations

import gzip
import json
import pickle
import threading
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmcore.base.errors import ConfigError, DataError
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.data.input.batch import LineBatch
from lmcore.data.native import builders
from lmcore.data.prepare.encode import EncodePlan, _encode_documents, encode_batch
from lmcore.data.tokenizer import Tokenizer, build_tokenizer, special_ids, spellings
from lmcore.data.tokenizer.wordpiece import BertWordPieceTokenizer

LOWER, CASED = "BertWordPieceLowerCase", "BertWordPieceCase"
# ruff: noqa: RUF001  # letters that look alike are what is tested
ODD = "Σσς\u0301éİıßǅ漢字豈\ufffd\ue000\u0378\u2028\u0085\u00a0\u200b\x00\x0b\x1c\x7f\t\n\r"
# Marks that NFD sorts and that are no accents, the accents around them, characters of four bytes.
ODD += "\u1b44\ua9c0\u302e\u302f\U0001d165\U0001d15e\U00016ff0\u0301\u0345\u0390\uac01≠;'·ʰⅠⓐ𝒜𐐀"
needs_native = pytest.mark.skipif(
    not hasattr(builders, "WordPiece"), reason="needs lmcore._native with WordPiece"
)


# The definition, in plain Python: what the fast code must give.
def is_space(letter: str) -> bool:
    """Return True if BERT treats it as a space."""
    return letter in " \t\n\r" or unicodedata.category(letter) == "Zs"


def is_sign(letter: str) -> bool:
    """Return True if BERT treats it as punctuation."""
    ascii_sign = letter.isascii() and letter.isprintable() and not letter.isalnum()
    return (ascii_sign and letter != " ") or unicodedata.category(letter)[0] == "P"


def is_chinese(letter: str) -> bool:
    """Return True if it is in a block of ideographs."""
    return any(
        low <= ord(letter) <= high
        for low, high in (
            (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F),
            (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
        )
    )  # fmt: skip


def words_of(text: str, *, lower: bool) -> list[str]:
    """Return the words of a text."""
    kept = ""
    for letter in text:
        control = letter not in "\t\n\r" and unicodedata.category(letter) in {"Cc", "Cf"}
        if letter == "\ufffd" or control:
            continue
        kept += " " if is_space(letter) else f" {letter} " if is_chinese(letter) else letter
    found: list[str] = []
    for part in kept.split():
        word = part
        if lower:
            apart = unicodedata.normalize("NFD", part.lower())
            word = "".join(c for c in apart if unicodedata.category(c) != "Mn")
        current = ""
        for letter in word:
            if is_sign(letter):
                found += [current, letter]
                current = ""
            else:
                current += letter
        found.append(current)
    return " ".join(found).split()


def ids_of(text: str, vocabulary: dict[str, int], *, lower: bool) -> list[int]:
    """Return the ids of a text: the longest pieces of each word, from the left."""
    ids: list[int] = []
    for word in words_of(text, lower=lower):
        pieces: list[int] = []
        start = 0
        while start < len(word) <= 200:
            prefix = "##" if start else ""
            ends = [e for e in range(len(word), start, -1) if prefix + word[start:e] in vocabulary]
            if not ends:
                break
            pieces.append(vocabulary[prefix + word[start : ends[0]]])
            start = ends[0]
        ids += pieces if start == len(word) else [vocabulary["[UNK]"]]
    return ids


def vocabulary_of(path: str) -> dict[str, int]:
    """Read the vocabulary of a file."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    return {line: i for i, line in enumerate(lines[:-1])}


@pytest.fixture(params=[LOWER, CASED])
def both(request: pytest.FixtureRequest, wordpieces: str) -> Tokenizer:
    """The small vocabulary, lower-cased and not."""
    return build_tokenizer(request.param, vocab_file=wordpieces, vocab_extra_ids=2)


def check(tokenizer: Tokenizer, text: str) -> None:
    """Compare one text with the definition."""
    vocabulary = vocabulary_of(tokenizer.files()[0])
    expected = ids_of(text, vocabulary, lower=tokenizer.name == LOWER)
    assert tokenizer.encode(text) == expected
    assert [ids.tolist() for ids in tokenizer.encode_batch([text, ""])] == [expected, []]


@given(st.text(st.sampled_from("abchelowrdsT [],.!'#" + ODD)))
@example("hello\x00wor\x1cld Σσς Σ. héllo e\u0301 İ 漢字hello\ufffd\u2028low\u00a0#")
def test_texts_of_odd_characters(wordpieces: str, text: str) -> None:
    """Every text has the ids of the definition, controls, accents and sigma included."""
    for name in (LOWER, CASED):
        check(build_tokenizer(name, vocab_file=wordpieces), text)


@pytest.mark.parametrize("text", ["", " ", "hello" * 40, "a" * 200, "a" * 201, "ΟΔΟΣ.", "ΣΑ ΑΣ"])
def test_boundaries(both: Tokenizer, text: str) -> None:
    """The longest word has 200 characters, and a final sigma is one."""
    check(both, text)


def engines(name: str, path: str) -> tuple[BertWordPieceTokenizer, BertWordPieceTokenizer]:
    """Make a tokenizer in C++ and an equal one in Python."""
    settings = TokenizerSettings(name, vocab_file=path)
    fast = BertWordPieceTokenizer(settings)
    assert fast.threads
    return fast, BertWordPieceTokenizer(settings, engine="python")


def all_letters(path: Path, letters: str) -> str:
    """Make a vocabulary with an id for each letter, alone, lower-cased and within a word."""
    pieces = dict.fromkeys(letters + unicodedata.normalize("NFD", letters.lower()) + "aς1")
    lines = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces, *(f"##{c}" for c in pieces)]
    kept = dict.fromkeys(line for line in lines if line == line.strip() and "\r" not in line)
    path.write_text("\n".join(kept) + "\n", encoding="utf-8")
    return str(path)


def contexts(letters: str) -> Iterator[str]:
    """Yield texts with each letter alone, in a word, beside a capital sigma, and beside marks."""
    for c in letters:
        yield f"{c} a{c}1 {c}{c} A{c}Σ {c}Σ Σ{c} AΣ{c} AΣ{c}a \u302e{c}\U0001d165"


@needs_native
@pytest.mark.parametrize("name", [LOWER, CASED])
@pytest.mark.parametrize("step", [pytest.param(5, marks=pytest.mark.full), 97])
def test_characters_are_as_in_python(name: str, step: int, tmp_path: Path) -> None:
    """Characters of all planes have the ids of the twin in Python, in every context."""
    codes = [*range(0x500), *range(0x500, 0x110000, step)]
    letters = "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)
    fast, exact = engines(name, all_letters(tmp_path / "vocab.txt", letters))
    texts = list(contexts(letters))
    for text, ids in zip(texts, fast.encode_batch(texts), strict=True):
        assert ids.tolist() == exact.encode(text), ascii(text)


@needs_native
@given(st.text(st.sampled_from("aA1 ,#" + ODD) | st.characters(exclude_categories=["Cs"])))
@example("x\u302e\U0001d165\u302f\x00\u302e y")
@example("a" * 200 + "\u0301 " + "a" * 201 + " é" * 40 + "é" * 201)
def test_random_texts_are_as_in_python(wordpieces: str, text: str) -> None:
    """Texts of any characters have the ids of the twin in Python."""
    for name in (LOWER, CASED):
        fast, exact = engines(name, wordpieces)
        assert fast.encode(text) == exact.encode(text)


@needs_native
@given(
    st.lists(st.text(st.sampled_from("he lo," + ODD), max_size=30), min_size=2, max_size=2).flatmap(
        lambda pair: st.lists(st.just(pair), max_size=4)
    ),
    st.sampled_from([np.dtype(np.uint16), np.dtype(np.int32)]),
    st.booleans(),
)
@example([["hello", "\u302e\U0001d165"], ["\u302e\U0001d165", "lo"]], np.dtype(np.int32), True)
def test_blocks_are_as_in_python(
    wordpieces: str, records: list[list[str]], dtype: np.dtype[np.integer], escaped: bool
) -> None:
    """A block of JSON lines gives the same arrays, also where C++ leaves a text to Python."""
    fast, exact = engines(LOWER, wordpieces)
    plan = EncodePlan(keys=("a", "b"), end=fast.eod, dtype=dtype, stop=False)
    rows = [json.dumps(dict(zip("ab", row, strict=True)), ensure_ascii=escaped) for row in records]
    batch = LineBatch("x", 1, "".join(f"{row}\n" for row in [*rows, "{", *rows]).encode())
    found, expected = encode_batch(batch, fast, plan), _encode_documents(batch, exact, plan)
    for ours, theirs in zip(found.keys, expected.keys, strict=True):
        assert ours.tokens.dtype == theirs.tokens.dtype
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert (ours.lengths.tolist(), ours.empty) == (theirs.lengths.tolist(), theirs.empty)
    assert (found.documents, found.skipped) == (expected.documents, expected.skipped)


@needs_native
def test_tables_are_made_by_several_threads(wordpieces: str) -> None:
    """Threads that meet the same new characters at once all get the same ids."""
    fast, exact = engines(LOWER, wordpieces)
    text = "".join(chr(c) for c in range(0x80, 0xD800, 37))
    found: list[list[int]] = []
    threads = [threading.Thread(target=lambda: found.append(fast.encode(text))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [exact.encode(text)] * 8


def test_special_tokens_follow_the_vocabulary(both: Tokenizer, wordpieces: str) -> None:
    """`[BOS]`, `[EOS]` and the sentinels get the next ids, and `[EOS]` ends a document."""
    size = len(vocabulary_of(wordpieces))
    special = special_ids(both)
    assert (special.pad, special.unk, special.cls, special.sep, special.mask) == (0, 1, 2, 3, 4)
    assert (special.bos, special.eos, both.eod) == (size, size + 1, size + 1)
    assert special.sentinels == (size + 2, size + 3)
    assert both.vocab_size == size + 4
    assert spellings(both)[size:] == ("[BOS]", "[EOS]", "<extra_id_0>", "<extra_id_1>")


def test_tokens_of_the_file_keep_their_ids(tmp_path: Path) -> None:
    """A vocabulary that has `[EOS]` or a sentinel already is not given another one."""
    path = tmp_path / "vocab.txt"
    path.write_text("[EOS]\n[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n<extra_id_1>\n", encoding="utf-8")
    tokenizer = build_tokenizer(LOWER, vocab_file=str(path), vocab_extra_ids=2)
    assert tokenizer.eod == 0
    assert special_ids(tokenizer).sentinels == (8, 6)
    assert tokenizer.vocab_size == 9


def test_special_spelling_is_text(both: Tokenizer) -> None:
    """A text that spells a special token is brackets and words."""
    found = both.encode("[CLS] <extra_id_0> [EOS]")
    special = special_ids(both)
    assert not {special.cls, special.eos, *special.sentinels} & set(found)


def test_decoding(both: Tokenizer) -> None:
    """Pieces are joined to words, and ids outside the vocabulary are refused."""
    assert both.decode(both.encode("hello worlds!")) == "hello worlds !"
    for wrong in (-1, both.vocab_size):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            both.decode([wrong])


def test_pickling_and_description(both: Tokenizer) -> None:
    """A worker's copy and a rebuilt one encode alike and have the same fingerprint."""
    described = both.describe()
    kind = str(described.pop("type"))
    for copy in (pickle.loads(pickle.dumps(both)), build_tokenizer(kind, **described)):
        assert copy.encode("hello the world") == both.encode("hello the world")
        assert copy.fingerprint() == both.fingerprint()


def test_fingerprint_depends_on_case_and_sentinels(wordpieces: str) -> None:
    """Types and options that give other ids have other fingerprints."""
    made = [
        build_tokenizer(LOWER, vocab_file=wordpieces),
        build_tokenizer(CASED, vocab_file=wordpieces),
        build_tokenizer(LOWER, vocab_file=wordpieces, vocab_extra_ids=1),
    ]
    assert len({tokenizer.fingerprint() for tokenizer in made}) == 3


def test_surrogates_are_refused(both: Tokenizer) -> None:
    """Half a character is an error, and no id."""
    for encode in (both.encode, lambda text: both.encode_batch(["a", text])):
        with pytest.raises(UnicodeEncodeError):
            encode("a\ud800b")


@pytest.mark.parametrize(
    "content,problem",
    [
        (b"", "is empty"),
        (b"[PAD]\n[UNK]\n\xff\n", "line 3 is not UTF-8"),
        (b"[PAD]\na\na\n", "line 3: the token `a` repeats line 2"),
        (b"[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n", "has no token `[MASK]`"),
        (b'{"a": 0}', "has no token `[PAD]`"),
    ],
)
def test_unfit_files(content: bytes, problem: str, tmp_path: Path) -> None:
    """A file that is no vocabulary of BERT is refused by name and line."""
    path = tmp_path / "vocab.txt"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        build_tokenizer(LOWER, vocab_file=str(path))
    assert problem in caught.value.what


def test_missing_file_and_wrong_options(wordpieces: str, tmp_path: Path) -> None:
    """A missing file is named, and options of other types are refused."""
    with pytest.raises(DataError, match="cannot read"):
        build_tokenizer(LOWER, vocab_file=str(tmp_path / "none.txt"))
    with pytest.raises(ConfigError, match="needs `--vocab-file`"):
        build_tokenizer(CASED)
    with pytest.raises(ConfigError, match="`--merge-file m` cannot be combined with"):
        build_tokenizer(CASED, vocab_file=wordpieces, merge_file="m")


def test_real_vocabulary(shared_data: Path) -> None:
    """BERT's own vocabulary gives known ids, and the definition's ids on web text."""
    path = str(shared_data / "tokenizers/bert-base-uncased/vocab.txt")
    tokenizer = build_tokenizer(LOWER, vocab_file=path)
    assert (tokenizer.vocab_size, tokenizer.eod) == (30524, 30523)
    assert tokenizer.encode("Hello world! unaffable") == [7592, 2088, 999, 14477, 20961, 3468]
    vocabulary = vocabulary_of(path)
    with gzip.open(shared_data / "corpora/web/c4-sample-1000.jsonl.gz", "rt") as stream:
        texts = [json.loads(line)["text"] for _, line in zip(range(60), stream, strict=False)]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.tolist() == ids_of(text, vocabulary, lower=True)
