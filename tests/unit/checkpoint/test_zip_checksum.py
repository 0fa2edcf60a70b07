"""Checksums in torch's files: right, wrong, and left out."""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch

from lmcore.checkpoint.zip_checksum import damaged_record


def record_of(path: Path) -> str | None:
    with zipfile.ZipFile(path) as archive:
        return damaged_record(archive)


def test_a_changed_weight_is_found(tmp_path: Path) -> None:
    """One bit of a tensor is enough; an intact file has no damaged record."""
    path = tmp_path / "weights.pt"
    torch.save({"a": torch.arange(1000.0), "b": torch.arange(1000.0)}, path)
    assert record_of(path) is None
    content = bytearray(path.read_bytes())
    value = torch.tensor(999.0).numpy().tobytes()
    content[content.rindex(value)] ^= 1
    path.write_bytes(content)
    assert record_of(path) == "weights/data/1"


def test_files_without_checksums(tmp_path: Path) -> None:
    """Torch can omit checksums; such a file is not refused."""
    torch.serialization.set_crc32_options(compute_crc32=False)
    try:
        torch.save({"a": torch.arange(10.0)}, tmp_path / "weights.pt")
    finally:
        torch.serialization.set_crc32_options(compute_crc32=True)
    assert record_of(tmp_path / "weights.pt") is None
