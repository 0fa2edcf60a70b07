"""BERT samples; test_megatron_samples.py compares them with Megatron's."""

from __future__ import annotations

import numpy as np
import pytest

from lmcore.base.errors import DataError
from lmcore.data.dataset.bert import BertDataset, BertSettings
from lmcore.data.dataset.masking import MaskingVocabulary
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.writer import IndexedDatasetWriter

CLS, SEP, MASK, PAD = 1, 2, 3, 0
WORDS = MaskingVocabulary(CLS, SEP, np.zeros(1000, dtype=bool), MASK, PAD)
# Sentence s of document d holds 100 + 10 d + s, so that a token identifies its sentence.
DOCUMENTS = [[[100 + 10 * d + s] * (3 + s) for s in range(2 + d % 4)] for d in range(12)]


@pytest.fixture
def indexed(tmp_path) -> IndexedDataset:
    with IndexedDatasetWriter(tmp_path / "sentences", "uint16") as writer:
        for document in DOCUMENTS:
            tokens = [token for sentence in document for token in sentence]
            writer.add_document(tokens, [len(sentence) for sentence in document])
    return IndexedDataset(tmp_path / "sentences")


def dataset(indexed, tmp_path, *, words=WORDS, **changes) -> BertDataset:
    settings = {"sequence_length": 24, "seed": 7, "short_probability": 0.0}
    outer = {"document_range": (0, len(DOCUMENTS)), "num_samples": 60}
    for name in tuple(changes):
        if name in outer:
            outer[name] = changes.pop(name)
    return BertDataset(
        indexed, words, BertSettings(**{**settings, **changes}), cache_dir=tmp_path, **outer
    )


def original(sample) -> list[int]:
    """Return the tokens before masking, without padding."""
    length = int(sample.padding_mask_S.sum())
    chosen = sample.loss_mask_S == 1
    return np.where(chosen, sample.labels_S, sample.tokens_S)[:length].tolist()


def test_a_pair_is_of_one_document_and_half_are_swapped(indexed, tmp_path):
    """Both segments follow one another in a document; the flag is True if they are swapped."""
    made = dataset(indexed, tmp_path, sequence_length=60)
    swapped = 0
    for i in range(len(made)):
        sample = made[i]
        tokens = original(sample)
        assert (tokens[0], tokens[-1], tokens.count(SEP)) == (CLS, SEP, 2)
        middle = tokens.index(SEP)
        a, b = tokens[1:middle], tokens[middle + 1 : -1]
        first, second = (b, a) if sample.swapped else (a, b)
        document = (first[0] - 100) // 10
        sentences = [t for one in DOCUMENTS[document] for t in one]
        whole = first + second
        starts = range(len(sentences) - len(whole) + 1)
        assert any(sentences[at : at + len(whole)] == whole for at in starts)
        assert sample.types_S.tolist() == [0] * (middle + 1) + [1] * (len(b) + 1) + [0] * (
            60 - len(tokens)
        )
        swapped += sample.swapped
    assert 15 < swapped < 45


def test_padding_labels_and_masks_agree(indexed, tmp_path):
    """Only tokens of the loss have labels; padding is masked."""
    made = dataset(indexed, tmp_path)
    for i in range(len(made)):
        sample = made[i]
        assert all(
            one.shape == (24,) and one.dtype == np.int64
            for one in (sample.tokens_S, sample.types_S, sample.labels_S)
        )
        assert ((sample.labels_S != -1) == (sample.loss_mask_S == 1)).all()
        assert 1 <= sample.loss_mask_S.sum() <= 4
        assert (sample.tokens_S[sample.padding_mask_S == 0] == 0).all()


def test_without_the_binary_head_there_is_one_segment(indexed, tmp_path):
    """One segment, nothing swapped, also of documents with a single sentence."""
    made = dataset(indexed, tmp_path, binary_head=False)
    for i in range(len(made)):
        sample = made[i]
        assert not sample.swapped
        assert not sample.types_S.any()
        assert original(sample).count(SEP) == 1


def test_too_long_a_pair_is_cut(indexed, tmp_path):
    """A pair longer than the sequence loses tokens at its segments' ends, the longer one first."""
    made = dataset(indexed, tmp_path, sequence_length=12)
    cut = [made[i] for i in range(len(made)) if made[i].truncated]
    assert len(cut) > 10
    for sample in cut:
        tokens = original(sample)
        assert len(tokens) == 12
        middle = tokens.index(SEP)
        assert abs((middle - 1) - (len(tokens) - middle - 2)) <= 3


def test_a_sample_is_the_same_whenever_it_is_read(indexed, tmp_path):
    """Nothing is left over from one sample to the next; another seed gives others."""
    made = dataset(indexed, tmp_path)
    forward = [made[i].tokens_S.tolist() for i in range(20)]
    backward = [made[i].tokens_S.tolist() for i in reversed(range(20))]
    assert forward == backward[::-1]
    other = dataset(indexed, tmp_path, seed=8)
    assert forward != [other[i].tokens_S.tolist() for i in range(20)]
    assert made.order != other.order


def test_a_range_keeps_to_its_documents(indexed, tmp_path):
    """Samples of a part hold that part's documents only."""
    made = dataset(indexed, tmp_path, document_range=(3, 6), sequence_length=60)
    tokens = {t for i in range(len(made)) for t in original(made[i]) if t >= 100}
    assert {(t - 100) // 10 for t in tokens} == {3, 4, 5}


def test_an_epoch_without_a_number(indexed, tmp_path):
    """Without a number of samples the dataset is one epoch, each sentence once."""
    made = dataset(indexed, tmp_path, num_samples=None, sequence_length=60)
    rows = sorted(made.rows[:, :2].tolist())
    covered = [sentence for first, last in rows for sentence in range(first, last)]
    assert covered == list(range(len(indexed)))
    with pytest.raises(IndexError):
        made[len(made)]


def test_a_part_without_a_sample_is_named(tmp_path):
    """The part and its number of documents are named: the others may have samples."""
    with IndexedDatasetWriter(tmp_path / "short", "uint16") as writer:
        for sentences in ([3, 3], [3], [3]):
            writer.add_document([200] * sum(sentences), sentences)
    settings = BertSettings(sequence_length=24, seed=7, short_probability=0.0)
    short = IndexedDataset(tmp_path / "short")
    with pytest.raises(DataError, match=r"the valid part of `.*short`, 2 documents, makes no"):
        BertDataset(short, WORDS, settings, document_range=(1, 3), num_samples=1, name="valid")


def test_a_token_beyond_the_vocabulary_is_an_error(indexed, tmp_path):
    """Tokens beyond the vocabulary are an error."""
    small = MaskingVocabulary(CLS, SEP, np.zeros(120, dtype=bool), MASK, PAD)
    made = dataset(indexed, tmp_path, words=small)
    with pytest.raises(DataError, match="the vocabulary has 120"):
        [made[i] for i in range(len(made))]


def test_the_mapping_is_cached(indexed, tmp_path):
    """A second dataset maps the first one's file."""
    first = dataset(indexed, tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("train-*")}
    second = dataset(indexed, tmp_path)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("train-*")} == before
    assert (first.rows == second.rows).all()
    assert not second.rows.flags.writeable
    dataset(indexed, tmp_path, sequence_length=25)
    assert len(list(tmp_path.glob("train-*.json"))) == 2


def test_a_sequence_too_short_for_a_sample_is_refused():
    """The special tokens need room beside text."""
    with pytest.raises(ValueError):
        BertSettings(4, 1)
