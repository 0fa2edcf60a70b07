"""The file commands beside megatron-core's reader and merge."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.idx_reader import read_index
from lmcore.data.tools.merge import merge
from lmcore.data.tools.repair import RepairRequest, repair
from lmcore.data.tools.split import split_indexed

pytestmark = [
    pytest.mark.peer,
    # What it imports warns of much that is not ours.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def theirs():
    """Its module of indexed datasets."""
    return pytest.importorskip(
        "megatron.core.datasets.indexed_dataset", reason="needs the package megatron-core"
    )


def content(prefix) -> list[bytes]:
    return [Path(f"{prefix}{ending}").read_bytes() for ending in (".bin", ".idx")]


def build(theirs, prefix: Path, seed: int, *, multimodal: bool = False) -> str:
    """Write a dataset of 40 documents of 1 to 3 sequences by its builder."""
    import torch

    rng = np.random.default_rng(seed)
    builder = theirs.IndexedDatasetBuilder(f"{prefix}.bin", np.uint16, multimodal)
    for _ in range(40):
        lengths = rng.integers(1, 9, rng.integers(1, 4)).tolist()
        tokens = torch.from_numpy(rng.integers(1, 60_000, sum(lengths)))
        modes = rng.integers(0, 3, len(lengths)).tolist() if multimodal else None
        builder.add_document(tokens, lengths, modes)
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.mark.parametrize("multimodal", [False, True])
def test_merge_is_its_merge(theirs, tmp_path, multimodal):
    """Both merges of its files give the same bytes, modes included."""
    parts = [build(theirs, tmp_path / str(i), i, multimodal=multimodal) for i in range(3)]
    builder = theirs.IndexedDatasetBuilder(f"{tmp_path}/theirs.bin", np.uint16, multimodal)
    for part in parts:
        builder.add_index(part)
    builder.finalize(f"{tmp_path}/theirs.idx")
    merge(parts, f"{tmp_path}/ours")
    assert content(tmp_path / "ours") == content(tmp_path / "theirs")


def test_it_reads_what_split_writes(theirs, tmp_path):
    """Its reader finds the documents of a split dataset, in order."""
    whole = IndexedDataset(build(theirs, tmp_path / "whole", 7))
    report = split_indexed([whole.prefix], f"{tmp_path}/part", samples=15)
    found = []
    for file in report.files:
        part = theirs.IndexedDataset(file.prefix)
        bounds = part.document_indices.tolist()
        found += [
            np.concatenate([part[i] for i in range(first, last)]).tolist()
            for first, last in itertools.pairwise(bounds)
        ]
    assert found == [whole.document(i).tolist() for i in range(40)]


def test_modes_are_its_modes(theirs, tmp_path):
    """Both readers find the same modes."""
    prefix = build(theirs, tmp_path / "modes", 3, multimodal=True)
    expected = theirs.IndexedDataset(prefix, multimodal=True)
    modes = read_index(f"{prefix}.idx").modes
    assert [expected[i][1] for i in range(len(expected))] == modes.tolist()


def test_it_reads_what_repair_writes(theirs, tmp_path):
    """After a repair its reader finds each document with the end that was not counted."""
    import torch

    builder = theirs.IndexedDatasetBuilder(f"{tmp_path}/x.bin", np.uint16)
    documents = [[1, 2, 3], [4], [5, 6]]
    for document in documents:
        builder.add_document(torch.tensor([*document, 50256]), [len(document)])
    builder.finalize(f"{tmp_path}/x.idx")
    spoilt = theirs.IndexedDataset(f"{tmp_path}/x")  # its arrays are gone with it
    assert spoilt[1].tolist() != [4]
    repair(RepairRequest(f"{tmp_path}/x", output_prefix=f"{tmp_path}/y"))
    repaired = theirs.IndexedDataset(f"{tmp_path}/y")
    assert [repaired[i].tolist() for i in range(3)] == [[*one, 50256] for one in documents]


def test_rebuilt_index_is_its_index(theirs, tmp_path, shared_data):
    """The index of one of its files, rebuilt from the tokens alone, has the same bytes."""
    source = shared_data / "interop/megatron_indexed/test_text_document"
    (tmp_path / "x.bin").write_bytes(Path(f"{source}.bin").read_bytes())
    repair(RepairRequest(f"{tmp_path}/x", eod=131072, dtype="int32"))
    assert content(tmp_path / "x") == content(source)
    assert len(theirs.IndexedDataset(f"{tmp_path}/x")) == 1000
