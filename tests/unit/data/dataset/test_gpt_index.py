"""The GPT indices against the published vector and plain loops."""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmcore.base.errors import DataError
from lmcore.data import native
from lmcore.data.blend import index as blending
from lmcore.data.blend.index import build_blend_index, build_blend_index_python
from lmcore.data.dataset import gpt_index
from lmcore.data.dataset.gpt_index import (
    IndexRequest,
    build_gpt_index,
    build_sample_index,
    build_sample_index_python,
)
from lmcore.data.indexed.statistics import SequenceStatistics

needs_native = pytest.mark.skipif(not native.available, reason=native.reason)


def int32(values) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def samples_by_loop(sizes, documents, length, count) -> list[list[int]]:
    """Walk the stream token by token, as Megatron's helper does in its own words."""
    result, position, offset = [[0, 0]], 0, 0
    for _ in range(count):
        remaining = length + 1
        while remaining:
            size = sizes[documents[position]] - offset
            remaining -= size
            if remaining <= 0:
                offset += remaining + size - 1
                remaining = 0
            else:
                position += 1
                offset = 0
        result.append([position, offset])
    return result


def test_published_vector(either):
    """Five documents, length 4, 5 samples, seed 1234 give the published three arrays."""
    index = build_gpt_index(
        int32([3, 5, 2, 7, 4]), (0, 5), sequence_length=4, num_samples=5, seed=1234
    )
    assert index.document_index.tolist() == [4, 0, 1, 2, 3]
    assert index.sample_index.tolist() == [[0, 0], [1, 0], [2, 1], [3, 0], [4, 2], [4, 6]]
    assert index.shuffle_index.tolist() == [3, 2, 1, 0, 4]
    types = (index.document_index, index.sample_index, index.shuffle_index)
    assert [a.dtype for a in types] == [np.dtype("i4"), np.dtype("i4"), np.dtype("u4")]


def test_published_blend(either):
    """Weights .2, .3, .5 choose 2,1,0,2,1,2,0,2,1,2 first."""
    dataset, sample = build_blend_index([0.2, 0.3, 0.5], 10)
    assert dataset.tolist() == [2, 1, 0, 2, 1, 2, 0, 2, 1, 2]
    assert sample.tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4]
    assert (dataset.dtype, sample.dtype) == (np.dtype("i2"), np.dtype("i8"))


STREAMS = st.lists(st.integers(0, 9), min_size=1, max_size=12).flatmap(
    lambda sizes: st.tuples(
        st.just(sizes), st.lists(st.integers(0, len(sizes) - 1), min_size=0, max_size=30)
    )
)


@given(stream=STREAMS, length=st.integers(1, 12), fewer=st.integers(0, 3))
@example(stream=([0, 3, 0, 1], [0, 1, 2, 0, 3, 1, 2]), length=2, fewer=0)
def test_sample_index_is_the_loop_s(stream, length, fewer):
    """C++ and numpy give the bytes of the loop, whatever the documents; empty ones included."""
    sizes, documents = stream
    total = sum(sizes[d] for d in documents)
    count = max((total - 1) // length - fewer, 0) if total else 0
    expected = int32(samples_by_loop(sizes, documents, length, count))
    python = build_sample_index_python(
        int32(sizes), int32(documents), sequence_length=length, num_samples=count
    )
    assert python.dtype == np.int32
    assert python.tobytes() == expected.tobytes()
    if native.builders is not None:
        built = native.builders.build_sample_index(int32(sizes), int32(documents), length, count)
        assert (built.dtype, built.shape) == (python.dtype, python.shape)
        assert built.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "sizes, documents, length, count",
    [
        ([3], [1], 1, 1),
        ([3], [-1], 1, 1),
        ([-3, 9], [0, 1], 1, 1),
        ([3], [0], 1, 3),
        ([3], [0], 0, 1),
        ([3], [0], 1, -1),
        ([3], [], 1, 1),
        ([3], [0], 2**62, 2**62),
        ([2**31 - 1], [0], 1, 2**31 - 1),
    ],
)
def test_hostile_input_is_refused(either, sizes, documents, length, count):
    """Entries out of range, or more samples than tokens, are refused before anything is built."""
    with pytest.raises(ValueError):
        build_sample_index(
            int32(sizes), int32(documents), sequence_length=length, num_samples=count
        )


@needs_native
@pytest.mark.parametrize(
    "sizes",
    [np.array([3, 4]), np.array([[3, 4]], np.int32), int32([3, 0, 4])[::2], np.float32([3, 4])],
)
def test_native_refuses_other_arrays(sizes):
    """C++ converts nothing: another type, rank or stride is an error."""
    with pytest.raises(ValueError, match="wrong type"):
        native.builders.build_sample_index(sizes, int32([0]), 1, 1)


@needs_native
def test_native_reads_unaligned_arrays():
    """Sizes mapped from a file are not aligned: C++ reads them where they lie."""
    raw = np.zeros(10, dtype=np.uint8)
    unaligned = raw[2:10].view(np.int32)
    unaligned[:] = [3, 4]
    built = build_sample_index(unaligned, int32([0, 1]), sequence_length=2, num_samples=3)
    assert built.tolist() == samples_by_loop([3, 4], [0, 1], 2, 3)


@needs_native
@pytest.mark.parametrize("length", [7, 1000, 1_000_000])
def test_threads_cut_the_stream_alike(length):
    """Divided over threads, a stream gives the index that numpy gives, with progress to its end."""
    rng = np.random.default_rng(length)
    sizes = rng.integers(0, 12, 50_000, dtype=np.int32)
    documents = rng.integers(0, len(sizes), 1_200_000, dtype=np.int32)
    count = (int(sizes[documents].sum()) - 1) // length
    expected = build_sample_index_python(
        sizes, documents, sequence_length=length, num_samples=count
    )
    for threads in (1, 2, 4):
        progress = np.zeros(1, dtype=np.int64)
        built = native.builders.build_sample_index(
            sizes, documents, length, count, threads, progress
        )
        assert built.tobytes() == expected.tobytes()
        assert progress[0] == len(documents)


def test_an_index_that_no_memory_holds():
    """It is refused before anything is shuffled, with its size and the host's."""
    with pytest.raises(DataError, match=r"samples need an index of \d+ GiB") as caught:
        build_gpt_index(
            int32([33_000] * 3), (0, 3), sequence_length=128, num_samples=10**10, seed=1
        )
    assert "this host has" in str(caught.value.why)


def test_progress_ends_at_the_work_planned(either):
    """Building counts exactly the units of work that the plan names."""
    sizes = int32([3, 5, 2, 7, 4])
    progress = np.zeros(1, dtype=np.int64)
    build_gpt_index(sizes, (0, 5), sequence_length=4, num_samples=50, seed=1, progress=progress)
    request = IndexRequest((0, 5), num_samples=50, sequence_length=4, seed=1)
    assert progress[0] == request.work(SequenceStatistics(tokens=21, digest=""))


@needs_native
def test_native_lets_other_threads_run():
    """The interpreter's lock is free while C++ works."""
    sizes = np.full(1_000_000, 3, dtype=np.int32)
    documents = np.random.default_rng(0).integers(0, len(sizes), 20_000_000, dtype=np.int32)
    started, done = threading.Event(), threading.Event()

    def work():
        started.set()
        native.builders.build_sample_index(sizes, documents, 2, 1000)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    turns = 0
    while not done.is_set():
        turns += 1
    thread.join()
    assert turns > 100


@given(
    weights=st.lists(st.floats(0.001, 1), min_size=1, max_size=6),
    size=st.integers(0, 300),
)
def test_blends_are_equal_and_follow_the_weights(weights, size):
    """C++ and Python choose alike, and no dataset strays from its share by a sample or more."""
    shares = [weight / sum(weights) for weight in weights]
    dataset, sample = build_blend_index_python(shares, size)
    if native.builders is not None:
        built = native.builders.build_blend_index(np.array(shares), size)
        assert built[0].tobytes() == dataset.tobytes()
        assert built[1].tobytes() == sample.tobytes()
    for i, share in enumerate(shares):
        taken = sample[dataset == i]
        assert taken.tolist() == list(range(len(taken)))
        assert abs(len(taken) - share * size) < len(shares)


@pytest.mark.parametrize("weights", [[], [-0.5, 1.5], [float("nan")], [float("inf")]])
def test_blend_refuses(either, weights):
    """Weights that are missing, negative or not finite are refused."""
    with pytest.raises(ValueError):
        blending.build_blend_index(weights, 10)


def megatron_index(sizes, length, samples, seed, threshold):
    """Repeat the whole construction in plain Python, with lists of 64-bit numbers."""
    tokens = int(np.sum(sizes))
    epochs = 1
    while (epochs * tokens - 1) // length < samples:
        epochs += 1
    apart = False
    before = ((epochs - 1) * tokens - 1) // length
    if epochs > 1:
        apart = samples - before < int(threshold * ((tokens - 1) // length))
    rng = np.random.RandomState(seed)
    documents = []
    for count in [epochs - 1, 1] if apart else [epochs]:
        part = np.array(list(range(len(sizes))) * count, dtype=np.int32)
        rng.shuffle(part)
        documents += part.tolist()
    total = (epochs * tokens - 1) // length
    shuffle = []
    bounds = [0, before, total] if apart and before != total else [0, total]
    for start, end in pairwise(bounds):
        part = np.arange(start, end, dtype=np.uint32)
        rng.shuffle(part)
        shuffle += part.tolist()
    return documents, samples_by_loop(sizes, documents, length, total), shuffle


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=10),
    length=st.integers(1, 9),
    samples=st.integers(1, 80),
    seed=st.integers(0, 2**32 - 1),
    threshold=st.sampled_from([0.80, 0.95]),
)
@example(sizes=[10] * 10, length=1, samples=99 + 78, seed=3, threshold=0.80)  # apart
@example(sizes=[10] * 10, length=1, samples=99 + 79, seed=3, threshold=0.80)  # no more
@example(sizes=[1], length=2, samples=1, seed=3, threshold=0.80)
def test_index_is_megatron_s(sizes, length, samples, seed, threshold):
    """Epochs, the separate last epoch and both shuffles equal a plain construction's."""
    index = build_gpt_index(
        int32(sizes),
        (0, len(sizes)),
        sequence_length=length,
        num_samples=samples,
        seed=seed,
        final_epoch_threshold=threshold,
    )
    documents, starts, shuffle = megatron_index(sizes, length, samples, seed, threshold)
    assert index.document_index.tolist() == documents
    assert index.sample_index.tolist() == starts
    assert index.shuffle_index.tolist() == shuffle
    assert index.samples >= samples


def test_last_epoch_stays_apart_only_below_the_threshold():
    """With .79 of the last epoch wanted its documents come last, with .81 they mix."""
    sizes = np.full(100, 10, dtype=np.int32)

    def last_documents(samples):
        index = build_gpt_index(sizes, (0, 100), sequence_length=1, num_samples=samples, seed=3)
        return sorted(index.document_index[100:].tolist())

    assert last_documents(999 + 780) == list(range(100))
    assert last_documents(999 + 810) != list(range(100))


def test_shuffle_index_of_many_samples_is_wider(monkeypatch):
    """From 2**32 - 2 samples on the shuffle index is int64 (with the bound lowered here)."""
    monkeypatch.setattr(gpt_index, "_UINT32_MAX", 21)
    sizes = int32([3, 5, 2, 7, 4])

    def dtype(length):
        index = build_gpt_index(sizes, (0, 5), sequence_length=length, num_samples=1, seed=0)
        return index.shuffle_index.dtype

    assert dtype(1) == np.int64
    assert dtype(2) == np.uint32


def test_range_uses_only_its_sequences():
    """The index of a range names no sequence outside it."""
    index = build_gpt_index(
        int32([3, 5, 2, 7, 4]), (1, 3), sequence_length=2, num_samples=9, seed=0
    )
    assert set(index.document_index.tolist()) == {1, 2}


def test_no_tokens_is_an_error():
    """Documents without tokens cannot be trained on."""
    with pytest.raises(DataError, match="no tokens"):
        build_gpt_index(int32([0, 0]), (0, 2), sequence_length=2, num_samples=1, seed=0)


def test_too_many_epochs_is_an_error():
    """More entries than int32 counts are refused before they are made."""
    with pytest.raises(DataError, match="epochs"):
        build_gpt_index(
            np.ones(1000, dtype=np.int32),
            (0, 1000),
            sequence_length=1000,
            num_samples=2**32,
            seed=0,
        )


def test_native_says_why_it_is_absent(monkeypatch):
    """Without the module, `available` is false and the reason names the remedy's place."""
    import importlib

    def refuse(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    builders, reason = native._load()
    assert builders is None
    assert "compiler" in reason
