"""Text while its tokens come."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from lmcore.data.tokenizer import ByteTokenizer, NullTokenizer, Tokenizer, build_tokenizer
from lmcore.generation.text.stream import TextStream, continuation

BYTES = ByteTokenizer()


def pieces(ids: list[int], prompt: list[int]) -> list[str]:
    """Text that a stream returns for each token, and at the end."""
    stream = TextStream(BYTES, prompt)
    return [*(stream.push(i) for i in ids), stream.finish()]


def test_whole_characters() -> None:
    """A character of several bytes comes with its last byte."""
    found = pieces(list("aé漢\N{SAUROPOD}!".encode()), [])
    assert found == ["a", "", "é", "", "", "漢", "", "", "", "\N{SAUROPOD}", "!", ""]


def test_broken_bytes() -> None:
    """Bytes that are no character are shown as soon as that is certain, or at the end."""
    assert pieces([0xE6, 0xBC, 0x41, 0xE6], []) == ["", "", "\ufffdA", "", "\ufffd"]


def test_endless_broken_bytes() -> None:
    """A flood of broken bytes does not dam the stream."""
    found = pieces([0x80] * 50, [])
    assert "".join(found) == "\ufffd" * 50
    assert max(map(len, found)) <= 3


def test_prompt_is_not_repeated() -> None:
    """Only the text after the prompt is returned."""
    assert "".join(pieces(list(b" there"), list(b"hello"))) == " there"


@pytest.mark.parametrize(
    "prompt, ids, text",
    [
        (b"ab\xe6", b"\xbc\xa2c", "\u6f22c"),
        (b"ab\xe6\xbc", b"\xa2", "\u6f22"),
        (b"\xf0\x9f", b"\xa6\x95\xf0\x9f\xa6\x96", "\N{SAUROPOD}\N{T-REX}"),
        (b"ab\xe6", b"c", "c"),
        (b"ab\xe6", b"\xbc", ""),
        ("a\ufffd".encode(), b"c", "c"),
        ("a\ufffd".encode() + b"\xe6", b"\xbc\xa2\xe6", "\u6f22\ufffd"),
        (b"x" * 70 + b"\xe6", b"\xbc\xa2" + b"y" * 70, "\u6f22" + "y" * 70),
    ],
)
def test_prompt_within_a_character(prompt: bytes, ids: bytes, text: str) -> None:
    """A character that the prompt begins is part of the text; broken bytes of it are not."""
    assert "".join(pieces(list(ids), list(prompt))) == text
    assert continuation(BYTES, list(prompt), list(ids)) == text


def test_eod_prompt() -> None:
    """A document's start has no text."""
    assert "".join(pieces(list(b"Once"), [256])) == "Once"


def test_separated_tokens() -> None:
    """A type that writes something between tokens writes it after the prompt too."""
    numbers = NullTokenizer(100)
    stream = TextStream(numbers, [1, 2])
    assert [stream.push(30), stream.push(4), stream.finish()] == [" 30", " 4", ""]
    assert continuation(numbers, [1, 2], [30, 4]) == " 30 4"


@given(st.binary(max_size=40), st.text(max_size=5))
def test_pieces_joined(data: bytes, prompt: str) -> None:
    """Joined, the pieces are the whole continuation, for any bytes."""
    ids, before = list(data), list(prompt.encode())
    found = pieces(ids, before)
    assert "".join(found) == continuation(BYTES, before, ids)
    assert "".join(found) == data.decode(errors="replace")


@pytest.mark.parametrize("text", ["naïve café", "漢字かな交じり文", "\N{SAUROPOD}\N{T-REX}"])
def test_no_replacement_in_valid_text(text: str) -> None:
    """Valid text is never shown with a replacement character, not for a moment."""
    assert all("\ufffd" not in piece for piece in pieces(list(text.encode()), []))


def byte_fallback(folder: Path) -> Tokenizer:
    """Return a tokenizer as Llama's `tokenizer.json`: bytes for characters that it lacks."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {"<unk>": 256, "\N{LOWER ONE EIGHTH BLOCK}": 257, "a": 258, "b": 259}
    library = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    library.normalizer = normalizers.Replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
        ]
    )
    library.save(str(folder / "tokenizer.json"))
    return build_tokenizer("HuggingFaceTokenizer", tokenizer_name_or_path=str(folder))


@pytest.mark.parametrize(
    "text",
    [
        "a\N{SAUROPOD}\N{T-REX}b",
        "a\n\n\N{SAUROPOD}\n\u6f22\u5b57 b",
        "\u6f22\u5b57" * 40 + " b\u6f22a",
    ],
    ids=["emojis", "line breaks", "long"],
)
@pytest.mark.parametrize("cut", [0, 1, 8, 100])
def test_bytes_in_a_row(text: str, cut: int, tmp_path: Path) -> None:
    """Characters of byte tokens are whole, whatever byte tokens are before, and in the prompt."""
    tokenizer = byte_fallback(tmp_path)
    prompt, rest = text[:cut], text[cut:]
    stream = TextStream(tokenizer, tokenizer.encode(prompt))
    found = [stream.push(token) for token in tokenizer.encode(rest)]
    assert "".join(found) == rest
    assert stream.finish() == ""


def test_broken_bytes_in_a_row(tmp_path: Path) -> None:
    """A broken byte is one U+FFFD, and neither the text before nor after it is lost."""
    tokenizer = byte_fallback(tmp_path)
    stream = TextStream(tokenizer)
    ids = [*"\N{SAUROPOD}".encode(), 0xF0, 258, 259]
    assert "".join(map(stream.push, ids)) == "\N{SAUROPOD}\ufffdab"
    assert [stream.push(0x80) for _ in range(50)].count("") <= 3
    assert "".join(map(stream.push, [258])).endswith("a")
    ends = TextStream(tokenizer)
    assert "".join(map(ends.push, [*b"\n", 0xF0, 0x9F])) == "\n"
    assert ends.finish() == "\ufffd\ufffd"
    assert continuation(tokenizer, [258], [*"\N{SAUROPOD}".encode(), 0xF0]) == "\N{SAUROPOD}\ufffd"


REAL = {
    "gpt2": (
        "GPT2BPETokenizer",
        {"vocab_file": "gpt2/gpt2-vocab.json", "merge_file": "gpt2/gpt2-merges.txt"},
    ),
    "wordpiece": ("BertWordPieceLowerCase", {"vocab_file": "bert-base-uncased/vocab.txt"}),
    "t5": ("SentencePieceTokenizer", {"tokenizer_model": "t5/spiece.model"}),
    "llama": ("Llama2Tokenizer", {"tokenizer_model": "mistral-v1/tokenizer.model.v1"}),
}


@pytest.mark.parametrize("name", REAL)
def test_long_texts(name: str, shared_data: Path) -> None:
    """Real tokenizers: the pieces of a long text of any tokens, joined, are the whole text."""
    kind, files = REAL[name]
    paths = {key: str(shared_data / "tokenizers" / file) for key, file in files.items()}
    tokenizer = build_tokenizer(kind, **paths)
    source = random.Random(name)
    words = [source.randrange(tokenizer.vocab_size) for _ in range(150)]
    text = tokenizer.encode("It's 3.5 km to the café, isn't it? " * 10 + "漢字かな\n  two  spaces ")
    for prompt, ids in (([], words), (text[:90], text[90:] + words), (words, text)):
        stream = TextStream(tokenizer, prompt)
        found = [stream.push(token) for token in ids] + [stream.finish()]
        assert "".join(found) == continuation(tokenizer, prompt, ids)
        before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *ids])
        assert whole.startswith(before.rstrip("\ufffd"))
        assert whole.endswith("".join(found))
        assert len(stream._ids) <= 70
