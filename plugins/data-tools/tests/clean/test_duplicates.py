"""Steps `exact` and `near`; equal keys in any number of rows, and the groups that they make."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore_data_tools.clean import duplicates
from lmcore_data_tools.clean.duplicates import KeyStore
from lmcore_data_tools.clean.minhash import MinHash, jaccard, shingle_set
from lmcore_data_tools.clean.union_find import UnionFind


def random_text(seed: int, length: int = 600) -> str:
    return "".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz    ", k=length))


def edited(text: str, *places: int) -> str:
    """Return *text* with other characters at *places*: five shingles go for each."""
    changed = list(text)
    for place in places:
        changed[place] = "#"
    return "".join(changed)


def test_exact(corpus: Callable, run_steps: Callable) -> None:
    """The first document of a text stays, wherever the others are and whatever else they hold."""
    path = corpus(
        [{"text": text, "n": n} for n, text in enumerate(["a", "b", "a", "", "c", "b", ""])]
    )
    done = run_steps("exact", path)
    assert [record["n"] for record in done.records] == [0, 1, 3, 4]
    assert [(line["line"], line["kept"]["line"]) for line in done.dropped] == [
        (3, 1),
        (6, 2),
        (7, 4),
    ]
    (step,) = done.report.steps
    assert (step.documents, step.kept, step.dropped) == (7, 4, {"duplicate": 3})


def test_near_at_known_similarity(corpus: Callable, run_steps: Callable) -> None:
    """A pair at the bound goes, one just below it stays, by the true share of shingles."""
    text = random_text(1)
    # 596 shingles, each edit makes 5 others: 6 edits leave 566 of 626 (.904), 7 leave 561 of 631.
    above = edited(text, *range(50, 350, 50))
    below = edited(text, *range(50, 400, 50))
    similarity = [jaccard(shingle_set(text, 5), shingle_set(one, 5)) for one in (above, below)]
    assert similarity == [566 / 626, 561 / 631]
    minhash = MinHash(hashes=200, bands=50)  # finds either pair, so that the bound decides
    done = run_steps("near", corpus([text, above]), minhash=minhash)
    assert done.texts == [text]
    assert done.dropped[0]["reason"] == "near duplicate"
    assert done.dropped[0]["kept"]["line"] == 1
    assert run_steps("near", corpus([text, below]), minhash=minhash).texts == [text, below]
    done = run_steps("near", corpus([text, below]), minhash=minhash, similarity=561 / 631)
    assert done.texts == [text]


def test_groups_are_connected(corpus: Callable, run_steps: Callable) -> None:
    """Documents connected through similar ones form one group; its first document stays."""
    chain = [random_text(2)]
    for start in (0, 120, 240, 360):
        chain.append(edited(chain[-1], *range(start, start + 100, 25)))
    ends = jaccard(shingle_set(chain[0], 5), shingle_set(chain[-1], 5))
    assert ends < 0.8
    others = [random_text(seed) for seed in (3, 4)]
    documents = [others[0], chain[2], chain[4], others[1], chain[0], chain[3], chain[1]]
    minhash = MinHash(hashes=200, bands=50)
    done = run_steps("near", corpus(documents), minhash=minhash)
    assert done.texts == [others[0], chain[2], others[1]]
    assert {line["kept"]["line"] for line in done.dropped} == {2}


@pytest.mark.parametrize("bound", [64, 4])
def test_large_buckets(
    corpus: Callable, run_steps: Callable, monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
    """Groups of copies are found even if not every pair of a bucket is compared."""
    monkeypatch.setattr(duplicates, "_EVERY_PAIR_UP_TO", bound)
    texts = [random_text(seed) for seed in (5, 6)]
    documents = [edited(texts[n % 2], 10 * n + 20) for n in range(30)]
    done = run_steps("near", corpus(documents))
    assert done.texts == documents[:2]


def test_seed_chooses_pairs_not_results(corpus: Callable, run_steps: Callable) -> None:
    """A seed gives the same result again, and another seed finds copies just as well."""
    documents = [edited(random_text(n // 2), n) for n in range(20)]
    path = corpus(documents)
    first = run_steps("near", path, seed=1, minhash=MinHash(seed=1)).raw
    assert run_steps("near", path, seed=1, minhash=MinHash(seed=1)).raw == first
    assert run_steps("near", path, seed=2, minhash=MinHash(seed=2)).raw == first


def test_short_and_empty_texts(corpus: Callable, run_steps: Callable) -> None:
    """Texts shorter than a shingle are duplicates where they are equal."""
    done = run_steps("near", corpus(["", "ab", "abc", "", "ab", "abcde"]))
    assert done.texts == ["", "ab", "abc", "abcde"]


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("rows_held", [10, 100, 10_000])
def test_groups(tmp_path: Path, columns: int, rows_held: int) -> None:
    """All positions of a key come together and in order, in memory or in files."""
    numbers = np.random.default_rng(columns)
    values = numbers.integers(0, 1 << 64, size=300, dtype=np.uint64)
    keys = values[numbers.integers(0, 300, size=(1000, columns))]
    if columns == 2:
        keys[:, 0] = values[:30][numbers.integers(0, 30, size=1000)]  # alike in the first only
        keys[:, 1] &= np.uint64(7)
    positions = np.arange(1000)
    store = KeyStore(tmp_path, columns, rows_held=rows_held)
    for start in range(0, 1000, 37):
        store.add(keys[start : start + 37], positions[start : start + 37])
    assert any(tmp_path.iterdir()) == (rows_held < 1000)
    expected: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for key, position in zip(keys.tolist(), positions.tolist(), strict=True):
        expected[tuple(key)].append(position)
    found = []
    for where, starts in store.buckets():
        for start, end in zip(starts, [*starts[1:], len(where)], strict=True):
            found.append(where[start:end].tolist())
    assert found == [expected[key] for key in sorted(expected) if len(expected[key]) > 1]
    assert not any(tmp_path.iterdir())


def test_no_rows(tmp_path: Path) -> None:
    """Without rows there are no groups."""
    assert list(KeyStore(tmp_path, 1).buckets()) == []


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=60))
def test_leaders(pairs: list[tuple[int, int]]) -> None:
    """The leader of a position is the first one that it is connected with, over any others."""
    clusters = UnionFind(Path("unused"), 31)
    neighbours: dict[int, set[int]] = {at: {at} for at in range(31)}
    for first, second in pairs:
        clusters.union(first, second)
        neighbours[first].add(second)
        neighbours[second].add(first)
    expected = []
    for at in range(31):
        reached, open_ = {at}, [at]
        while open_:
            new = neighbours[open_.pop()] - reached
            reached |= new
            open_.extend(new)
        expected.append(min(reached))
    assert [clusters.find(at) for at in range(31)] == expected
    assert clusters.representatives(0, 31).tolist() == expected
    assert clusters.representatives(10, 20).tolist() == expected[10:20]


def test_leaders_on_the_disk(tmp_path: Path) -> None:
    """Many positions are kept in a file."""
    count = (1 << 20) + 5
    clusters = UnionFind(tmp_path / "clusters", count)
    clusters.union(count - 1, 3)
    clusters.union_rows(np.array([10, 20, 30, 11, 21]), np.array([0, 3]))
    assert (tmp_path / "clusters").stat().st_size == 8 * count
    assert clusters.representatives(count - 2, count).tolist() == [count - 2, 3]
    assert clusters.representatives(10, 31)[[0, 1, 10, 11, 20]].tolist() == [10, 11, 10, 11, 10]
