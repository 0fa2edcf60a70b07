"""The copy of a tokenizer that a run directory keeps."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import sentencepiece
import tokenizers

from lmcore.base.errors import ConfigError, DataError
from lmcore.data.tokenizer import (
    ByteTokenizer,
    GPT2BPETokenizer,
    NullTokenizer,
    Tokenizer,
    build_tokenizer,
)
from lmcore.data.tokenizer.bpe_files import byte_alphabet
from lmcore.data.tokenizer.saved import load_tokenizer, save_tokenizer

TEXT = "the theme: naïve 漢字 \N{SAUROPOD}\n"


def bpe(folder: Path, *, merges: tuple[str, ...] = ("t h", "th e")) -> GPT2BPETokenizer:
    """Make a byte-level BPE of a few rules in *folder*."""
    folder.mkdir(exist_ok=True)
    tokens = [*byte_alphabet(), *(rule.replace(" ", "") for rule in merges), "<|endoftext|>"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    (folder / "any.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "any.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    return GPT2BPETokenizer(str(folder / "any.json"), str(folder / "any.txt"))


def record(directory: Path) -> dict[str, object]:
    """Read the JSON record of a saved tokenizer."""
    return json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), NullTokenizer(17)])
def test_fileless_types_return(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A tokenizer without files comes back as it was, its size included."""
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    loaded = load_tokenizer(tmp_path / "tokenizer")
    assert loaded.describe() == tokenizer.describe()
    assert (loaded.vocab_size, loaded.eod) == (tokenizer.vocab_size, tokenizer.eod)


def test_files_travel_with_the_run(tmp_path: Path) -> None:
    """A moved run directory needs nothing of where its tokenizer came from."""
    tokenizer = bpe(tmp_path / "source")
    expected, fingerprint = tokenizer.encode(TEXT), tokenizer.fingerprint()
    (tmp_path / "run").mkdir()
    save_tokenizer(tokenizer, tmp_path / "run" / "tokenizer")
    (tmp_path / "source" / "any.json").unlink()
    (tmp_path / "run").rename(tmp_path / "moved")
    loaded = load_tokenizer(tmp_path / "moved" / "tokenizer")
    assert loaded.encode(TEXT) == expected
    assert loaded.decode(expected) == TEXT
    assert record(tmp_path / "moved" / "tokenizer") == {
        "type": "GPT2BPETokenizer",
        "vocab_file": "vocab.json",
        "merge_file": "merges.txt",
        "vocab_size": None,
        "fingerprint": fingerprint,
    }


def test_nothing_else_is_left(tmp_path: Path) -> None:
    """A save leaves the directory alone behind, and a second save of the same changes nothing."""
    tokenizer = bpe(tmp_path / "source")
    (tmp_path / "run").mkdir()
    save_tokenizer(tokenizer, tmp_path / "run" / "tokenizer")
    before = (tmp_path / "run" / "tokenizer").stat().st_ino
    save_tokenizer(tokenizer, tmp_path / "run" / "tokenizer")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["tokenizer"]
    assert (tmp_path / "run" / "tokenizer").stat().st_ino == before


def test_own_copy_is_saved_again(tmp_path: Path) -> None:
    """A run that loads from its own directory saves into it without losing its files."""
    save_tokenizer(bpe(tmp_path / "source"), tmp_path / "tokenizer")
    save_tokenizer(load_tokenizer(tmp_path / "tokenizer"), tmp_path / "tokenizer")
    assert load_tokenizer(tmp_path / "tokenizer").encode("the")


def test_another_tokenizer_is_replaced_on_request(tmp_path: Path) -> None:
    """It is replaced whole; the same one is left as it is."""
    directory = tmp_path / "tokenizer"
    save_tokenizer(bpe(tmp_path / "source"), directory)
    save_tokenizer(ByteTokenizer(), directory, replace=True)
    assert load_tokenizer(directory).name == "ByteTokenizer"
    assert [path.name for path in directory.iterdir()] == ["tokenizer.json"]
    before = directory.stat().st_ino
    save_tokenizer(ByteTokenizer(), directory, replace=True)
    assert directory.stat().st_ino == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "tokenizer"]


def test_another_tokenizer_is_not_overwritten(tmp_path: Path) -> None:
    """A directory that holds another tokenizer is refused and stays."""
    save_tokenizer(ByteTokenizer(), tmp_path / "tokenizer")
    with pytest.raises(DataError, match="holds another tokenizer"):
        save_tokenizer(NullTokenizer(5), tmp_path / "tokenizer")
    assert load_tokenizer(tmp_path / "tokenizer").name == "ByteTokenizer"


@pytest.mark.parametrize("damage", ["tokenizer.json", "merges.txt"])
def test_broken_directory_is_replaced(damage: str, tmp_path: Path) -> None:
    """A directory that another process left incomplete is written again."""
    tokenizer = bpe(tmp_path / "source")
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / damage).unlink()
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    assert load_tokenizer(tmp_path / "tokenizer").encode(TEXT) == tokenizer.encode(TEXT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "tokenizer"]


def test_failed_save_leaves_nothing(tmp_path: Path) -> None:
    """A source file that is gone is named, and no half directory appears."""
    tokenizer = bpe(tmp_path / "source")
    fingerprint = tokenizer.fingerprint()
    tokenizer.fingerprint = lambda: fingerprint  # the file goes away after it was hashed
    (tmp_path / "source" / "any.txt").unlink()
    with pytest.raises(DataError, match="cannot save the tokenizer"):
        save_tokenizer(tokenizer, tmp_path / "tokenizer")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_altered_file_is_noticed(tmp_path: Path) -> None:
    """Files that make another tokenizer are refused by the fingerprint."""
    save_tokenizer(bpe(tmp_path / "one"), tmp_path / "tokenizer")
    other = bpe(tmp_path / "two", merges=("t h", "th e", "h e"))
    for name, path in zip(("vocab.json", "merges.txt"), other.files(), strict=True):
        (tmp_path / "tokenizer" / name).write_bytes(Path(path).read_bytes())
    with pytest.raises(DataError, match="is not the one that was saved there"):
        load_tokenizer(tmp_path / "tokenizer")


def test_missing_directory_is_named(tmp_path: Path) -> None:
    """A run without a tokenizer says so and names the flags that give one."""
    with pytest.raises(DataError, match="no tokenizer in") as caught:
        load_tokenizer(tmp_path / "tokenizer")
    assert "--tokenizer-type" in str(caught.value.hint)


RECORD = {
    "type": "GPT2BPETokenizer",
    "vocab_file": "vocab.json",
    "merge_file": "merges.txt",
    "vocab_size": None,
    "fingerprint": "",
}


@pytest.mark.parametrize("content", ["{", "[]", "{}", "[" * 60_000, " " * 70_000, "\xff"])
def test_malformed_record_is_refused(content: str, tmp_path: Path) -> None:
    """A file that is no record is refused by name."""
    (tmp_path / "tokenizer.json").write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"type": 3},
        {"vocab_file": "../vocab.json"},
        {"merge_file": "/etc/passwd"},
        {"vocab_file": ["vocab.json"]},
        {"vocab_size": True},
        {"fingerprint": None},
        {"more": 1},
    ],
)
def test_wrong_record_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    """A record with wrong values, or that points out of its directory, is not followed."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(RECORD | change), encoding="utf-8")
    with pytest.raises(DataError, match="does not describe a tokenizer"):
        load_tokenizer(tmp_path)


def test_plugin_type(tmp_path: Path) -> None:
    """A plugin's type comes back through its factory, and is an error without the plugin."""

    class Spelling(ByteTokenizer):
        name = "Spelling"

    save_tokenizer(Spelling(), tmp_path / "tokenizer")
    loaded = load_tokenizer(tmp_path / "tokenizer", extra={"Spelling": lambda **_: Spelling()})
    assert loaded.name == "Spelling"
    with pytest.raises(ConfigError, match="unknown tokenizer type `Spelling`"):
        load_tokenizer(tmp_path / "tokenizer")


def test_files_without_an_argument_are_refused(tmp_path: Path) -> None:
    """A tokenizer whose files could not be found again is not saved in part."""

    class Hidden(ByteTokenizer):
        def files(self) -> tuple[str, ...]:
            return (str(tmp_path / "secret.model"),)

    (tmp_path / "secret.model").write_bytes(b"x")
    with pytest.raises(DataError, match="cannot be saved with a run"):
        save_tokenizer(Hidden(), tmp_path / "tokenizer")


def test_loads_no_torch() -> None:
    """The module is used before torch is wanted."""
    code = "import lmcore.data.tokenizer.saved, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def wordpiece(folder: Path) -> Tokenizer:
    """Make a WordPiece tokenizer of two words."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]
    (folder / "words.txt").write_text("\n".join(words), encoding="utf-8")
    return build_tokenizer(
        "BertWordPieceCase", vocab_file=str(folder / "words.txt"), vocab_extra_ids=4
    )


def llama(folder: Path) -> Tokenizer:
    """Make a SentencePiece model, without its token for the beginning of a text."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b", "b a"]),
        model_writer=model,
        vocab_size=8,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "any.model").write_bytes(model.getvalue())
    return build_tokenizer(
        "Llama2Tokenizer", tokenizer_model=str(folder / "any.model"), add_special_tokens=False
    )


def pretrained(folder: Path) -> Tokenizer:
    """Make a pretrained tokenizer whose end token is named in another file."""
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}', encoding="utf-8")
    return build_tokenizer("HFTokenizer", tokenizer_model=str(folder), vocab_extra_ids=1)


def lone_file(folder: Path) -> Tokenizer:
    """Make a pretrained tokenizer in a file of another name, read without the files beside it."""
    pretrained(folder)
    (folder / "tokenizer.json").rename(folder / "mine.json")
    return build_tokenizer("PretrainedFromHF", tokenizer_name_or_path=str(folder / "mine.json"))


@pytest.mark.parametrize(
    "make,files",
    [
        (wordpiece, ["tokenizer.json", "vocab.txt"]),
        (llama, ["tokenizer.json", "tokenizer.model"]),
        (
            pretrained,
            ["pretrained/tokenizer.json", "pretrained/tokenizer_config.json", "tokenizer.json"],
        ),
        (lone_file, ["pretrained/tokenizer.json", "tokenizer.json"]),
    ],
)
def test_every_type_travels(
    make: Callable[[Path], Tokenizer], files: list[str], tmp_path: Path
) -> None:
    """Files and options of every type come back without what they were copied from."""
    (tmp_path / "source").mkdir()
    tokenizer = make(tmp_path / "source")
    expected, fingerprint = tokenizer.encode("a b <end>"), tokenizer.fingerprint()
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    shutil.rmtree(tmp_path / "source")
    found = [path for path in (tmp_path / "tokenizer").rglob("*") if path.is_file()]
    assert sorted(str(path.relative_to(tmp_path / "tokenizer")) for path in found) == files
    loaded = load_tokenizer(tmp_path / "tokenizer")
    assert loaded.encode("a b <end>") == expected
    assert (loaded.fingerprint(), loaded.eod) == (fingerprint, tokenizer.eod)
    save_tokenizer(loaded, tmp_path / "again")
    assert record(tmp_path / "again") == record(tmp_path / "tokenizer")
    save_tokenizer(loaded, tmp_path / "tokenizer")  # nothing to do


def test_a_chat_template_travels(tmp_path: Path) -> None:
    """It has no influence on ids, and a model that is shared again needs it."""
    (tmp_path / "source").mkdir()
    without = pretrained(tmp_path / "source").fingerprint()
    (tmp_path / "source/chat_template.jinja").write_text("{{ messages }}")
    tokenizer = pretrained(tmp_path / "source")
    assert tokenizer.fingerprint() == without
    save_tokenizer(tokenizer, tmp_path / "tokenizer")
    loaded = load_tokenizer(tmp_path / "tokenizer")
    assert loaded.fingerprint() == without
    assert Path(loaded.files()[-1]).read_text() == "{{ messages }}"


def test_altered_pretrained_copy(tmp_path: Path) -> None:
    """Another end of a document in the copy's configuration is noticed."""
    (tmp_path / "source").mkdir()
    save_tokenizer(pretrained(tmp_path / "source"), tmp_path / "tokenizer")
    path = tmp_path / "tokenizer" / "pretrained" / "tokenizer_config.json"
    path.write_text('{"eos_token": "b"}', encoding="utf-8")
    with pytest.raises(DataError, match="is not the one that was saved there"):
        load_tokenizer(tmp_path / "tokenizer")


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer_model": "../x.model"},
        {"tokenizer_name_or_path": "/etc"},
        {"tokenizer_name_or_path": "pretrained/.."},
        {"vocab_extra_ids": "3"},
        {"parse_special_tokens": 1},
    ],
)
def test_wrong_options_in_a_record(change: dict[str, object], tmp_path: Path) -> None:
    """Options of the other types are checked like the first ones."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(RECORD | change), encoding="utf-8")
    with pytest.raises(DataError, match="does not describe a tokenizer"):
        load_tokenizer(tmp_path)
