"""Against other people's tokenizers: `transformers` itself, and Megatron-core's wrappers."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from suite.selection import peer

from lmcore.data.tokenizer import build_tokenizer, special_ids, spellings

pytestmark = [
    pytest.mark.peer,
    # What it imports warns of much that is not ours.
    pytest.mark.filterwarnings("ignore"),
]
# ruff: noqa: RUF001  # letters that look alike are what is tested
ODD = "abc XYZ ,.!'\t\n\x00\x85\u00a0\u2028\u0301éİıßΣς漢字\ufffd\N{SAUROPOD} the and"
SPELT = "x <s></s> <pad> [CLS] <|endoftext|> <extra_id_3> y"


@pytest.fixture(scope="module")
def transformers() -> Any:
    """The package."""
    return peer("transformers")


@pytest.fixture(scope="module")
def texts(shared_data: Path) -> list[str]:
    """Web text, and odd characters."""
    with gzip.open(shared_data / "corpora/web/c4-sample-1000.jsonl.gz", "rt") as stream:
        web = [json.loads(line)["text"] for _, line in zip(range(100), stream, strict=False)]
    dice = random.Random(3)
    odd = ["".join(dice.choice(ODD) for _ in range(dice.randint(1, 40))) for _ in range(300)]
    return [*web, "", "a", " a", *odd]


def from_model(name: str, source: str, config: dict[str, Any]) -> Callable[..., None]:
    """Return a function that saves a pretrained tokenizer made from a SentencePiece model."""

    def save(transformers: Any, tokenizers: Path, folder: Path) -> None:
        shutil.copy(tokenizers / source, folder / Path(name).name)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        kind = getattr(transformers, config["tokenizer_class"])
        kind.from_pretrained(str(folder)).save_pretrained(str(folder))

    return save


def bert(transformers: Any, tokenizers: Path, folder: Path) -> None:
    """Save BERT's."""
    path = str(tokenizers / "bert-base-uncased/vocab.txt")
    transformers.BertTokenizer(path).save_pretrained(str(folder))


def gpt2(transformers: Any, tokenizers: Path, folder: Path) -> None:
    """Save GPT-2's."""
    files = tokenizers / "gpt2/gpt2-vocab.json", tokenizers / "gpt2/gpt2-merges.txt"
    transformers.GPT2Tokenizer(*map(str, files)).save_pretrained(str(folder))


T5 = {"tokenizer_class": "T5Tokenizer", "eos_token": "</s>", "pad_token": "<pad>",
      "unk_token": "<unk>", "extra_ids": 100}  # fmt: skip
LLAMA = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False,
         "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}  # fmt: skip
SAVED = {
    "bert": bert,
    "gpt2": gpt2,
    "t5": from_model("spiece.model", "t5/spiece.model", T5),
    "mistral": from_model("tokenizer.model", "mistral-v1/tokenizer.model.v1", LLAMA),
}


@pytest.mark.parametrize("name", SAVED)
def test_pretrained(
    name: str, transformers: Any, texts: list[str], shared_data: Path, tmp_path: Path
) -> None:
    """A directory that `transformers` wrote gives its ids, sizes and special ids."""
    SAVED[name](transformers, shared_data / "tokenizers", tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    path = {"tokenizer_name_or_path": str(tmp_path)}
    ours = build_tokenizer("PretrainedFromHF", **path)
    bare = build_tokenizer("PretrainedFromHF", **path, add_special_tokens=False)
    for text, ids in zip(texts, ours.encode_batch(texts), strict=True):
        assert ids.tolist() == theirs.encode(text)
        assert bare.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.vocab_size == len(theirs)
    assert ours.eod == (theirs.sep_token_id if theirs.eos_token is None else theirs.eos_token_id)
    parsing = build_tokenizer("HFTokenizer", **path, parse_special_tokens=True)
    assert parsing.encode(SPELT) == theirs.encode(SPELT)
    split = transformers.AutoTokenizer.from_pretrained(str(tmp_path), split_special_tokens=True)
    if name != "t5":  # there theirs takes `</s>` for the piece of that name
        assert bare.encode(SPELT) == split.encode(SPELT, add_special_tokens=False)


def test_wordpiece(transformers: Any, texts: list[str], shared_data: Path) -> None:
    """On ordinary text BERT's words match `transformers`."""
    path = str(shared_data / "tokenizers/bert-base-uncased/vocab.txt")
    theirs = transformers.BertTokenizer(path)
    ours = build_tokenizer("BertWordPieceLowerCase", vocab_file=path)
    for text in texts[:100]:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("model", ["t5/spiece.model", "mistral-v1/tokenizer.model.v1"])
def test_megatron_core(model: str, texts: list[str], shared_data: Path) -> None:
    """Megatron-core reads a model like `GPTSentencePieceTokenizer`, and parses as asked to."""
    library = pytest.importorskip(
        "megatron.core.tokenizers.text.libraries.sentencepiece_tokenizer",
        reason="needs the package megatron-core",
    )
    path = str(shared_data / "tokenizers" / model)
    theirs = library.SentencePieceTokenizer(path)
    ours = build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=path)
    assert [ids.tolist() for ids in ours.encode_batch(texts)] == list(
        map(theirs.text_to_ids, texts)
    )
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eos_id)
    _compare_legacy(library, path, texts)


def _compare_legacy(library: Any, path: str, texts: list[str]) -> None:
    """Compare special tokens that are added, and parsed in text, in the same order."""
    ours = build_tokenizer(
        "SentencePieceTokenizer", tokenizer_model=path, vocab_extra_ids=5, parse_special_tokens=True
    )
    special = special_ids(ours)
    named = {"cls": "<CLS>", "sep": "<SEP>", "eod": "<EOD>", "mask": "<MASK>"}
    spelt = [spellings(ours)[i] for i in (special.pad, special.bos, special.eos)]
    added = [*named.values(), *spelt, *(f"<extra_id_{i}>" for i in range(5))]
    theirs = library.SentencePieceTokenizer(
        path, special_tokens=added, legacy=True, trim_spm_separator_after_special_token=False
    )
    assert ours.vocab_size == theirs.vocab_size
    for text in [*texts[:20], "a <extra_id_0> b<extra_id_4>", "<EOD> x <CLS></s>", "<pad>"]:
        assert ours.encode(text) == theirs.text_to_ids(text)
