"""Reading samples in C++ and without it, also through indices that lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmcore.data import native
from lmcore.data.dataset.gpt_index import GPTIndex, build_gpt_index
from lmcore.data.dataset.gpt_reader import SampleReader
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.writer import IndexedDatasetWriter
from lmcore.errors import DataError

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
