"""Step `shuffle`, and the file that documents wait in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.base.errors import DataError
from lmcore_data_tools.clean.corpus_step import StepContext
from lmcore_data_tools.clean.counts import StepCounts
from lmcore_data_tools.clean.document import Entry
from lmcore_data_tools.clean.document_store import DocumentStore
from lmcore_data_tools.clean.segment import Processed
from lmcore_data_tools.clean.shuffle import Shuffle


def shuffled(directory: Path, count: int, *, seed: int = 0, **settings: int) -> list[int]:
    """Return the order in which `count` documents come, taken in batches of seven."""
    directory.mkdir(exist_ok=True)
    context = StepContext(directory, "shuffle", StepCounts(), None, lambda pairs: None)
    entries = [Entry("f", number, b"x" * 50) for number in range(count)]
    batches = (Processed(entries[at : at + 7]) for at in range(0, count, 7))
    done = Shuffle(seed, **settings).run(batches, context)
    order = [entry.number for batch in done for entry in batch.entries]
    assert context.counts.seen == count
    assert list(directory.iterdir()) == []
    return order


def test_all_are_there_in_another_order(tmp_path: Path) -> None:
    """Every document comes once; the seed chooses the order."""
    first = shuffled(tmp_path, 500)
    assert sorted(first) == list(range(500))
    assert first != sorted(first)
    assert shuffled(tmp_path, 500) == first
    assert shuffled(tmp_path, 500, seed=1) != first


@pytest.mark.parametrize("held", [60, 500, 2000])
def test_order_does_not_depend_on_memory(tmp_path: Path, held: int) -> None:
    """Files that are too large are parted again, down to single documents, with the same order."""
    assert shuffled(tmp_path, 400, held_bytes=held) == shuffled(tmp_path, 400)


def test_every_order_is_as_likely(tmp_path: Path) -> None:
    """The 24 orders of four documents come equally often (chi-square, 23 degrees of freedom)."""
    counts = Counter(tuple(shuffled(tmp_path, 4, seed=seed)) for seed in range(360))
    expected = 360 / 24
    squares = sum((counts[order] - expected) ** 2 for order in permutations(range(4)))
    assert squares / expected < 49.7  # exceeded once in a thousand


def test_step(corpus: Callable, run_steps: Callable) -> None:
    """Lines come whole and unchanged."""
    path = corpus([{"text": str(n), "id": n} for n in range(50)])
    done = run_steps("shuffle", path)
    lines = Path(path).read_bytes().splitlines()
    assert sorted(done.raw.splitlines()) == sorted(lines)
    assert done.raw.splitlines() != lines


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(1, 100))
def test_document_store(
    tmp_path_factory: pytest.TempPathFactory, raws: list[bytes], size: int
) -> None:
    """Stored documents are read in order and at any position, with any size of a block."""
    documents = DocumentStore(tmp_path_factory.mktemp("documents") / "documents", block_bytes=size)
    entries = [Entry(f"file {n % 3}", n, raw) for n, raw in enumerate(raws)]
    for at in range(0, len(entries), 4):
        documents.append(entries[at : at + 4], list(range(at, at + len(entries[at : at + 4]))))
    documents.flush()
    assert len(documents) == len(entries)
    found = [keyed for first, block in documents.blocks() for keyed in block]
    assert found == [(entry, n) for n, entry in enumerate(entries)]
    assert [documents.read(n) for n in reversed(range(len(entries)))] == entries[::-1]
    documents.close()


def test_full_disk() -> None:
    """A disk without room ends it with a message."""
    device = Path("/dev/full")
    if not device.exists():
        pytest.skip("no /dev/full")
    documents = DocumentStore(device)
    documents.append([Entry("f", 1, b"x")])
    with pytest.raises(DataError, match="cannot write `/dev/full`"):
        documents.flush()
    documents.close()
