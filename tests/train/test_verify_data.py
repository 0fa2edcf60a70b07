"""`--verify-data`: all blocks of the datasets are compared with their checksums."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from lmcore.data.indexed.checksums import DatasetChecksums
from lmcore.data.indexed.metadata import read_metadata


def test_a_block_outside_the_sample(
    train: Any, data_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flipped bit that no sampled block has is found by the option, before the first step."""
    for suffix in (".bin", ".idx", ".meta.json"):
        shutil.copy(data_prefix + suffix, tmp_path / f"text{suffix}")
    metadata = read_metadata(str(tmp_path / "text"))
    assert metadata is not None
    assert metadata.checksums is not None
    path = tmp_path / "text.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    monkeypatch.setattr(DatasetChecksums, "sample", lambda self: [])
    flags = f"--train-iters 2 --data-path {tmp_path / 'text'}"
    assert train("unseen", flags).status == 0
    run = train("found", f"{flags} --verify-data")
    assert run.status == 1
    assert "text.bin" in run.err
    assert "Traceback" not in run.err
    assert not (run.directory / "metrics.jsonl").exists()
    assert train("whole", f"--train-iters 2 --data-path {data_prefix} --verify-data").status == 0
