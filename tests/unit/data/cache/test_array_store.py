"""Sets of arrays on disk: whole or not there, mapped without being read."""

from __future__ import annotations

import errno
import logging
import os

import numpy as np
import pytest

from lmcore.base.errors import DataError
from lmcore.data.cache import array_store as array_files
from lmcore.data.cache.array_store import load_arrays, store_arrays

ARRAYS = {"a": np.arange(1000, dtype=np.int32).reshape(-1, 2), "b": np.arange(7, dtype=np.uint64)}


def test_what_was_stored_is_mapped(tmp_path):
    """Arrays come back as they were, read-only; nothing else is left in the directory."""
    store_arrays(tmp_path / "x", ARRAYS)
    loaded = load_arrays(tmp_path / "x")
    for name, values in ARRAYS.items():
        assert (loaded[name] == values).all()
        assert (loaded[name].dtype, loaded[name].shape) == (values.dtype, values.shape)
        assert not loaded[name].flags.writeable
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x-a.npy", "x-b.npy", "x.json"]


def test_nothing_there_is_none_without_a_word(tmp_path, caplog):
    """A set that was never stored is no reason for a warning."""
    assert load_arrays(tmp_path / "x") is None
    assert not caplog.text


def test_too_many_open_files_are_no_damage(tmp_path, monkeypatch):
    """A process that may open no more files does not build the index again, and again."""
    store_arrays(tmp_path / "a", {"x": np.arange(3)})

    def refused(*_args, **_options):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(array_files, "_load", refused)
    with pytest.raises(DataError, match="cannot open the cached index") as caught:
        load_arrays(tmp_path / "a")
    assert "ulimit -n" in caught.value.hint


def test_files_untouched_since_are_not_read(tmp_path, monkeypatch):
    """The checksum is not computed for files that still have the time they were given."""
    store_arrays(tmp_path / "x", ARRAYS)
    monkeypatch.setattr(array_files, "_checksum", None)
    assert load_arrays(tmp_path / "x") is not None


def test_a_copy_is_read_once(tmp_path, monkeypatch):
    """Files with another time are held to their checksum, and given their time when they pass."""
    store_arrays(tmp_path / "x", ARRAYS)
    for path in tmp_path.glob("*.npy"):
        os.utime(path)
    assert load_arrays(tmp_path / "x") is not None
    monkeypatch.setattr(array_files, "_checksum", None)
    assert load_arrays(tmp_path / "x") is not None


def test_a_byte_changed_right_after_is_found(tmp_path, caplog):
    """However soon a file is changed, its time no longer is the one on record."""
    for i in range(20):
        stem = tmp_path / f"x{i}"
        store_arrays(stem, ARRAYS)
        path = tmp_path / f"x{i}-a.npy"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        with caplog.at_level(logging.WARNING):
            assert load_arrays(stem) is None
        assert "another checksum" in caplog.text


def flip(path, at):
    """Change one bit of a file and leave its modification time as it was."""
    times = path.stat()
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("at", [0, 200, -1])
def test_a_bit_that_changed_on_the_disk_is_found(tmp_path, at, caplog):
    """Bit rot leaves the time of a file: a small file is verified whole with every load."""
    store_arrays(tmp_path / "x", ARRAYS)
    flip(tmp_path / "x-a.npy", at)
    with caplog.at_level(logging.WARNING):
        assert load_arrays(tmp_path / "x") is None
    assert "x-a.npy" in caplog.text
    assert "checksum" in caplog.text


def test_a_load_verifies_a_sample_of_a_large_file(tmp_path, monkeypatch):
    """Four blocks are read; the first, the last, and in the course of loads every other one."""
    monkeypatch.setattr(array_files, "_BLOCK", 100)
    store_arrays(tmp_path / "x", {"a": ARRAYS["a"]})
    read = []
    block_checksum = array_files._block_checksum
    monkeypatch.setattr(
        array_files, "_block_checksum", lambda path, i: read.append(i) or block_checksum(path, i)
    )
    blocks = -(-(tmp_path / "x-a.npy").stat().st_size // 100)
    for _ in range(400):
        assert load_arrays(tmp_path / "x") is not None
        assert {0, blocks - 1} <= set(read[-4:])
    assert len(read) <= 4 * 400
    assert set(read) == set(range(blocks))


def test_every_bit_of_the_description_counts(tmp_path):
    """A description with a flipped bit gives the right arrays, or none to be built again."""
    store_arrays(tmp_path / "x", ARRAYS)
    description = tmp_path / "x.json"
    content = description.read_bytes()
    for at in range(len(content)):
        description.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        loaded = load_arrays(tmp_path / "x")
        if loaded is not None:
            assert loaded.keys() == ARRAYS.keys()
            assert all((loaded[name] == values).all() for name, values in ARRAYS.items())


def test_a_name_does_not_lead_elsewhere(tmp_path):
    """A description that names a file in another directory finds none."""
    store_arrays(tmp_path / "x", ARRAYS)
    (tmp_path / "sub").mkdir()
    text = (tmp_path / "x.json").read_text()
    (tmp_path / "sub/x.json").write_text(text.replace('"x-a.npy"', '"../x-a.npy"'))
    assert load_arrays(tmp_path / "sub/x") is None


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    """After a failed write there is no temporary file, and the set does not exist."""

    def fail(file, values, **_):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", fail)
    with pytest.raises(DataError, match="cannot write"):
        store_arrays(tmp_path / "x", ARRAYS)
    assert list(tmp_path.iterdir()) == []
