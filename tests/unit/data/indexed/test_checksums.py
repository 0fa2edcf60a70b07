"""Tests of the checksums in `PREFIX.meta.json`: bits that change on a disk are found."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lmcore.base.errors import DataError
from lmcore.data.indexed import checksums as module
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.metadata import metadata_path, read_metadata, verify_files, write_metadata
from lmcore.data.prepare.plain_text import prepare_documents
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.data.tools.inspect import inspect
from lmcore.data.tools.merge import merge
from lmcore.data.tools.repair import RepairRequest, repair
from lmcore.data.tools.split import split_indexed

EVERY = (0, 1)


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A dataset of ten blocks of 4 KiB, and an index of 60 documents."""
    monkeypatch.setattr(module, "_BLOCK", 4096)
    texts = (f"{number:03}" * 110 for number in range(60))
    report = prepare_documents(texts, ByteTokenizer(), tmp_path / "a", source="test")
    return report.outputs[0].prefix


def flip(path: Path, at: int, bit: int = 1) -> None:
    """Change a bit of a file, and keep its times."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bit]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_all_blocks_are_recorded(prefix: str):
    """An undamaged dataset matches, and its two files are as without checksums."""
    found = read_metadata(prefix)
    assert found is not None
    assert found.checksums is not None
    assert (found.checksums.blocks, found.checksums.block_bytes) == (10, 4096)
    size = Path(f"{prefix}.bin").stat().st_size
    assert verify_files(prefix, EVERY) == size
    assert verify_files(prefix) == 4 * 4096


def test_a_document_index_that_still_rises(prefix: str):
    """A flip that the checks of the format cannot find is found at each open."""
    path = Path(f"{prefix}.idx")
    flip(path, path.stat().st_size - 8 * 30)  # the end of a document: one lower or higher
    with pytest.raises(DataError, match="is damaged") as caught:
        verify_files(prefix)
    assert str(path) in str(caught.value.why)


@pytest.mark.parametrize("seed", range(5))
def test_every_flip_of_the_tokens_is_found(prefix: str, seed: int):
    """With all blocks; the message names the bytes of the block."""
    rng = np.random.default_rng(seed)
    path = Path(f"{prefix}.bin")
    at = int(rng.integers(path.stat().st_size))
    flip(path, at, 1 << int(rng.integers(8)))
    with pytest.raises(DataError, match="is damaged") as caught:
        verify_files(prefix, EVERY)
    first = at // 4096 * 4096
    assert f"bytes {first} to" in str(caught.value.why)
    shares = []
    for number in range(3):  # three processes divide the blocks: one of them finds it
        try:
            verify_files(prefix, (number, 3))
        except DataError:
            shares.append(number)
    assert shares == [at // 4096 % 3]


def test_an_open_verifies_a_sample(prefix: str):
    """The first block, the last, and others at random: a flip is found sooner or later."""
    flip(Path(f"{prefix}.bin"), 5 * 4096)
    found = 0
    for _ in range(40):
        try:
            verify_files(prefix)
        except DataError:
            found += 1
    assert 0 < found < 40
    flip(Path(f"{prefix}.bin"), 0)
    with pytest.raises(DataError, match="is damaged"):
        verify_files(prefix)


def test_without_checksums(prefix: str):
    """Datasets of other tools, and of older versions, open as before."""
    made = read_metadata(prefix)
    assert made is not None
    write_metadata(prefix, replace(made, checksums=None))
    assert "checksums" not in json.loads(metadata_path(prefix).read_text())
    flip(Path(f"{prefix}.bin"), 0)
    assert verify_files(prefix, EVERY) is None
    metadata_path(prefix).unlink()
    assert verify_files(prefix) is None


@pytest.mark.parametrize("change", [{"bin_bytes": 3}, {"idx_crc32": "00000000"}, {"crc32": 1}])
def test_damaged_checksums_are_not_taken_for_damaged_data(prefix: str, change: dict):
    """The checksums have their own checksum."""
    values = json.loads(metadata_path(prefix).read_text())
    values["checksums"] |= change
    metadata_path(prefix).write_text(json.dumps(values))
    with pytest.raises(DataError, match=r"cannot read .*meta\.json"):
        verify_files(prefix)


def test_merge_and_split_write_checksums_and_hide_no_damage(prefix: str, tmp_path: Path):
    """Their output is verified like any other; damaged input is refused."""
    merge([prefix], f"{tmp_path}/b")
    assert verify_files(f"{tmp_path}/b", EVERY) is not None
    for file in split_indexed([prefix], f"{tmp_path}/part", samples=25).files:
        assert verify_files(file.prefix, EVERY) is not None
    flip(Path(f"{prefix}.bin"), 5 * 4096)
    with pytest.raises(DataError, match="is damaged"):
        merge([prefix], f"{tmp_path}/c")
    assert not Path(f"{tmp_path}/c.bin").exists()


def test_repair_of_a_missing_index(prefix: str):
    """The dataset opens afterwards, with the checksum of its new index."""
    Path(f"{prefix}.idx").unlink()
    repair(RepairRequest(prefix))
    IndexedDataset(prefix)
    assert verify_files(prefix, EVERY) is not None


def test_repair_of_a_flipped_index(prefix: str, tmp_path: Path):
    """An index that does not match its checksum is rebuilt; damaged tokens stay known as such."""
    flip(Path(f"{prefix}.idx"), Path(f"{prefix}.idx").stat().st_size - 8 * 30)
    flip(Path(f"{prefix}.bin"), 5 * 4096 + 2)
    report = repair(RepairRequest(prefix, output_prefix=f"{tmp_path}/new"))
    assert report.documents == 60
    assert any("cannot be repaired" in problem for problem in report.found)
    with pytest.raises(DataError, match=r"is damaged"):
        verify_files(f"{tmp_path}/new", EVERY)


def test_inspect(prefix: str):
    """The report says how many blocks were verified; `--scan` verifies all."""
    assert (inspect(prefix).blocks, inspect(prefix).verified) == (10, 4)
    assert inspect(prefix, scan=True).verified == 10
    flip(Path(f"{prefix}.bin"), 5 * 4096)
    problems = inspect(prefix, scan=True).problems
    assert any("bytes 20480 to 24575" in problem for problem in problems)
