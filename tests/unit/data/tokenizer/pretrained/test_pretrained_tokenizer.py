"""Pretrained tokenizers, against the library that made them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from lmcore.base.errors import ConfigError, DataError
from lmcore.data.tokenizer import build_tokenizer, special_ids

KINDS = ("PretrainedFromHF", "HFTokenizer", "HuggingFaceTokenizer")
TEXTS = ["hello the worlds!", "", " ", "漢字 é", "a\nb\tc", "x" * 300]
Make = Callable[..., str]
Pipeline = Callable[[], tokenizers.Tokenizer]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_library(kind: str, pipeline: Pipeline, make_pretrained: Make) -> None:
    """Texts have the ids that the library gives them, with what it puts around them or without."""
    path, library = make_pretrained(pipeline()), pipeline()
    tokenizer = build_tokenizer(kind, tokenizer_name_or_path=path)
    bare = build_tokenizer(kind, tokenizer_model=path, add_special_tokens=False)
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert ids.tolist() == tokenizer.encode(text) == library.encode(text).ids
        assert bare.encode(text) == library.encode(text, add_special_tokens=False).ids
    assert tokenizer.vocab_size == library.get_vocab_size()


def test_special_spelling_is_text(pipeline: Pipeline, make_pretrained: Make) -> None:
    """A text cannot spell a special token, even one that is a piece of the model, unless asked."""
    path = make_pretrained(pipeline())
    tokenizer = build_tokenizer("HFTokenizer", tokenizer_model=path, add_special_tokens=False)
    specials = {i for i, one in pipeline().get_added_tokens_decoder().items() if one.special}
    unknown = {pipeline().token_to_id(token) for token in ("<unk>", "[UNK]")}
    for text in ("a </s> b", "</s>", "<pad></s>a", "[CLS] a", "[SEP]", "a <pad>"):
        found = tokenizer.encode(text)
        assert found
        assert not (specials - unknown) & set(found)
    parsing = build_tokenizer("HFTokenizer", tokenizer_model=path, parse_special_tokens=True)
    for text in ("a </s> b", "[CLS] a"):
        assert parsing.encode(text) == pipeline().encode(text).ids


def test_configuration_names_the_special_tokens(
    make_pretrained: Make, bert_pipeline: Pipeline
) -> None:
    """Roles come from the configuration, as texts or objects, and missing ones from neighbours."""
    path = make_pretrained(
        bert_pipeline(),
        {"cls_token": "[CLS]", "sep_token": {"content": "[SEP]"}, "mask_token": "[MASK]"},
    )
    tokenizer = build_tokenizer("PretrainedFromHF", tokenizer_name_or_path=path)
    special = special_ids(tokenizer)
    assert (special.cls, special.sep, special.mask, special.unk) == (2, 3, 4, None)
    assert (special.bos, special.eos, special.pad, tokenizer.eod) == (2, 3, 3, 3)


def test_newer_configuration_counts(make_pretrained: Make, bert_pipeline: Pipeline) -> None:
    """`special_tokens_map.json` is read, and `tokenizer_config.json` has the last word."""
    path = make_pretrained(
        bert_pipeline(),
        {"eos_token": "[SEP]", "pad_token": None},
        special_map={"eos_token": "[CLS]", "pad_token": "[PAD]"},
    )
    tokenizer = build_tokenizer("HFTokenizer", tokenizer_model=path)
    assert (tokenizer.eod, special_ids(tokenizer).pad) == (3, 0)


def test_named_tokens_are_added(make_pretrained: Make, bert_pipeline: Pipeline) -> None:
    """Tokens that only the configuration has get the next ids, in its order, then sentinels."""
    size = bert_pipeline().get_vocab_size()
    config = {
        "added_tokens_decoder": {
            "0": {"content": "[PAD]", "special": True},
            str(size + 1): {"content": "<late>", "special": False},
            str(size): {"content": "<early>", "special": True},
        },
        "eos_token": "<end>",
        "additional_special_tokens": ["<early>", "<more>"],
    }
    path = make_pretrained(bert_pipeline(), config)
    tokenizer = build_tokenizer("HFTokenizer", tokenizer_model=path, vocab_extra_ids=2)
    assert tokenizer.spellings[size:] == (
        "<early>", "<late>", "<end>", "<more>", "<extra_id_0>", "<extra_id_1>"
    )  # fmt: skip
    assert tokenizer.eod == size + 2
    assert special_ids(tokenizer).sentinels == (size + 4, size + 5)
    assert size + 1 in tokenizer.encode("a <late> b")  # a word of the vocabulary, not special
    assert size not in tokenizer.encode("a <early> b")


def test_sentinels_are_called_as_in_each_fork(
    make_pretrained: Make, bert_pipeline: Pipeline
) -> None:
    """`PretrainedFromHF` numbers its sentinels with two digits."""
    path = make_pretrained(bert_pipeline())
    tokenizer = build_tokenizer("PretrainedFromHF", tokenizer_name_or_path=path, vocab_extra_ids=2)
    assert tokenizer.spellings[-2:] == ("<extra_id_00>", "<extra_id_01>")


@pytest.mark.parametrize(
    "config,before,after",
    [
        ({"add_bos_token": False}, [], ["[SEP]"]),
        ({"add_eos_token": False}, ["[CLS]"], []),
        ({"add_bos_token": True, "add_eos_token": False}, ["[CLS]"], []),
        ({"add_bos_token": False, "add_eos_token": False}, [], []),
        ({"add_bos_token": True, "add_eos_token": True}, ["[CLS]"], ["[SEP]"]),
        ({}, ["[CLS]"], ["[SEP]"]),
    ],
)
def test_configuration_sets_the_sentinels(
    config: dict[str, Any],
    before: list[str],
    after: list[str],
    make_pretrained: Make,
    bert_pipeline: Pipeline,
) -> None:
    """`add_bos_token` and `add_eos_token` replace the pipeline's rule, each of its side."""
    roles = {"bos_token": "[CLS]", "eos_token": "[SEP]"}
    path = make_pretrained(bert_pipeline(), roles | config)
    tokenizer = build_tokenizer("HFTokenizer", tokenizer_model=path)
    found = [tokenizer.spellings[i] for i in tokenizer.encode("the a")]
    assert found == [*before, "the", "a", *after]


@pytest.mark.parametrize(
    "name,value,normalizer",
    [
        ("do_lower_case", False, normalizers.BertNormalizer(lowercase=False)),
        ("strip_accents", False, normalizers.BertNormalizer(strip_accents=False)),
        ("tokenize_chinese_chars", False, normalizers.BertNormalizer(handle_chinese_chars=False)),
        ("do_lower_case", True, normalizers.BertNormalizer()),
        ("add_prefix_space", True, normalizers.BertNormalizer()),
    ],
)
@pytest.mark.parametrize("sequence", [False, True])
def test_configuration_sets_options_of_bert(
    name: str,
    value: bool,
    normalizer: normalizers.Normalizer,
    sequence: bool,
    make_pretrained: Make,
    bert_pipeline: Pipeline,
) -> None:
    """Ids are as by a pipeline built with the options of the configuration.

    A general class of transformers has no such options.
    """
    library, expected = bert_pipeline(), bert_pipeline()
    if sequence:
        library.normalizer = normalizers.Sequence([normalizers.NFC(), library.normalizer])
    expected.normalizer = normalizer
    texts = ["the A", "th\u00e9 a", "the \u65e5\u672c a"]
    for name_of_class in (None, "BertTokenizer", "PreTrainedTokenizerFast"):
        path = make_pretrained(library, {"tokenizer_class": name_of_class, name: value})
        tokenizer = build_tokenizer("HFTokenizer", tokenizer_model=path)
        oracle = library if name_of_class == "PreTrainedTokenizerFast" else expected
        assert [tokenizer.encode(text) for text in texts] == [
            oracle.encode(text).ids for text in texts
        ]


def test_configuration_sets_the_prefix_space(make_pretrained: Make) -> None:
    """A byte-level text begins with a space if the configuration says so, and is another's then."""
    path = make_pretrained(_byte_level(add_prefix_space=False), {"add_prefix_space": False})
    plain = build_tokenizer("HFTokenizer", tokenizer_model=path)
    assert plain.encode("a b") == _byte_level(add_prefix_space=False).encode("a b").ids
    before = plain.fingerprint()
    path = make_pretrained(_byte_level(add_prefix_space=False), {})
    assert build_tokenizer("HFTokenizer", tokenizer_model=path).fingerprint() == before
    path = make_pretrained(_byte_level(add_prefix_space=False), {"add_prefix_space": True})
    spaced = build_tokenizer("HFTokenizer", tokenizer_model=path)
    assert spaced.encode("a b") == _byte_level(add_prefix_space=True).encode("a b").ids
    assert spaced.fingerprint() != before


def _byte_level(*, add_prefix_space: bool) -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    library.decoder = decoders.ByteLevel()
    return library


def test_configuration_sets_options_of_tokens(make_pretrained: Make) -> None:
    """Options of a token's entry replace the pipeline's, and a token with a role is special."""
    library = _byte_level(add_prefix_space=False)
    library.add_tokens([tokenizers.AddedToken("<a>", normalized=False)])
    number, b = library.token_to_id("<a>"), library.token_to_id("b")
    flags = {"lstrip": True, "rstrip": True, "single_word": False, "normalized": False}
    entry = {"content": "<a>", "special": False, **flags}
    for config, expected in (
        ({}, library.encode("b <a> b").ids),
        ({"added_tokens_decoder": {str(number): entry}}, [b, number, b]),
    ):
        tokenizer = build_tokenizer("HFTokenizer", tokenizer_model=make_pretrained(library, config))
        assert tokenizer.encode("b <a> b") == expected
    config |= {"eos_token": "<a>"}
    tokenizer = build_tokenizer("HFTokenizer", tokenizer_model=make_pretrained(library, config))
    assert tokenizer.eod == number
    assert number not in tokenizer.encode("b<a>b")


def test_nothing_is_truncated_or_padded(make_pretrained: Make, bert_pipeline: Pipeline) -> None:
    """The lengths in the file have no effect."""
    library = bert_pipeline()
    library.enable_truncation(3)
    library.enable_padding(length=8)
    tokenizer = build_tokenizer("HFTokenizer", tokenizer_model=make_pretrained(library))
    assert len(tokenizer.encode("a b c a b c")) == 8
    assert len(tokenizer.encode("a")) == 3


def test_a_file_alone(make_pretrained: Make, bert_pipeline: Pipeline, tmp_path: Path) -> None:
    """`tokenizer.json` brings what is beside it, a file of another name is read alone."""
    folder = make_pretrained(bert_pipeline(), {"eos_token": "[SEP]"})
    whole = build_tokenizer("HFTokenizer", tokenizer_model=folder)
    named = build_tokenizer("HFTokenizer", tokenizer_model=f"{folder}/tokenizer.json")
    assert named.fingerprint() == whole.fingerprint()
    alone = tmp_path / "alone.json"
    alone.write_bytes(Path(folder, "tokenizer.json").read_bytes())
    tokenizer = build_tokenizer("HFTokenizer", tokenizer_model=str(alone))
    assert tokenizer.files() == (str(alone),)
    assert tokenizer.eod is None
    assert tokenizer.encode("the") == whole.encode("the")


def test_copies_and_fingerprints(make_pretrained: Make, bert_pipeline: Pipeline) -> None:
    """Copies are the same tokenizer; templates of chats do not matter, special tokens do."""
    path = make_pretrained(bert_pipeline(), {"eos_token": "[SEP]"})
    tokenizer = build_tokenizer("HFTokenizer", tokenizer_model=path)
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode("hello") == tokenizer.encode("hello")
    assert copy.fingerprint() == tokenizer.fingerprint()
    make_pretrained(bert_pipeline(), {"eos_token": "[SEP]", "chat_template": "{{ x }}"})
    again = build_tokenizer("HFTokenizer", tokenizer_model=path)
    assert again.fingerprint() == tokenizer.fingerprint()
    make_pretrained(bert_pipeline(), {"eos_token": "[PAD]"})
    other = build_tokenizer("HFTokenizer", tokenizer_model=path)
    assert other.fingerprint() != tokenizer.fingerprint()


def test_decoding(make_pretrained: Make, bert_pipeline: Pipeline) -> None:
    """Special tokens are spelt out, and wrong ids refused."""
    tokenizer = build_tokenizer("HFTokenizer", tokenizer_model=make_pretrained(bert_pipeline()))
    assert tokenizer.decode(tokenizer.encode("hello worlds")) == "[CLS] hello worlds [SEP]"
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            tokenizer.decode([wrong])


def test_surrogates_are_refused(make_pretrained: Make, bert_pipeline: Pipeline) -> None:
    """Half a character is an error, and no id."""
    tokenizer = build_tokenizer("HFTokenizer", tokenizer_model=make_pretrained(bert_pipeline()))
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode_batch(["a", "\udfff"])


def test_unusual_templates(make_pretrained: Make, bert_pipeline: Pipeline) -> None:
    """A template that repeats a text cannot be kept apart from it, and can be turned off."""
    library = bert_pipeline()
    library.post_processor = processors.TemplateProcessing(
        single="$A [SEP] $A", special_tokens=[("[SEP]", 3)]
    )
    path = make_pretrained(library)
    with pytest.raises(DataError, match="adds special tokens inside a text"):
        build_tokenizer("HFTokenizer", tokenizer_model=path)
    bare = build_tokenizer("HFTokenizer", tokenizer_model=path, add_special_tokens=False)
    assert bare.encode("a") == [bert_pipeline().token_to_id("a")]


@pytest.mark.parametrize(
    "name,content,problem",
    [
        ("tokenizer.json", "{", "is not a tokenizer"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
         "is not a tokenizer"),
        ("tokenizer.json", "[" * 100_000, "is not a tokenizer"),
        ("tokenizer.json", "", "is empty"),
        ("tokenizer_config.json", "[]", "is not a JSON object"),
        ("tokenizer_config.json", "{", "is not JSON"),
        ("tokenizer_config.json", '{"eos_token": 3}', "`eos_token` is not a token"),
        ("tokenizer_config.json", '{"eos_token": {"content": ""}}', "`eos_token` is not a token"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": "y"}}',
         "is not an object of ids and tokens"),
        ("tokenizer_config.json", '{"additional_special_tokens": 3}', "is not a list of tokens"),
        ("tokenizer_config.json", '{"add_bos_token": "yes"}', "is neither true nor false"),
    ],
)  # fmt: skip
def test_damaged_files(
    name: str, content: str, problem: str, make_pretrained: Make, bert_pipeline: Pipeline
) -> None:
    """Each file that cannot be used is refused by name."""
    path = make_pretrained(bert_pipeline())
    Path(path, name).write_text(content, encoding="utf-8")
    with pytest.raises(DataError) as caught:
        build_tokenizer("HFTokenizer", tokenizer_model=path)
    assert problem in caught.value.what
    assert name in caught.value.what


@pytest.mark.parametrize(
    "name,hint",
    [
        ("merges.txt", "GPT2BPETokenizer"),
        ("vocab.txt", "BertWordPieceLowerCase"),
        ("spiece.model", "SentencePieceTokenizer"),
        ("tokenizer.model", "Llama2Tokenizer"),
        ("README.md", "check `--tokenizer-name-or-path`"),
    ],
)
def test_other_layouts(name: str, hint: str, tmp_path: Path) -> None:
    """A directory of an older layout is refused with the type that reads it."""
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"has no `tokenizer\.json`") as caught:
        build_tokenizer("PretrainedFromHF", tokenizer_name_or_path=str(tmp_path))
    assert hint in str(caught.value.hint)


def test_names_are_not_fetched(tmp_path: Path) -> None:
    """The name of a tokenizer on a server is no directory, and the message says how to get it."""
    with pytest.raises(DataError, match="no such directory") as caught:
        build_tokenizer("PretrainedFromHF", tokenizer_name_or_path=str(tmp_path / "gpt2"))
    assert "nothing is downloaded" in str(caught.value.why)


@pytest.mark.parametrize("path,name", [("t5-small", "t5-small"), ("/data/t5", "NAME")])
def test_the_download_is_named(path: str, name: str) -> None:
    """A path that may be a name of a hub is part of the command that downloads it."""
    with pytest.raises(DataError) as caught:
        build_tokenizer("PretrainedFromHF", tokenizer_name_or_path=path)
    assert f"hf download {name} --local-dir" in str(caught.value.hint)


def test_one_path(tmp_path: Path) -> None:
    """Two paths, and none, are refused."""
    both = {"tokenizer_model": str(tmp_path), "tokenizer_name_or_path": str(tmp_path)}
    with pytest.raises(ConfigError, match="exclude each other"):
        build_tokenizer("HFTokenizer", **both)
    with pytest.raises(ConfigError, match="needs `--tokenizer-name-or-path` or"):
        build_tokenizer("HFTokenizer")


def test_holes_in_the_vocabulary(make_pretrained: Make) -> None:
    """The size is one more than the largest id, so that every id has an embedding."""
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = build_tokenizer("HFTokenizer", tokenizer_model=make_pretrained(library))
    assert tokenizer.vocab_size == 8
    assert tokenizer.encode("b a") == [7, 0]


def test_byte_level_files_of_gpt2(shared_data: Path, make_pretrained: Make) -> None:
    """GPT-2's vocabulary as a pretrained tokenizer gives the ids of `GPT2BPETokenizer`."""
    folder = shared_data / "tokenizers/gpt2"
    vocab, merges = str(folder / "gpt2-vocab.json"), str(folder / "gpt2-merges.txt")
    library = tokenizers.Tokenizer(models.BPE.from_file(vocab, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens(["<|endoftext|>"])
    path = make_pretrained(library, {"eos_token": "<|endoftext|>"})
    ours = build_tokenizer("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
    pretrained = build_tokenizer("PretrainedFromHF", tokenizer_name_or_path=path)
    assert (pretrained.vocab_size, pretrained.eod) == (ours.vocab_size, ours.eod)
    for text in ("Hello world", "a <|endoftext|> b", "  naïve\n\n漢字", json.dumps({"a": 1})):
        assert pretrained.encode(text) == ours.encode(text)
