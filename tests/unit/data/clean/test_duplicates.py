"""Steps `exact` and `near`."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from lmcore.data.clean import near_duplicates
from lmcore.data.clean.minhash import MinHash, jaccard, shingle_set


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
    monkeypatch.setattr(near_duplicates, "_EVERY_PAIR_UP_TO", bound)
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
