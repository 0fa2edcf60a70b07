"""Cache of sample indices: keys, builds by several processes, damaged and read-only files."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from lmcore.base.errors import DataError
from lmcore.base.lock import LockOwner
from lmcore.data.cache import array_store
from lmcore.data.cache.index_cache import cache_key, index_cache_dir, load_or_build
from lmcore.data.dataset import gpt_index
from lmcore.data.dataset.gpt import GPTDataset
from lmcore.data.dataset.gpt_index import IndexRequest
from lmcore.data.indexed import statistics
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.statistics import sequence_statistics
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


def test_second_build_reads_and_never_writes(make_dataset, tmp_path, monkeypatch):
    """A cached index is mapped from its files: nothing is built, no file changes."""
    indexed = make_dataset(DOCUMENTS)
    first = dataset(indexed, tmp_path)
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "cache").iterdir()}
    monkeypatch.setattr(gpt_index, "build_gpt_index", None)
    again = dataset(indexed, tmp_path)
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "cache").iterdir()} == before
    assert len(before) == 4
    assert all((first[i] == again[i]).all() for i in range(5))
    assert not again.index.sample_index.flags.writeable


def test_a_warm_cache_is_opened_without_reading_it(make_dataset, tmp_path, monkeypatch):
    """Neither sizes nor arrays are gone through again, so that size does not matter."""
    monkeypatch.setattr(statistics, "_SETTLED_SECONDS", -1.0)
    indexed = make_dataset(DOCUMENTS)
    (tmp_path / "cache").mkdir()
    first = dataset(indexed, tmp_path)
    monkeypatch.setattr(statistics, "_compute", None)
    monkeypatch.setattr(array_store, "_checksum", None)
    monkeypatch.setattr(gpt_index, "build_gpt_index", None)
    again = dataset(indexed, tmp_path)
    assert (again.key, again.order) == (first.key, first.order)
    assert all((first[i] == again[i]).all() for i in range(5))


def test_a_long_build_reports(make_dataset, tmp_path, monkeypatch):
    """A build that takes longer than a second reports its name and progress."""
    seen = []
    build = IndexRequest.build

    def slow(self, indexed, progress):
        made = build(self, indexed, progress)
        end = time.monotonic() + 30
        while not seen and time.monotonic() < end:
            time.sleep(0.02)
        return made

    monkeypatch.setattr(IndexRequest, "build", slow)
    load_or_build(
        make_dataset(DOCUMENTS),
        IndexRequest((0, 5), 5, 4, 0),
        cache_dir=tmp_path / "cache",
        name="train",
        report=seen.append,
    )
    assert {(one.what, one.fraction) for one in seen} == {("the sample index of train", 1.0)}
    assert seen[0].seconds >= 1


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"num_samples": 6},
        {"sequence_length": 3},
        {"document_range": (0, 4)},
        {"final_epoch_threshold": 0.95},
    ],
)
def test_key_follows_everything(make_dataset, tmp_path, change):
    """Another seed, number, length, range or threshold has a separate cache."""
    indexed = make_dataset(DOCUMENTS)
    dataset(indexed, tmp_path)
    dataset(indexed, tmp_path, **change)
    assert len(list((tmp_path / "cache").glob("*.json"))) == 2


def test_key_follows_the_data_not_its_place(make_dataset, tmp_path):
    """The same documents elsewhere share the cache; other sizes do not."""
    request = IndexRequest((0, 2), 5, 4, 0)

    def key(name, documents):
        with IndexedDatasetWriter(tmp_path / name, "uint16") as writer:
            for document in documents:
                writer.add_document(document)
        return key_of(request, IndexedDataset(tmp_path / name))

    assert key("a", [[1, 2], [3]]) == key("b", [[1, 2], [3]])
    assert key("a", [[1, 2], [3]]) != key("c", [[1], [2, 3]])


def key_of(request: IndexRequest, indexed: IndexedDataset) -> str:
    return cache_key(request, sequence_statistics(indexed, request.sequence_range))


@pytest.mark.parametrize("which", ["document_index", "sample_index", "shuffle_index", "json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "gone"])
def test_damaged_cache_is_rebuilt_with_a_warning(make_dataset, tmp_path, caplog, which, damage):
    """With a damaged cache file the samples are right, and a warning says what happened."""
    indexed = make_dataset(DOCUMENTS)
    expected = [dataset(indexed, tmp_path)[i].tolist() for i in range(5)]
    ending = "*.json" if which == "json" else f"*{which}.npy"
    (path,) = (tmp_path / "cache").glob(ending)
    content = bytearray(path.read_bytes())
    content[-3] ^= 0xFF
    match damage:
        case "cut":
            path.write_bytes(path.read_bytes()[:-5])
        case "flip":
            path.write_bytes(content)
        case "empty":
            path.write_bytes(b"")
        case "gone":
            path.unlink()
    with caplog.at_level(logging.WARNING):
        again = dataset(indexed, tmp_path)
    assert [again[i].tolist() for i in range(5)] == expected
    if (which, damage) != ("json", "gone"):
        assert "rebuilding" in caplog.text
    caplog.clear()
    dataset(indexed, tmp_path)
    assert not caplog.text


@pytest.mark.parametrize("verify", [False, True])
def test_damage_that_the_next_sample_misses_is_not_used(
    make_dataset, tmp_path, monkeypatch, verify
):
    """A block that one load found damaged is not used because the next load samples other ones."""
    monkeypatch.setattr(array_store, "_BLOCK", 16)
    indexed = make_dataset(DOCUMENTS)
    indexed.verify_indices = verify
    expected = [dataset(indexed, tmp_path)[i].tolist() for i in range(5)]
    (path,) = (tmp_path / "cache").glob("*sample_index.npy")
    times = path.stat()
    content = bytearray(path.read_bytes())
    assert len(content) > 4 * 16
    content[-20] ^= 1  # in the block before the last
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    damaged = (len(content) - 20) // 16
    samples = iter([] if verify else [[damaged, 1]] * 3)
    monkeypatch.setattr(random, "sample", lambda blocks, count: next(samples, [1, 2]))
    again = dataset(indexed, tmp_path)
    assert [again[i].tolist() for i in range(5)] == expected


def test_pickled_cache_is_never_loaded(make_dataset, tmp_path):
    """An array file that holds a pickle is not executed, even if its checksum was adjusted."""
    indexed = make_dataset(DOCUMENTS)
    dataset(indexed, tmp_path)
    (path,) = (tmp_path / "cache").glob("*document_index.npy")
    (description,) = (tmp_path / "cache").glob("*.json")

    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "executed"),))

    np.save(path, np.array([Bomb()], dtype=object), allow_pickle=True)
    values = json.loads(description.read_text())
    values["arrays"]["document_index"] |= {
        "bytes": path.stat().st_size,
        "crc32": array_store._checksum(path),
        "blocks_crc32": None,
        "mtime_ns": path.stat().st_mtime_ns,
    }
    del values["arrays_crc32"]
    description.write_text(json.dumps(values))
    assert len(dataset(indexed, tmp_path)[0]) == 5
    assert not (tmp_path / "executed").exists()


def test_default_cache_lies_beside_the_data(make_dataset, tmp_path):
    """Without a cache path the index goes to a directory named after the data."""
    indexed = make_dataset(DOCUMENTS)
    dataset(indexed, tmp_path, cache_dir=None)
    assert index_cache_dir(indexed, None) == tmp_path / "made_index_cache"
    assert len(list(index_cache_dir(indexed, None).iterdir())) == 4


def test_read_only_data_keeps_the_index_in_memory(make_dataset, tmp_path, caplog):
    """Beside read-only data nothing is written, for root neither: a warning names the option."""
    indexed = make_dataset(DOCUMENTS)
    tmp_path.chmod(0o555)
    try:
        made = dataset(indexed, tmp_path, cache_dir=None)
        dataset(indexed, tmp_path, cache_dir=None)
    finally:
        tmp_path.chmod(0o755)
    assert len(made[0]) == 5
    assert caplog.text.count("--data-cache-path") == 1
    assert not index_cache_dir(indexed, None).exists()


def test_read_only_cache_is_used_and_never_written(make_dataset, tmp_path, caplog, monkeypatch):
    """A cache that must not be written serves what it has; the rest is built in memory."""
    indexed, cache = make_dataset(DOCUMENTS), tmp_path / "cache"
    first = dataset(indexed, tmp_path)
    before = sorted(path.name for path in cache.iterdir())
    cache.chmod(0o555)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(gpt_index, "build_gpt_index", None)
            again = dataset(indexed, tmp_path)
        assert not caplog.records
        other = dataset(indexed, tmp_path, seed=7)
    finally:
        cache.chmod(0o755)
    assert [again[i].tolist() for i in range(5)] == [first[i].tolist() for i in range(5)]
    assert len(other[0]) == 5
    assert "the sample index is kept in memory" in caplog.text
    assert sorted(path.name for path in cache.iterdir()) == before


def test_unusable_cache_path_is_an_error(make_dataset, tmp_path):
    """A cache path that was asked for and cannot be used stops the run."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        dataset(make_dataset(DOCUMENTS), tmp_path, cache_dir=tmp_path / "file/cache")


def _build_in_process(prefix: str, cache: str, start, results) -> None:
    start.wait()
    builds = []
    build = IndexRequest.build
    IndexRequest.build = lambda self, indexed, progress: (
        builds.append(1),
        time.sleep(0.3),
        build(self, indexed, progress),
    )[2]
    made = GPTDataset(
        IndexedDataset(prefix),
        document_range=(0, 5),
        num_samples=5,
        sequence_length=4,
        seed=1234,
        cache_dir=cache,
    )
    results.put((len(builds), made[0].tolist()))


# The children start no thread and wait for none.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_build_once_and_all_read(make_dataset, tmp_path):
    """Of four processes that start together one builds; all get the same samples."""
    indexed = make_dataset(DOCUMENTS)
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    arguments = (indexed.prefix, str(tmp_path / "cache"), start, results)
    processes = [context.Process(target=_build_in_process, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    start.set()
    got = [results.get(timeout=90) for _ in processes]
    for process in processes:
        process.join()
    assert sum(builds for builds, _ in got) == 1
    assert {tuple(sample) for _, sample in got} == {(20, 21, 30, 31, 32)}
    assert len(list((tmp_path / "cache").iterdir())) == 4


def test_lock_of_a_dead_process_is_removed(make_dataset, tmp_path, caplog):
    """A builder that was killed leaves a lock; the next process removes it and builds."""
    indexed = make_dataset(DOCUMENTS)
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    request = IndexRequest((0, 5), 5, 4, 1234)
    (tmp_path / "cache").mkdir()
    lock = tmp_path / "cache" / f"train-{key_of(request, indexed)}.lock"
    owner = replace(LockOwner.this_process(), pid=process.pid)
    lock.write_text(json.dumps(vars(owner)))
    assert len(dataset(indexed, tmp_path)[0]) == 5
    assert "is gone" in caplog.text
    assert not lock.exists()
