"""Tokenizer files and small datasets for the tests of the data path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from bpe_files import write_bpe_files

from lmcore.data import native
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.writer import IndexedDatasetWriter
from lmcore.data.tokenizer import GPT2BPETokenizer


@pytest.fixture
def bpe_files(tmp_path: Path) -> tuple[Path, Path]:
    """A `vocab.json` of 265 tokens and its `merges.txt`."""
    return write_bpe_files(tmp_path)


@pytest.fixture(scope="session")
def hand_made(tmp_path_factory: pytest.TempPathFactory) -> GPT2BPETokenizer:
    """The tokenizer of `bpe_files`, once for all tests."""
    return GPT2BPETokenizer(*map(str, write_bpe_files(tmp_path_factory.mktemp("bpe"))))


@pytest.fixture(scope="session")
def gpt2_files(shared_data: Path) -> tuple[str, str]:
    """GPT-2's own `vocab.json` and `merges.txt`."""
    folder = shared_data / "tokenizers/gpt2"
    return str(folder / "gpt2-vocab.json"), str(folder / "gpt2-merges.txt")


@pytest.fixture(scope="session")
def gpt2(gpt2_files: tuple[str, str]) -> GPT2BPETokenizer:
    """GPT-2's tokenizer on the engine that it has here."""
    return GPT2BPETokenizer(*gpt2_files)


@pytest.fixture(params=["native", "python"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test on C++ and on what does the same in Python."""
    if request.param == "python":
        monkeypatch.setattr(native, "builders", None)
    elif not native.available:
        pytest.skip(native.reason)


@pytest.fixture
def make_dataset(tmp_path: Path) -> Callable[[Sequence[Sequence[int]]], IndexedDataset]:
    """Return a function that writes documents as uint16 and opens them."""

    def make(documents: Sequence[Sequence[int]]) -> IndexedDataset:
        prefix = tmp_path / "made"
        with IndexedDatasetWriter(prefix, "uint16") as writer:
            for document in documents:
                writer.add_document(document)
        return IndexedDataset(prefix)

    return make
