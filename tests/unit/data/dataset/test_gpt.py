"""GPT samples, read in C++ and without it; test_index_cache.py has the cache of their index."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmcore.base.errors import DataError
from lmcore.data import native
from lmcore.data.dataset.gpt import GPTDataset, SampleReader
from lmcore.data.dataset.gpt_index import GPTIndex, build_gpt_index
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.writer import IndexedDatasetWriter

DOCUMENTS = [
    list(range(start, start + size)) for start, size in [(0, 3), (10, 5), (20, 2), (30, 7), (40, 4)]
]


def dataset(indexed, tmp_path, **changes) -> GPTDataset:
    arguments = {
        "document_range": (0, 5),
        "num_samples": 5,
        "sequence_length": 4,
        "seed": 1234,
        "cache_dir": tmp_path / "cache",
    }
    return GPTDataset(indexed, **{**arguments, **changes})


def test_samples_of_the_published_vector(make_dataset, tmp_path):
    """The published indices cut the documents into the samples worked out by hand."""
    made = dataset(make_dataset(DOCUMENTS), tmp_path)
    # stream: 40-43 | 0-2 | 10-14 | 20 21 | 30-36
    by_hand = [
        [40, 41, 42, 43, 0],
        [0, 1, 2, 10, 11],
        [11, 12, 13, 14, 20],
        [20, 21, 30, 31, 32],
        [32, 33, 34, 35, 36],
    ]
    samples = [made[i] for i in range(len(made))]
    assert [s.tolist() for s in samples] == [by_hand[i] for i in (3, 2, 1, 0, 4)]
    assert all(s.dtype == np.int64 for s in samples)


@pytest.mark.parametrize("engine", ["native", "python"])
def test_samples_are_the_stream_of_documents(make_dataset, tmp_path, monkeypatch, engine):
    """In the order of the sample index, samples overlap by one token and spell the epochs."""
    if engine == "python":
        monkeypatch.setattr(native, "builders", None)
    elif not native.available:
        pytest.skip(native.reason)
    made = dataset(make_dataset(DOCUMENTS), tmp_path, num_samples=50, sequence_length=3)
    stream = [t for d in made.index.document_index for t in DOCUMENTS[d]]
    for i in range(50):
        at = int(made.index.shuffle_index[i]) * 3
        assert made[i].tolist() == stream[at : at + 4]


def test_length_is_as_given(make_dataset, tmp_path):
    """The dataset ends after the samples asked for, though the index may hold more."""
    made = dataset(make_dataset(DOCUMENTS), tmp_path, num_samples=3)
    assert len(made) == 3
    assert made.index.samples == 5
    for i in (3, -1):
        with pytest.raises(IndexError):
            made[i]


def test_range_is_of_documents_with_all_their_sequences(tmp_path):
    """A document of several sequences is wholly inside a range or outside."""
    with IndexedDatasetWriter(tmp_path / "s", "uint16") as writer:
        writer.add_document([1, 2, 3, 4], [1, 3])
        writer.add_document([5, 6, 7], [2, 1])
        writer.add_document([8, 9])
    made = GPTDataset(
        IndexedDataset(tmp_path / "s"),
        document_range=(1, 3),
        num_samples=20,
        sequence_length=2,
        seed=0,
        cache_dir=tmp_path,
    )
    assert {int(t) for i in range(20) for t in made[i]} == {5, 6, 7, 8, 9}


def test_foreign_data_trains(shared_data, tmp_path):
    """A file of another Megatron gives samples whose tokens are the file's."""
    indexed = IndexedDataset(shared_data / "interop/megatron_indexed/test_text_document")
    made = GPTDataset(
        indexed,
        document_range=(0, 1000),
        num_samples=100,
        sequence_length=9,
        seed=0,
        cache_dir=tmp_path,
    )
    assert {int(t) for i in range(100) for t in made[i]} == {111214, 343, 54365900, 77, 131072}


DTYPES = ["uint8", "int8", "int16", "uint16", "int32", "int64"]


def written(path, dtype, *, kind="mmap") -> tuple[IndexedDataset, list[list[int]]]:
    rng = np.random.RandomState(1)
    documents = [rng.randint(0, 127, rng.randint(1, 40)).tolist() for _ in range(50)]
    with IndexedDatasetWriter(path, dtype, dataset_impl=kind) as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedDataset(path), documents


@pytest.mark.parametrize("kind", ["mmap", "cached"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_samples_are_the_stream(either, tmp_path, dtype, kind):
    """Of every token type and both formats, samples spell the stream of documents."""
    indexed, documents = written(tmp_path / "x", dtype, kind=kind)
    index = build_gpt_index(indexed.sizes, (0, 50), sequence_length=13, num_samples=150, seed=2)
    reader = SampleReader(indexed, index, 13)
    stream = [token for d in index.document_index for token in documents[d]]
    for sample in range(index.samples):
        tokens = reader.read(sample)
        assert tokens.dtype == np.int64
        assert tokens.tolist() == stream[13 * sample : 13 * sample + 14]


@given(
    documents=st.lists(st.integers(-3, 60) | st.integers(-(2**31), 2**31 - 1), max_size=12),
    samples=st.lists(
        st.tuples(*[st.integers(-2, 15) | st.integers(-(2**31), 2**31 - 1)] * 2),
        min_size=2,
        max_size=4,
    ),
    length=st.integers(1, 30),
)
@example(documents=[-1, 0], samples=[(0, 0), (1, 5)], length=5)
@example(documents=[0, 50], samples=[(0, 0), (1, 5)], length=30)
@example(documents=[0, 1], samples=[(0, -1), (1, 5)], length=5)
@example(documents=[0, 1], samples=[(0, 2**31 - 1), (1, 5)], length=5)
@example(documents=[0, 1], samples=[(1, 0), (0, 5)], length=5)
@example(documents=[0], samples=[(0, 0), (2**31 - 1, 0)], length=5)
def test_indices_that_lie_are_an_error_never_foreign_memory(
    tmp_path_factory, documents, samples, length
):
    """With any index a sample has tokens of the dataset, or there is an error."""
    if not native.available:
        pytest.skip(native.reason)
    path = tmp_path_factory.getbasetemp() / "hostile"
    if not path.with_suffix(".idx").exists():
        written(path, "uint16")
    indexed = IndexedDataset(path)
    index = GPTIndex(
        np.array(documents, dtype=np.int32),
        np.array(samples, dtype=np.int32),
        np.zeros(1, dtype=np.uint32),
    )
    reader = SampleReader(indexed, index, length)
    for sample in range(-1, len(samples) + 1):
        try:
            tokens = reader.read(sample)
        except DataError:
            continue
        assert len(tokens) == length + 1
        assert 0 <= tokens.min() <= tokens.max() < 127


def test_a_sample_beyond_the_index_names_the_dataset(either, tmp_path):
    """The error names the dataset and the fix."""
    indexed, _ = written(tmp_path / "x", "uint16")
    index = build_gpt_index(indexed.sizes, (0, 50), sequence_length=13, num_samples=5, seed=2)
    reader = SampleReader(indexed, index, 13)
    with pytest.raises(DataError, match="is not within") as caught:
        reader.read(index.samples)
    assert "delete the directory" in caught.value.hint
