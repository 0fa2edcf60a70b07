"""Descriptions of DeepSpeed's checkpoints: without reading their tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
from checksums import require_late_checksums, require_no_checksums
from deepspeed_files import Layout, write
from megatron_models import trained

from lmcore_deepspeed.checkpoint.write import write_deepspeed

KINDS = ("zero 1", "zero 3", "layers", "universal")


def written(kind: str, path: Path) -> Path:
    """Write a checkpoint of one kind."""
    path.mkdir()
    if kind == "universal":
        write_deepspeed(trained(), path, None)
    else:
        layout = Layout(1, 1) if kind == "layers" else Layout(zero=int(kind[-1]), data=2)
        write(trained(), path, layout)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_no_checksums_are_compared(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shape, step and the list of tensors need no more than the indexes of the files."""
    path = written(kind, tmp_path / "in")
    require_no_checksums(path, monkeypatch, optimizer=kind != "layers")


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_weight_is_found_when_it_is_loaded(kind: str, tmp_path: Path) -> None:
    """It is described as if it were intact, and no run begins with it."""
    require_late_checksums(written(kind, tmp_path / "in"))
