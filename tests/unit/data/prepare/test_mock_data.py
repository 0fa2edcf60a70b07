"""Random documents: what they are made of, the same for a seed, and written once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lmcore.base.errors import DataError
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.metadata import read_metadata
from lmcore.data.prepare.mock_data import prepare_mock_data
from lmcore.data.tokenizer.null import NullTokenizer


def documents(prefix: str) -> list[np.ndarray]:
    dataset = IndexedDataset(prefix)
    return [np.asarray(dataset.get(index)) for index in range(len(dataset))]


def test_documents(tmp_path: Path) -> None:
    """They have the seed's lengths, every token but the end of a document, and that one last."""
    tokenizer = NullTokenizer(50)
    found = documents(prepare_mock_data(tokenizer, tmp_path, seed=3))
    lengths = np.random.RandomState(3).randint(1, 4097, size=512)
    assert [len(one) for one in found] == lengths.tolist()
    assert all(one[-1] == 50 for one in found)
    inside = np.concatenate([one[:-1] for one in found])
    counts = np.bincount(inside, minlength=51)
    assert counts[50] == 0
    # 50 equally likely tokens: each within 5 standard deviations of its mean
    mean = len(inside) / 50
    assert np.abs(counts[:50] - mean).max() < 5 * np.sqrt(mean)
    metadata = read_metadata(tmp_path / "mock_data_3_text_document")
    assert metadata is not None
    assert metadata.append_eod
    assert metadata.fingerprint == tokenizer.fingerprint()


@pytest.mark.parametrize("size", [1, 70_000])
def test_sizes_of_a_vocabulary(tmp_path: Path, size: int) -> None:
    """The smallest vocabulary has one token beside the end, and a large one needs wider ids."""
    found = documents(prepare_mock_data(NullTokenizer(size), tmp_path, seed=1))
    largest = max(int(one.max()) for one in found)
    assert largest == size
    assert found[0].dtype == (np.int32 if size > 65_499 else np.uint16)


def test_the_same_again(tmp_path: Path) -> None:
    """One seed gives the same documents anywhere, another one others; files are written once."""
    tokenizer = NullTokenizer(50)
    one = prepare_mock_data(tokenizer, tmp_path / "one", seed=3)
    two = prepare_mock_data(tokenizer, tmp_path / "two", seed=3)
    other = prepare_mock_data(tokenizer, tmp_path / "one", seed=4)
    content = [Path(f"{prefix}.bin").read_bytes() for prefix in (one, two, other)]
    assert content[0] == content[1] != content[2]
    written = Path(f"{one}.bin").stat().st_mtime_ns
    assert prepare_mock_data(tokenizer, tmp_path / "one", seed=3) == one
    assert Path(f"{one}.bin").stat().st_mtime_ns == written
    larger = documents(prepare_mock_data(NullTokenizer(60), tmp_path / "one", seed=3))
    assert max(int(document.max()) for document in larger) == 60


def test_sentences(tmp_path: Path) -> None:
    """Documents of BERT's are divided into sentences of 1 to 64 tokens, with the same tokens."""
    tokenizer = NullTokenizer(50)
    plain = documents(prepare_mock_data(tokenizer, tmp_path, seed=3))
    prefix = prepare_mock_data(tokenizer, tmp_path, seed=3, sentences=True)
    dataset = IndexedDataset(prefix)
    assert prefix.endswith("_text_sentence")
    assert dataset.document_count == 512
    assert len(dataset) > 10_000
    assert 1 <= int(dataset.sizes.min()) <= int(dataset.sizes.max()) <= 64
    assert len(np.concatenate(documents(prefix))) == len(np.concatenate(plain))


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    """It is an error that names the path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="mock data cannot be written to"):
        prepare_mock_data(NullTokenizer(50), tmp_path / "file" / "data", seed=1)
