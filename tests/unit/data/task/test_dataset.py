"""The indexed dataset of a task, and its samples in the order of training and of the files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from lmcore.base.errors import DataError
from lmcore.config.derived.data_source import TaskData
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.task.dataset import TaskDataset, prepare_task
from lmcore.data.tokenizer import ByteTokenizer, build_tokenizer, tokenizer_from
from lmcore.data.tokenizer.file_tokenizer import FileTokenizer
from lmcore.families.heads.samples import PairFormat, _causal

TASK = TaskData("classification", ("a", "b"), "label", labels=("no", "yes"))
ROWS = [("one", "x", "yes"), ("three", "", "no"), ("five5", "yy", "no"), ("seven77", "z", "yes")]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Return a table of four rows, one with an empty second text."""
    path = tmp_path / "train.csv"
    path.write_text("a,b,label\n" + "".join(",".join(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def indexed(table: Path, tmp_path: Path) -> IndexedDataset:
    """Return the table as a dataset."""
    return IndexedDataset(prepare_task([str(table)], TASK, ByteTokenizer(), tmp_path / "data"))


def read(dataset: TaskDataset, first: int, last: int) -> list[tuple[str, str, str]]:
    """Return some samples as rows of the table."""
    found = []
    for number in range(first, last):
        sample = dataset[number]
        texts = [bytes(text.tolist()).decode() for text in (sample.first, *sample.second)]
        found.append((texts[0], texts[1], TASK.labels[sample.label]))
    return found


def test_rows(indexed: IndexedDataset) -> None:
    """Without a seed, the samples are the rows in order; lengths are of both texts."""
    dataset = TaskDataset(indexed, 6)
    assert read(dataset, 0, 6) == [*ROWS, *ROWS[:2]]
    assert dataset.lengths.tolist() == [4, 5, 7, 8]
    with pytest.raises(IndexError):
        dataset[6]


def bert_tokenizer(folder: Path) -> tuple[FileTokenizer, tokenizers.Tokenizer]:
    """Return a tokenizer of BERT's `tokenizer.json`, and the library's, which encodes pairs."""
    pieces = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "one", "x")
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    library = tokenizers.Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    config = {f"{role}_token": f"[{role.upper()}]" for role in ("cls", "sep", "pad", "unk")}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    own = build_tokenizer("HuggingFaceTokenizer", tokenizer_name_or_path=str(folder))
    assert isinstance(own, FileTokenizer)
    return own, library


def test_special_tokens_of_a_sequence_are_there_once(table: Path, tmp_path: Path) -> None:
    """Texts have no tokens around them: joined they are a pair as the library encodes it."""
    own, library = bert_tokenizer(tmp_path / "bert")
    assert own.encode("one") == [2, 4, 3]
    found = IndexedDataset(prepare_task([str(table)], TASK, own, tmp_path / "data"))
    sample = TaskDataset(found, None)[0]
    pairs = PairFormat(9, (2,), (3,), (3,), pad=0, bidirectional=True)
    tokens, _second = pairs.join(sample.first, sample.second[0])
    assert tokens.tolist() == library.encode("one", "x").ids
    decoder = _causal(own, 16)
    assert (decoder.begin, decoder.between, decoder.end) == ((2,), (), (3,))
    plain = tokenizer_from(replace(own.settings, add_special_tokens=False))
    assert _causal(plain, 16).begin == ()
    again = prepare_task([str(table)], TASK, plain, tmp_path / "data")
    assert again != prepare_task([str(table)], TASK, own, tmp_path / "data")


def test_lengths_of_single_texts_and_choices(table: Path, tmp_path: Path) -> None:
    """Of the longest choice; without a second text, of the first alone."""
    one = TaskData("classification", ("a",), "label", labels=("no", "yes"))
    found = IndexedDataset(prepare_task([str(table)], one, ByteTokenizer(), tmp_path))
    assert TaskDataset(found, None).lengths.tolist() == [3, 5, 5, 7]
    assert TaskDataset(found, None)[0].second == ()
    path = tmp_path / "choices.csv"
    path.write_text("q,p,c1,c2,label\nabc,d,e,fgh,0\n")
    choice = TaskData("multiple-choice", ("q", "p"), "label", ("c1", "c2"), num_choices=2)
    found = IndexedDataset(prepare_task([str(path)], choice, ByteTokenizer(), tmp_path))
    dataset = TaskDataset(found, None)
    assert [bytes(text.tolist()) for text in dataset[0].second] == [b"d e", b"d fgh"]
    assert dataset.lengths.tolist() == [3 + 5]


class Letters(ByteTokenizer):
    """Bytes of letters alone: other characters are dropped."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return [one for one in super().encode(text) if chr(one).isalpha()]


def test_texts_without_a_token(tmp_path: Path) -> None:
    """A row is refused if a sequence of it would be empty: no token could be pooled."""
    one, two = TaskData("classification", ("a",), "label", labels=("no", "yes")), TASK
    path = tmp_path / "train.csv"
    path.write_text("a,b,label\n?,x,yes\ny,!,no\n")
    dataset = IndexedDataset(prepare_task([str(path)], two, Letters(), tmp_path))
    assert [len(dataset.get(number)) for number in range(2)] == [0, 1]
    with pytest.raises(DataError, match="line 2: the text has no token"):
        prepare_task([str(path)], one, Letters(), tmp_path)
    path.write_text("a,c1,c2,label\nx,1,2,0\n?,y,2,0\n")
    choice = TaskData("multiple-choice", ("a",), "label", ("c1", "c2"), num_choices=2)
    with pytest.raises(DataError, match="line 3: the text has no token"):
        prepare_task([str(path)], choice, Letters(), tmp_path)


def test_training_order(indexed: IndexedDataset) -> None:
    """Each pass has every row once, in its own order, whatever the length of the run is."""
    dataset = TaskDataset(indexed, 400, seed=7)
    passes = [read(dataset, start, start + 4) for start in range(0, 400, 4)]
    assert all(sorted(one) == sorted(ROWS) for one in passes)
    assert len({tuple(one) for one in passes}) > 15
    longer = TaskDataset(indexed, 900, seed=7)
    assert longer.order == dataset.order
    assert read(longer, 0, 400) == read(dataset, 0, 400)
    assert TaskDataset(indexed, 400, seed=8).order != dataset.order


def test_whole_validations(indexed: IndexedDataset) -> None:
    """A pass that is longer than the rows is filled up with samples of weight 0."""
    dataset = TaskDataset(indexed, 18, period=6)
    assert [dataset[i].weight for i in range(6)] == [1, 1, 1, 1, 0, 0]
    assert read(dataset, 6, 10) == ROWS
    assert read(dataset, 12, 16) == ROWS


def test_prepared_once(table: Path, tmp_path: Path) -> None:
    """The dataset is made again only for another content, tokenizer, or order of the classes."""
    data = tmp_path / "data"
    prefix = prepare_task([str(table)], TASK, ByteTokenizer(), data)
    key = TaskDataset(IndexedDataset(prefix), None).key
    before = Path(prefix + ".bin").stat().st_mtime_ns
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "train.csv").write_bytes(table.read_bytes())
    assert prepare_task([str(moved / "train.csv")], TASK, ByteTokenizer(), data) == prefix
    assert Path(prefix + ".bin").stat().st_mtime_ns == before
    other = TaskData("classification", ("a", "b"), "label", labels=("yes", "no"))
    assert prepare_task([str(table)], other, ByteTokenizer(), data) != prefix
    table.write_text(table.read_text().replace("five5,yy,no", "five5,yy,yes"))
    changed = prepare_task([str(table)], TASK, ByteTokenizer(), data)
    assert TaskDataset(IndexedDataset(changed), None).key != key


def test_numbers_and_cut_choices(tmp_path: Path) -> None:
    """The number of a regression is its float32; a choice is cut after its most tokens."""
    path, numbers = tmp_path / "numbers.csv", [3.8, -1.5e-7, 0.0, 65535.25]
    path.write_text("a,label\n" + "".join(f"x,{one!r}\n" for one in numbers))
    task = TaskData("regression", ("a",), "label")
    found = TaskDataset(
        IndexedDataset(prepare_task([str(path)], task, ByteTokenizer(), tmp_path)), None
    )
    assert [found[i].label for i in range(4)] == [float(np.float32(one)) for one in numbers]
    assert found.lengths.tolist() == [1] * 4
    path = tmp_path / "choices.csv"
    path.write_text("q,p,c1,c2,label\nabcdefg,de,fgh,i,0\n")
    choice = TaskData(
        "multiple-choice", ("q", "p"), "label", ("c1", "c2"), num_choices=2, choice_tokens=5
    )
    indexed = IndexedDataset(prepare_task([str(path)], choice, ByteTokenizer(), tmp_path))
    sample = TaskDataset(indexed, None)[0]
    assert bytes(sample.first.tolist()) == b"abcdefg"
    assert [bytes(one.tolist()) for one in sample.second] == [b"de fg", b"de i"]
