"""Samples of the inverse cloze task."""

from __future__ import annotations

import os

import pytest

from lmcore.base.errors import DataError
from lmcore.data.dataset.ict import ICTDataset, ICTSettings, ICTVocabulary
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.writer import IndexedDatasetWriter

CLS, SEP, PAD = 1, 2, 0
SIZE = 32
# Sentence s of document d holds 100 + 10 d + s; its title 1000 + d.
DOCUMENTS = [[[100 + 10 * d + s] * (3 + s % 3) for s in range(1 + d % 9)] for d in range(20)]
TITLES = [[1000 + d] * (1 + d % 4) for d in range(20)]


def written(path, documents) -> IndexedDataset:
    with IndexedDatasetWriter(path, "uint16") as writer:
        for document in documents:
            tokens = [token for sentence in document for token in sentence]
            writer.add_document(tokens, [len(sentence) for sentence in document])
    return IndexedDataset(path)


@pytest.fixture
def indexed(tmp_path) -> IndexedDataset:
    return written(tmp_path / "sentences", DOCUMENTS)


@pytest.fixture
def titles(tmp_path) -> IndexedDataset:
    return written(tmp_path / "titles", [[title] for title in TITLES])


def dataset(indexed, titles, tmp_path, *, document_range=(0, 20), num_samples=100, **changes):
    settings = {"sequence_length": SIZE, "seed": 5, **changes}
    return ICTDataset(
        indexed,
        titles,
        ICTVocabulary(CLS, SEP, PAD),
        ICTSettings(**settings),
        document_range=document_range,
        num_samples=num_samples,
        cache_dir=tmp_path,
    )


def text(tokens, mask) -> list[int]:
    return tokens[: int(mask.sum())].tolist()


@pytest.mark.parametrize("document_range", [(0, 20), (8, 17)])
def test_title_block_and_query_belong_together(indexed, titles, tmp_path, document_range):
    """The block has its own document's title, also where a part begins later; so has the query."""
    made = dataset(indexed, titles, tmp_path, document_range=document_range)
    for i in range(len(made)):
        one = made[i]
        first, last, document, _ = one.block
        assert document_range[0] <= document < document_range[1]
        title = TITLES[document]
        block = text(one.block_tokens_S, one.block_mask_S)
        assert block[: len(title) + 2] == [CLS, *title, SEP]
        assert block[-1] == SEP
        query = text(one.query_tokens_S, one.query_mask_S)
        assert (query[0], query[-1]) == (CLS, SEP)
        sentence = query[1] - 100 - 10 * document
        assert query[1:-1] == DOCUMENTS[document][sentence]
        assert indexed.document_indices[document] <= first < last
        assert last <= indexed.document_indices[document + 1]


@pytest.mark.parametrize("probability, low, high", [(0.0, 0, 0), (1.0, 290, 300), (0.1, 12, 55)])
def test_the_query_is_kept_in_its_block_at_the_given_rate(
    indexed, titles, tmp_path, probability, low, high
):
    """The sentence is cut out of its block, but for the share that stays.

    At the end of a document a block may be too long, and lose the sentence with its own end.
    """
    made = dataset(
        indexed, titles, tmp_path, num_samples=300, query_in_block_probability=probability
    )
    stays = 0
    for i in range(300):
        one = made[i]
        stays += int(one.query_tokens_S[1]) in one.block_tokens_S.tolist()
    assert low <= stays <= high


def test_blocks_fit_without_titles(indexed, tmp_path):
    """Without titles a block is between the two special tokens."""
    made = dataset(indexed, None, tmp_path)
    for i in range(len(made)):
        block = text(made[i].block_tokens_S, made[i].block_mask_S)
        assert block.count(SEP) == 1
        assert (block[0], block[-1]) == (CLS, SEP)


def test_one_sentence_documents_count_on_request_and_keep_their_query(indexed, titles, tmp_path):
    """With `one_sentence` documents of one sentence give blocks, which are never emptied."""
    without = dataset(indexed, titles, tmp_path, num_samples=None)
    made = dataset(
        indexed,
        titles,
        tmp_path,
        num_samples=None,
        one_sentence=True,
        query_in_block_probability=0.0,
    )
    alone = [d for d in range(20) if len(DOCUMENTS[d]) == 1]
    assert not {without[i].block[2] for i in range(len(without))} & set(alone)
    found = [made[i] for i in range(len(made)) if made[i].block[2] in alone]
    assert {one.block[2] for one in found} == set(alone)
    for one in found:
        assert int(one.query_tokens_S[1]) in one.block_tokens_S.tolist()


def test_an_epoch_has_every_block_once(indexed, titles, tmp_path):
    """Without a number of samples each block comes once, with a different number."""
    made = dataset(indexed, titles, tmp_path, num_samples=None)
    blocks = [made[i].block for i in range(len(made))]
    assert sorted(number for *_, number in blocks) == list(range(len(blocks)))
    whole, mask = made.block(0)
    assert set(made[0].block_tokens_S.tolist()) <= set(whole.tolist())
    assert mask.sum() >= made[0].block_mask_S.sum()


def test_a_long_title_leaves_room_for_its_block(tmp_path):
    """A title is cut at half of the sequence."""
    indexed = written(tmp_path / "s", [[[100] * 5, [101] * 5, [102] * 5]])
    titles = written(tmp_path / "t", [[[7] * 500]])
    made = dataset(indexed, titles, tmp_path, document_range=(0, 1), num_samples=5)
    block = text(made[0].block_tokens_S, made[0].block_mask_S)
    assert block.count(7) == (SIZE - 3) // 2
    assert len(block) > (SIZE - 3) // 2 + 3


def test_a_sample_is_the_same_whenever_it_is_read(indexed, titles, tmp_path):
    """Draws follow from the sample's number, not from what was read before."""
    made = dataset(indexed, titles, tmp_path)
    forward = [made[i].query_tokens_S.tolist() for i in range(30)]
    backward = [made[i].query_tokens_S.tolist() for i in reversed(range(30))]
    assert forward == backward[::-1]


@pytest.mark.parametrize("pattern", ["titles.bin", "sentences.bin", "*-mapping.npy"])
def test_a_file_cut_short_is_an_error(indexed, titles, tmp_path, pattern):
    """Also within its last page, whose rest would read as zeros."""
    dataset(indexed, titles, tmp_path)  # builds the index, which is mapped below
    made = dataset(indexed, titles, tmp_path)
    (path,) = tmp_path.glob(pattern)
    os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(DataError, match="was cut short") as caught:
        made[0]
    assert str(path) in caught.value.what


def test_other_titles_have_another_mapping(indexed, titles, tmp_path):
    """The cache knows the titles that its blocks were cut for."""
    dataset(indexed, titles, tmp_path)
    dataset(indexed, written(tmp_path / "other", [[[9] * 12]] * 20), tmp_path)
    dataset(indexed, None, tmp_path)
    assert len(list(tmp_path.glob("train-*.json"))) == 3


def test_titles_of_another_corpus_are_refused(indexed, tmp_path):
    """There is one title for each document."""
    with pytest.raises(DataError, match="2 titles for 20 documents"):
        dataset(indexed, written(tmp_path / "t", [[[1]], [[2]]]), tmp_path)


def test_settings_out_of_range_are_refused():
    """Lengths and probability are held to their range."""
    with pytest.raises(ValueError):
        ICTSettings(4, 1)
    with pytest.raises(ValueError):
        ICTSettings(64, 1, query_in_block_probability=1.5)
