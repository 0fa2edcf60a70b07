"""Checks that a checkpoint is described without its checksums, which are compared on loading."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from megatron_models import GPT, trained

from lmcore.base.errors import CheckpointError
from lmcore.checkpoint import dcp_reader
from lmcore.conversion.foreign_pickle import load as foreign_pickle
from lmcore.conversion.loading.foreign_model import describe
from lmcore.conversion.loading.weights import WeightReader
from lmcore.conversion.tensors.content import content_of
from lmcore.model.checkpoint_format import format_of


def require_no_checksums(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, optimizer: bool = True
) -> None:
    """Require that a description of a checkpoint of `trained` compares no checksums of tensors.

    Args:
        path: Directory of the checkpoint.
        monkeypatch: Fixture of that name.
        optimizer: True if it has the optimizer's state.
    """
    name = format_of(path)
    assert name is not None

    compared: list[str] = []

    def compare(archive: zipfile.ZipFile) -> None:
        # Files of settings alone are small, and are compared.
        records = [one for one in archive.infolist() if "/data/" in one.filename]
        compared.extend(one.filename for one in records if one.file_size > 50)

    for module in (foreign_pickle, dcp_reader):
        monkeypatch.setattr(module, "damaged_record", compare)
    found = describe(str(path), name)
    assert found["shape"] == GPT.to_dict()
    assert found["step"] == 7
    assert (found["meta"] is not None) == optimizer
    content = content_of(path)
    kinds = 3 if optimizer else 1
    assert len(content.tensors) == len(trained().parameters) * kinds
    assert not compared
    read = content_of(path, verify=True)
    for stored in read.tensors:
        read.read(stored)
    assert compared


def require_late_checksums(path: Path) -> None:
    """Damage a weight in a checkpoint of `trained`, and require that loading finds it."""
    weight, damaged = trained().read("final_norm.weight")[:8], 0  # ZeRO-3's share of two ranks
    marked = weight.numpy().tobytes()
    half = weight.bfloat16().view(torch.uint8).numpy().tobytes()
    for file in (file for file in path.rglob("*") if file.is_file()):
        content = file.read_bytes()
        for values in (marked, half):
            if (place := content.find(values)) >= 0:
                content = content[:place] + bytes([values[0] ^ 1]) + content[place + 1 :]
                damaged += 1
        file.write_bytes(content)
    assert damaged
    name = format_of(path)
    assert name is not None
    assert "error" not in describe(str(path), name)
    with pytest.raises(CheckpointError, match=r"is damaged|is not stored") as caught:
        WeightReader(path).read("final_norm.weight")
    assert "checksum" in str(caught.value.why)
