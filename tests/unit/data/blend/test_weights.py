"""Weights of datasets: hand-computed shares, epochs matched exactly, moved directories."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.base.errors import DataError
from lmcore.data.blend.weights import (
    DatasetTokens,
    Move,
    count_tokens,
    format_token_counts,
    read_epochs,
    read_token_counts,
    rebase,
    weigh,
)
from lmcore.data.indexed.writer import IndexedDatasetWriter
from lmcore.data.tools.repair import RepairRequest, repair

COUNTS = [
    DatasetTokens("/d/wiki-0_text_document", 100),
    DatasetTokens("/d/wiki-1_text_document", 300),
    DatasetTokens("/d/c4-0_text_document", 1000),
    DatasetTokens("/d/c4-1_text_document", 1000),
]


def test_shares_by_hand() -> None:
    """Wiki's 400 tokens seen 3 times against C4's 2000 seen once: 1200 and 2000 of 3200."""
    files = weigh(COUNTS, {"wiki": 3, "c4": 1})
    assert [file.weight for file in files] == pytest.approx(
        [300 / 3200, 900 / 3200, 1000 / 3200, 1000 / 3200], rel=1e-15
    )
    assert [file.corpus for file in files] == ["wiki", "wiki", "c4", "c4"]
    assert [file.path for file in files] == [one.data_prefix for one in COUNTS]


def test_without_epochs_each_token_counts_once() -> None:
    """Weights are then as the tokens."""
    weights = [file.weight for file in weigh(COUNTS)]
    assert weights == pytest.approx([100 / 2400, 300 / 2400, 1000 / 2400, 1000 / 2400], rel=1e-15)


@given(
    tokens=st.lists(st.integers(1, 10**12), min_size=1, max_size=30),
    epochs=st.lists(st.floats(0.01, 100), min_size=4, max_size=4),
)
def test_weights_sum_to_one(tokens: list[int], epochs: list[float]) -> None:
    """Weights are proportional to counts times epochs, and their sum is 1."""
    counts = [DatasetTokens(f"c{i % 4}-{i}", count) for i, count in enumerate(tokens)]
    times = {f"c{i}": times for i, times in enumerate(epochs) if i < len(tokens)}
    files = weigh(counts, times)
    assert math.fsum(file.weight for file in files) == pytest.approx(1, rel=1e-12)
    exact = [times[f"c{i % 4}"] * count for i, count in enumerate(tokens)]
    for file, value in zip(files, exact, strict=True):
        assert file.weight == pytest.approx(value / math.fsum(exact), rel=1e-12)


def test_corpora_are_matched_exactly() -> None:
    """A corpus whose name contains another's name is a different corpus, with separate epochs."""
    counts = [DatasetTokens("wiki-0", 10), DatasetTokens("wikibooks-0", 10)]
    with pytest.raises(DataError, match="no epochs for the corpus `wikibooks`"):
        weigh(counts, {"wiki": 2})
    assert [file.weight for file in weigh(counts, {"wiki": 3, "wikibooks": 1})] == [0.75, 0.25]


def test_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Empty datasets and corpora of 0 epochs are left out, each with a line that says so."""
    counts = [*COUNTS, DatasetTokens("c4-2", 0), DatasetTokens("books-0", 7)]
    files = weigh(counts, {"wiki": 0, "c4": 1, "books": 1, "code": 2})
    assert [file.path for file in files] == [
        COUNTS[2].data_prefix,
        COUNTS[3].data_prefix,
        "books-0",
    ]
    assert math.fsum(file.weight for file in files) == pytest.approx(1)
    text = caplog.text
    assert "epochs are given for `code`, but there is no dataset" in text
    assert "left out `/d/wiki-0_text_document`: the corpus `wiki` has 0 epochs" in text
    assert "left out `c4-2`: it has no tokens" in text


@pytest.mark.parametrize(
    "counts, epochs, message",
    [
        ([DatasetTokens("a", 0)], None, "no tokens to weigh"),
        ([DatasetTokens("a", 5)], {"a": 0.0}, "no tokens to weigh"),
        ([DatasetTokens("a", 2**40)], {"a": 1.7e308}, "too large"),
    ],
)
def test_nothing_to_weigh(counts, epochs, message) -> None:
    """A list without any weight, or beyond numbers, is an error."""
    with pytest.raises(DataError, match=message):
        weigh(counts, epochs)


def test_tokens_come_from_the_index_alone(tmp_path: Path) -> None:
    """In both formats the `.bin` is not needed; the counts survive the metadata file."""
    for name, dataset_impl in (("a", "mmap"), ("b", "cached")):
        with IndexedDatasetWriter(tmp_path / name, "uint16", dataset_impl=dataset_impl) as writer:
            writer.add_document([1, 2, 3])
            writer.add_document([4])
        (tmp_path / f"{name}.bin").unlink()
    counts = count_tokens([f"{tmp_path}/a.bin", f"{tmp_path}/b"])
    assert counts == [DatasetTokens(f"{tmp_path}/a", 4), DatasetTokens(f"{tmp_path}/b", 4)]
    path = tmp_path / "metadata.json"
    path.write_text(format_token_counts(counts))
    assert json.loads(path.read_text())[0] == {
        "data_prefix": f"{tmp_path}/a",
        "total_num_tokens": 4,
    }
    assert read_token_counts(path) == counts
    with pytest.raises(DataError, match="appears twice in the datasets given"):
        count_tokens([f"{tmp_path}/a", f"{tmp_path}/a.idx"])
    (tmp_path / "a.idx").write_bytes((tmp_path / "a.idx").read_bytes()[:50])
    with pytest.raises(DataError, match="expected"):
        count_tokens([f"{tmp_path}/a"])


def test_a_copy_under_another_name_is_refused(tmp_path: Path) -> None:
    """Its tokens would count twice; datasets that only have the same sizes are different."""
    for name, token in (("arxiv_1", 7), ("wiki_1", 8)):
        with IndexedDatasetWriter(tmp_path / name, "uint16") as writer:
            writer.add_document([token] * 9)
    repair(RepairRequest(f"{tmp_path}/arxiv_1", hyphens=True))
    both = [f"{tmp_path}/arxiv-1", f"{tmp_path}/arxiv_1"]
    for indices_alone in (False, True):
        if indices_alone:
            for path in tmp_path.glob("*.bin"):
                path.unlink()
        with pytest.raises(DataError, match="arxiv_1` have the same content") as caught:
            count_tokens([*both, f"{tmp_path}/wiki_1"])
        assert "would count twice" in (caught.value.why or "")
        assert len(count_tokens([both[0], f"{tmp_path}/wiki_1"])) == 2


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "is not a list of datasets"),
        ("[]", "is not a list of datasets"),
        ("[3]", "entry 0 is not a dataset"),
        ('[{"data_prefix": "a"}]', "entry 0 is not a dataset"),
        ('[{"data_prefix": "a", "total_num_tokens": -1}]', "entry 0 is not a dataset"),
        ('[{"data_prefix": "a", "total_num_tokens": true}]', "entry 0 is not a dataset"),
        ('[{"data_prefix": "a", "total_num_tokens": 1.5}]', "entry 0 is not a dataset"),
        ('[{"data_prefix": "", "total_num_tokens": 1}]', "entry 0 is not a dataset"),
        ('[{"data_prefix": "a", "total_num_tokens": 1}, 2]', "entry 1 is not a dataset"),
        (
            (
                '[{"data_prefix": "a", "total_num_tokens": 1}, '
                '{"data_prefix": "a.bin", "total_num_tokens": 1}]'
            ),
            "`a` appears twice",
        ),
    ],
)
def test_metadata_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    """A metadata file of another shape is refused, with the shape wanted."""
    path = tmp_path / "metadata.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_token_counts(path)


def test_epochs_file(tmp_path: Path) -> None:
    """Lines of corpus and epochs; comments and blank lines are passed over."""
    path = tmp_path / "epochs"
    path.write_text("# epochs\nwiki 3\n\nc4\t0.5\n")
    assert read_epochs(path) == {"wiki": 3.0, "c4": 0.5}


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "names no corpus"),
        (b"wiki\n", r"line 1 has 1 column(?!s)"),
        (b"wiki 1\nc4 x\n", "line 2: `x` is not a number of epochs"),
        (b"wiki -1\n", "`-1` is not a number"),
        (b"wiki inf\n", "`inf` is not a number"),
        (b"wiki nan\n", "`nan` is not a number"),
        (b"wiki 1\nwiki 2\n", "line 2: the corpus `wiki` is listed twice"),
        (b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_epochs_that_are_none(tmp_path: Path, content: bytes, message: str) -> None:
    """An invalid line of an epochs file is an error that names it."""
    path = tmp_path / "epochs"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_epochs(path)


def test_missing_and_enormous_files(tmp_path: Path) -> None:
    """They are errors that name the file, and take no memory."""
    with pytest.raises(DataError, match="cannot read"):
        read_epochs(tmp_path / "none")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(DataError, match="larger than 64 MiB"):
        read_epochs(tmp_path / "large")


def test_rebase() -> None:
    """Directories are replaced whole, the longest that fits; other paths stay."""
    counts = [DatasetTokens(path, 1) for path in ("/data/a", "/data/x/b", "/data2/c", "/data")]
    moved = rebase(counts, [Move("/data/", "/new"), Move("/data/x", "/other")])
    assert [one.data_prefix for one in moved] == ["/new/a", "/other/b", "/data2/c", "/data"]
    assert rebase(counts, []) == counts
    with pytest.raises(DataError, match="no dataset is in `/dat`"):
        rebase(counts, [Move("/dat", "/new")])
