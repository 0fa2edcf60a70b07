"""The tokenizer of a dataset, rebuilt from its metadata."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from lmcore.base.errors import ConfigError
from lmcore.data.indexed.dataset_tokenizer import dataset_tokenizer
from lmcore.data.indexed.metadata import read_metadata
from lmcore.data.prepare.run import PrepareRequest, prepare
from lmcore.data.tokenizer import ByteTokenizer, Tokenizer, build_tokenizer

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] a b".split  # a vocabulary


def wordpiece(folder: Path) -> Tokenizer:
    """Make a WordPiece tokenizer of a few words."""
    (folder / "vocab.txt").write_text("\n".join(WORDS()) + "\n", encoding="utf-8")
    return build_tokenizer(
        "BertWordPieceCase", vocab_file=str(folder / "vocab.txt"), vocab_extra_ids=3
    )


def pretrained(folder: Path) -> Tokenizer:
    """Make a pretrained tokenizer of two words."""
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return build_tokenizer("HFTokenizer", tokenizer_model=str(folder), parse_special_tokens=True)


def prepared(tokenizer: Tokenizer, folder: Path) -> str:
    """Prepare a document and return the dataset's prefix."""
    (folder / "in.jsonl").write_text('{"text": "a b"}\n', encoding="utf-8")
    prefix = str(folder / "out")
    prepare(PrepareRequest((str(folder / "in.jsonl"),), prefix, tokenizer, append_eod=True))
    return f"{prefix}_text_document"


@pytest.mark.parametrize("make", [wordpiece, pretrained])
def test_rebuilt_with_its_options(make: Callable[[Path], Tokenizer], tmp_path: Path) -> None:
    """The metadata has all that builds the tokenizer again."""
    tokenizer = make(tmp_path)
    prefix = prepared(tokenizer, tmp_path)
    metadata = read_metadata(prefix)
    assert metadata is not None
    rebuilt = dataset_tokenizer(metadata.identity, prefix)
    assert rebuilt.describe() == tokenizer.describe()
    assert rebuilt.encode("a <end> b") == tokenizer.encode("a <end> b")


def test_altered_files(tmp_path: Path) -> None:
    """Files that were altered since are refused, the dataset and both fingerprints named."""
    prefix = prepared(wordpiece(tmp_path), tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join([*WORDS(), "c"]), encoding="utf-8")
    metadata = read_metadata(prefix)
    assert metadata is not None
    with pytest.raises(ConfigError, match="was prepared with have changed") as caught:
        dataset_tokenizer(metadata.identity, prefix)
    assert prefix in caught.value.what
    assert metadata.fingerprint[:16] in str(caught.value.why)


def test_altered_configuration(tmp_path: Path) -> None:
    """The end of a document that moves is an altered tokenizer, too."""
    prefix = prepared(pretrained(tmp_path), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "a"}', encoding="utf-8")
    metadata = read_metadata(prefix)
    assert metadata is not None
    with pytest.raises(ConfigError, match="have changed"):
        dataset_tokenizer(metadata.identity, prefix)


def test_missing_files(tmp_path: Path) -> None:
    """Files that are gone are named, and the flags that give them."""
    prefix = prepared(wordpiece(tmp_path), tmp_path)
    (tmp_path / "vocab.txt").unlink()
    metadata = read_metadata(prefix)
    assert metadata is not None
    with pytest.raises(ConfigError, match=r"cannot be built: cannot read .*vocab\.txt") as caught:
        dataset_tokenizer(metadata.identity, prefix)
    assert "--tokenizer-type" in str(caught.value.hint)


def test_a_plugins_type(tmp_path: Path) -> None:
    """A plugin's type comes back through its factory, whatever it describes besides."""

    class Spelling(ByteTokenizer):
        name = "Spelling"

        def describe(self) -> dict[str, str | int | None]:
            return {"type": self.name, "colour": "red"}

    prefix = prepared(Spelling(), tmp_path)
    metadata = read_metadata(prefix)
    assert metadata is not None
    found = dataset_tokenizer(metadata.identity, prefix, extra={"Spelling": lambda **_: Spelling()})
    assert found.name == "Spelling"
    with pytest.raises(ConfigError, match="unknown tokenizer type `Spelling`"):
        dataset_tokenizer(metadata.identity, prefix)
