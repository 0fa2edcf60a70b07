"""Facts of a dataset's sizes, and when their record holds."""

from __future__ import annotations

import json
import os

import pytest

from lmcore.data.indexed import statistics as module
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.statistics import SequenceStatistics, sequence_statistics
from lmcore.data.indexed.writer import IndexedDatasetWriter


def written(path, documents) -> IndexedDataset:
    with IndexedDatasetWriter(path, "uint16") as writer:
        for lengths in documents:
            writer.add_document([1] * sum(lengths), lengths)
    return IndexedDataset(path)


@pytest.fixture
def indexed(tmp_path) -> IndexedDataset:
    return written(tmp_path / "made", [[3], [5, 2], [7], [4]])


@pytest.fixture
def settled(monkeypatch):
    """Let a file count as settled at once."""
    monkeypatch.setattr(module, "_SETTLED_SECONDS", -1.0)


def test_tokens_and_digest_are_of_the_range(indexed, tmp_path):
    """Tokens are counted in the range; the digest follows sizes and documents, not the path."""
    assert sequence_statistics(indexed, (0, 5)).tokens == 21
    assert sequence_statistics(indexed, (1, 3)).tokens == 7
    same = written(tmp_path / "same", [[3], [5, 2], [7], [4]])
    assert sequence_statistics(same, (0, 5)) == sequence_statistics(indexed, (0, 5))
    for other in ([[3], [5], [2], [7], [4]], [[3], [2, 5], [7], [4]], [[3], [5, 2], [11]]):
        made = written(tmp_path / "other", other)
        whole = (0, len(made.sizes))
        assert (
            sequence_statistics(made, whole).digest != sequence_statistics(indexed, (0, 5)).digest
        )
    shifted = written(tmp_path / "shifted", [[9], [3], [5, 2], [7], [4]])
    assert sequence_statistics(shifted, (1, 6)) == sequence_statistics(indexed, (0, 5))


def test_chunks_do_not_show(indexed, monkeypatch):
    """The digest covers the whole sequence, with any size of the chunks."""
    whole = sequence_statistics(indexed, (0, 5))
    monkeypatch.setattr(module, "_CHUNK", 2)
    assert sequence_statistics(indexed, (0, 5)) == whole


def test_a_record_spares_the_pass(indexed, tmp_path, settled, monkeypatch):
    """Recorded statistics are not computed again, in any process."""
    first = sequence_statistics(indexed, (0, 5), record_dir=tmp_path)
    monkeypatch.setattr(module, "_compute", None)
    assert sequence_statistics(indexed, (0, 5), record_dir=tmp_path) == first
    assert sequence_statistics(IndexedDataset(indexed.prefix), (0, 5), record_dir=tmp_path) == first
    with pytest.raises(TypeError):
        sequence_statistics(indexed, (0, 4), record_dir=tmp_path)


def test_a_changed_file_voids_its_record(indexed, tmp_path, settled):
    """A dataset written again under its name, of the same size and time even, is gone through."""
    first = sequence_statistics(indexed, (0, 5), record_dir=tmp_path)
    times = indexed.idx_path.stat()
    again = written(tmp_path / "made", [[3], [5, 2], [4], [7]])
    os.utime(again.idx_path, ns=(times.st_atime_ns, times.st_mtime_ns))
    second = sequence_statistics(again, (0, 5), record_dir=tmp_path)
    assert second != first
    assert second == sequence_statistics(again, (0, 5))
    assert sequence_statistics(again, (0, 5), record_dir=tmp_path) == second


def test_a_file_just_changed_gets_no_record(indexed, tmp_path):
    """A file that has just changed is not recorded: a second change may not show in its times."""
    sequence_statistics(indexed, (0, 5), record_dir=tmp_path)
    assert not list(tmp_path.glob("facts-*"))


@pytest.mark.parametrize("damage", ["", "{}", '{"state": 1}', "[]"])
def test_a_damaged_record_is_passed_over(indexed, tmp_path, settled, damage):
    """An unreadable record is replaced."""
    first = sequence_statistics(indexed, (0, 5), record_dir=tmp_path)
    (record,) = tmp_path.glob("facts-*")
    record.write_text(damage)
    assert sequence_statistics(indexed, (0, 5), record_dir=tmp_path) == first


def test_a_record_that_cannot_be_written_is_done_without(indexed, tmp_path, settled):
    """Without a usable directory the statistics are computed and not recorded."""
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "none", tmp_path / "file"):
        assert sequence_statistics(indexed, (0, 5), record_dir=directory).tokens == 21
    assert not (tmp_path / "none").exists()


def test_the_record_names_its_file(indexed, tmp_path, settled):
    """A person who looks into the directory sees what a record is of."""
    facts = sequence_statistics(indexed, (0, 5), record_dir=tmp_path)
    (record,) = tmp_path.glob("facts-*")
    values = json.loads(record.read_text())
    assert values["file"] == str(indexed.idx_path)
    assert SequenceStatistics(values["tokens"], values["digest"]) == facts


def test_a_range_outside_is_refused(indexed):
    """The range lies within the dataset."""
    for bounds in [(-1, 2), (0, 6), (3, 2)]:
        with pytest.raises(ValueError):
            sequence_statistics(indexed, bounds)
