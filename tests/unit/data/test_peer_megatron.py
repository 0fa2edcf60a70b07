"""Against megatron-core itself: its reader, its writer, its index builders."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.data.blend.index import build_blend_index
from lmcore.data.dataset.gpt_index import build_gpt_index
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.writer import IndexedDatasetWriter
from lmcore.data.prepare.run import PrepareRequest, prepare
from lmcore.data.tokenizer import ByteTokenizer

pytestmark = [
    pytest.mark.peer,
    # What it imports warns of much that is not ours.
    pytest.mark.filterwarnings("ignore"),
]
NEEDED = "needs the package megatron-core"


@pytest.fixture(scope="module")
def indexed_dataset():
    """Its module of indexed datasets."""
    return pytest.importorskip("megatron.core.datasets.indexed_dataset", reason=NEEDED)


@pytest.fixture(scope="module")
def gpt_dataset():
    """Its module of GPT datasets."""
    return pytest.importorskip("megatron.core.datasets.gpt_dataset", reason=NEEDED)


@pytest.fixture(scope="module")
def helpers():
    """Its compiled index builders."""
    return pytest.importorskip("megatron.core.datasets.helpers_cpp", reason=NEEDED)


def test_it_reads_what_prepare_writes(indexed_dataset, shared_data, tmp_path):
    """Its reader finds the same documents in what `prepare` wrote."""
    source = str(shared_data / "corpora/web/c4-sample-1000.jsonl.gz")
    prepare(PrepareRequest((source,), str(tmp_path / "c4"), ByteTokenizer(), append_eod=True))
    prefix = str(tmp_path / "c4_text_document")
    ours, theirs = IndexedDataset(prefix), indexed_dataset.IndexedDataset(prefix)
    assert len(theirs) == len(ours) == 1000
    assert theirs.document_indices.tolist() == ours.document_indices.tolist()
    assert all((theirs[i] == ours.get(i)).all() for i in range(len(ours)))


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_it_writes_the_same_bytes(indexed_dataset, tmp_path, dtype):
    """Its writer and ours give the same two files for the same documents."""
    import torch

    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 50_000, rng.integers(1, 9)) for _ in range(50)]
    theirs = indexed_dataset.IndexedDatasetBuilder(
        str(tmp_path / "theirs.bin"), np.dtype(dtype).type
    )
    with IndexedDatasetWriter(tmp_path / "ours", dtype) as ours:
        for document in documents:
            lengths = [1, len(document) - 1] if len(document) > 1 else [1]
            theirs.add_document(torch.from_numpy(document), lengths)
            ours.add_document(document, lengths)
    theirs.finalize(str(tmp_path / "theirs.idx"))
    for ending in ("bin", "idx"):
        made = (tmp_path / f"ours.{ending}").read_bytes()
        assert made == (tmp_path / f"theirs.{ending}").read_bytes()


@given(
    sizes=st.lists(st.integers(1, 30), min_size=2, max_size=20),
    length=st.integers(1, 12),
    samples=st.integers(1, 200),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_builds_the_same_indices(gpt_dataset, helpers, sizes, length, samples, seed):
    """Its own functions, driven as its GPT dataset drives them, give our three arrays."""
    sizes = np.array(sizes, dtype=np.int32)
    tokens = int(sizes.sum())
    epochs = -(-(samples * length + 1) // tokens)
    before = ((epochs - 1) * tokens - 1) // length
    apart = epochs > 1 and samples - before < int(0.80 * ((tokens - 1) // length))
    rng = np.random.RandomState(seed)
    indices = np.arange(len(sizes), dtype=np.int32)
    documents = gpt_dataset._build_document_index(indices, epochs, rng, apart)
    starts = helpers.build_sample_idx_int32(sizes, documents, length, epochs, tokens, True, 1)
    total = len(starts) - 1
    shuffle = gpt_dataset._build_shuffle_index(before if apart else total, total, rng)
    ours = build_gpt_index(
        sizes, (0, len(sizes)), sequence_length=length, num_samples=samples, seed=seed
    )
    assert ours.document_index.tobytes() == documents.tobytes()
    assert ours.sample_index.tobytes() == starts.tobytes()
    assert ours.shuffle_index.tobytes() == shuffle.tobytes()


@given(weights=st.lists(st.floats(0.01, 1), min_size=1, max_size=6), size=st.integers(1, 300))
def test_it_blends_alike(helpers, weights, size):
    """Its blend of any weights is ours."""
    shares = np.array(weights) / sum(weights)
    dataset, sample = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
    helpers.build_blending_indices(dataset, sample, shares, len(shares), size, False)
    ours = build_blend_index(shares.tolist(), size)
    assert ours[0].tobytes() == dataset.tobytes()
    assert ours[1].tobytes() == sample.tobytes()
