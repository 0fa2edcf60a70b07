"""The three types of SentencePiece models, against the library and Megatron's rules."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from lmcore.base.errors import ConfigError, DataError, MissingPackageError
from lmcore.data.tokenizer import build_tokenizer, special_ids, spellings
from lmcore.data.tokenizer.file_tokenizer import added_around, plain_batch, plain_ids

T5, GPT, LLAMA = "SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"
PIECES = ["<extra_id_0>", "<extra_id_1", "<CLS>", "<EOD>", "</s>", "<pad>", "<s>", " ", "the", "\n"]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=8).map("".join)


def library(path: str) -> sentencepiece.SentencePieceProcessor:
    """Read a model with the library itself."""
    return sentencepiece.SentencePieceProcessor(model_file=path)


@given(text=TEXTS)
def test_ids_are_those_of_the_library(t5_model: str, llama_model: str, text: str) -> None:
    """Text has the model's ids whatever it spells; Llama's come after the begin of a text."""
    for path in (t5_model, llama_model):
        expected = library(path).encode(text)
        assert build_tokenizer(GPT, tokenizer_model=path).encode(text) == expected
        plain = build_tokenizer(T5, tokenizer_model=path, vocab_extra_ids=2)
        assert plain.encode(text) == expected
    llama = build_tokenizer(LLAMA, tokenizer_model=llama_model)
    assert llama.encode(text) == [1, *expected]
    bare = build_tokenizer(LLAMA, tokenizer_model=llama_model, add_special_tokens=False)
    assert [ids.tolist() for ids in bare.encode_batch([text, ""])] == [expected, []]


def test_ids_of_a_text_alone(llama_model: str) -> None:
    """The ids without the beginning-of-text id are the model's."""
    tokenizer = build_tokenizer("Llama2Tokenizer", tokenizer_model=llama_model)
    assert added_around(tokenizer) == ((special_ids(tokenizer).bos,), ())
    for text in ("a b", ""):
        assert plain_ids(tokenizer, text) == library(llama_model).encode(text)
    assert plain_batch(tokenizer, ["a b", ""]) == [library(llama_model).encode("a b"), []]
    bare = build_tokenizer("Llama2Tokenizer", tokenizer_model=llama_model, add_special_tokens=False)
    assert added_around(bare) == ((), ())


def test_t5_vocabulary(t5_model: str) -> None:
    """Pair, end and mask tokens follow the pieces, then what the model lacks, then sentinels."""
    tokenizer = build_tokenizer(T5, tokenizer_model=t5_model, vocab_extra_ids=3)
    n = library(t5_model).get_piece_size()
    special = special_ids(tokenizer)
    assert (special.cls, special.sep, tokenizer.eod, special.mask) == (n, n + 1, n + 2, n + 3)
    assert (special.pad, special.eos, special.unk) == (0, 1, 2)
    assert special.bos == n + 4
    assert special.sentinels == (n + 5, n + 6, n + 7)
    assert tokenizer.vocab_size == n + 8
    assert spellings(tokenizer)[n:][:5] == ("<CLS>", "<SEP>", "<EOD>", "<MASK>", "<BOS>")


def test_t5_vocabulary_over_other_models(llama_model: str, make_model: Callable[..., str]) -> None:
    """A missing pad gets an id, and a token that is a piece of the model keeps its own."""
    n = library(llama_model).get_piece_size()
    special = special_ids(build_tokenizer(T5, tokenizer_model=llama_model))
    assert (special.pad, special.bos, special.eos) == (n + 4, 1, 2)
    own = make_model("own", control_symbols=["<EOD>", "<extra_id_0>"])
    tokenizer = build_tokenizer(T5, tokenizer_model=own, vocab_extra_ids=1)
    assert tokenizer.eod == library(own).piece_to_id("<EOD>")
    assert special_ids(tokenizer).sentinels == (library(own).piece_to_id("<extra_id_0>"),)


@given(text=TEXTS)
def test_parsing_follows_megatron(t5_model: str, text: str) -> None:
    """With `parse_special_tokens` what spells a special token becomes it, the first one first."""
    tokenizer = build_tokenizer(
        T5, tokenizer_model=t5_model, vocab_extra_ids=2, parse_special_tokens=True
    )
    n = library(t5_model).get_piece_size()
    added = ["<CLS>", "<SEP>", "<EOD>", "<MASK>", "<BOS>", "<extra_id_0>", "<extra_id_1>"]
    ids = {token: n + i for i, token in enumerate(added)} | {"<pad>": 0, "</s>": 1}
    expected: list[int] = []
    rest = text
    while places := [(rest.index(token), token) for token in ids if token in rest]:
        at, token = min(places)
        expected += [*library(t5_model).encode(rest[:at]), ids[token]]
        rest = rest[at + len(token) :]
    assert tokenizer.encode(text) == expected + library(t5_model).encode(rest)


def test_other_special_ids(t5_model: str, llama_model: str) -> None:
    """The model says what begins, ends and pads a text; its end also ends a document."""
    llama = build_tokenizer(LLAMA, tokenizer_model=llama_model)
    assert (llama.eod, special_ids(llama).bos, special_ids(llama).pad) == (2, 1, None)
    gpt = build_tokenizer(GPT, tokenizer_model=t5_model)
    assert (gpt.eod, special_ids(gpt).bos, special_ids(gpt).pad) == (1, None, 0)
    assert gpt.vocab_size == library(t5_model).get_piece_size()


def test_llama_without_begin(t5_model: str) -> None:
    """A model without a begin of a text puts nothing before one."""
    tokenizer = build_tokenizer(LLAMA, tokenizer_model=t5_model)
    assert tokenizer.encode("the fox") == library(t5_model).encode("the fox")


def test_decoding(t5_model: str, llama_model: str) -> None:
    """Text comes back, T5's special tokens spelt out, and wrong ids are refused."""
    llama = build_tokenizer(LLAMA, tokenizer_model=llama_model)
    assert llama.decode(llama.encode("the 漢 fox\n")) == "the 漢 fox\n"
    t5 = build_tokenizer(T5, tokenizer_model=t5_model, vocab_extra_ids=1, parse_special_tokens=True)
    assert t5.decode(t5.encode("the <extra_id_0> fox")) == "the <extra_id_0> fox"
    for tokenizer in (llama, t5):
        for wrong in (-1, tokenizer.vocab_size):
            with pytest.raises(ValueError, match="outside the vocabulary"):
                tokenizer.decode([1, wrong])


def test_copies(llama_model: str) -> None:
    """A worker's copy and a rebuilt one are the same tokenizer; another toggle is another one."""
    tokenizer = build_tokenizer(LLAMA, tokenizer_model=llama_model)
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode("the dog") == tokenizer.encode("the dog")
    assert copy.fingerprint() == tokenizer.fingerprint()
    bare = build_tokenizer(LLAMA, tokenizer_model=llama_model, add_special_tokens=False)
    assert bare.fingerprint() != tokenizer.fingerprint()
    assert bare.describe() == {
        "type": LLAMA, "tokenizer_model": llama_model, "add_special_tokens": False
    }  # fmt: skip


def test_surrogates_are_refused(t5_model: str) -> None:
    """Half a character is an error, and no id."""
    with pytest.raises(UnicodeEncodeError):
        build_tokenizer(GPT, tokenizer_model=t5_model).encode("a\ud800")


def test_options(t5_model: str) -> None:
    """Each type refuses what it does not take, and says what it needs."""
    with pytest.raises(ConfigError, match="`Llama2Tokenizer` needs `--tokenizer-model`"):
        build_tokenizer(LLAMA)
    with pytest.raises(ConfigError, match="`--vocab-extra-ids 3` cannot be combined with"):
        build_tokenizer(GPT, tokenizer_model=t5_model, vocab_extra_ids=3)


@pytest.mark.parametrize("cut", [0, 1, 5, 1000, -1, -30, -200])
def test_cut_models(cut: int, t5_model: str, tmp_path: Path) -> None:
    """A model that ends early is refused, at whatever byte."""
    path = tmp_path / "cut.model"
    path.write_bytes(Path(t5_model).read_bytes()[:cut])
    with pytest.raises(DataError, match=r"model|is empty"):
        build_tokenizer(GPT, tokenizer_model=str(path))


def test_cut_between_pieces(t5_model: str, tmp_path: Path) -> None:
    """A cut that the library takes for a smaller vocabulary is noticed, too."""
    content = Path(t5_model).read_bytes()
    end = 2 + content[1]  # the first piece and its length
    end += 2 + content[end + 1]
    assert library(t5_model).get_piece_size() > 2
    (tmp_path / "cut.model").write_bytes(content[:end])
    with pytest.raises(DataError, match="not a complete SentencePiece model"):
        build_tokenizer(GPT, tokenizer_model=str(tmp_path / "cut.model"))


@pytest.mark.parametrize("content", [b"[PAD]\n[UNK]\n", b"\xff" * 50, b'{"model": {}}', b"\x0f"])
def test_other_files(content: bytes, tmp_path: Path) -> None:
    """A file of another kind is refused by name."""
    path = tmp_path / "other.model"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"is not a.*SentencePiece model"):
        build_tokenizer(GPT, tokenizer_model=str(path))


def test_missing_library(t5_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `sentencepiece` the command that installs it is named."""
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    with pytest.raises(MissingPackageError, match="pip install sentencepiece"):
        build_tokenizer(GPT, tokenizer_model=t5_model)


def test_real_models(shared_data: Path) -> None:
    """T5's and Mistral's own models give known ids and sizes."""
    path = str(shared_data / "tokenizers/t5/spiece.model")
    t5 = build_tokenizer(T5, tokenizer_model=path, vocab_extra_ids=100)
    assert (t5.vocab_size, t5.eod) == (32105, 32002)
    assert t5.encode("Hello world") == [8774, 296]
    assert special_ids(t5).sentinels[0] == 32005
    path = str(shared_data / "tokenizers/mistral-v1/tokenizer.model.v1")
    mistral = build_tokenizer(LLAMA, tokenizer_model=path)
    assert (mistral.vocab_size, mistral.eod) == (32000, 2)
    assert mistral.encode("Hello world") == [1, 22557, 1526]
