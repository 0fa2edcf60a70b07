"""Files of `torch.save` on a disk that refuses."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from damage import largest_file
from megatron_models import GPT, MemoryState

from lmcore.conversion.megatron.rank_files.write import write_megatron
from lmcore.conversion.torch_file import save_file


@pytest.mark.parametrize("elements", [64, 200_000], ids=["end", "tensor"])
def test_a_refused_write_is_an_error_of_the_system(elements: int, tmp_path: Path) -> None:
    """Its cause is not lost if torch fails again when it ends the file."""
    with largest_file(500), pytest.raises(OSError, match="too large") as caught:
        save_file({"a": torch.ones(elements)}, tmp_path / "a.pt")
    assert caught.value.errno == errno.EFBIG


def test_a_writer_reports_it(tmp_path: Path) -> None:
    """Files of ranks are written so."""
    with largest_file(500), pytest.raises(OSError, match="too large"):
        write_megatron(MemoryState(GPT, optimizer=True), tmp_path / "out", None)


def test_other_failures_stay(tmp_path: Path) -> None:
    with pytest.raises(AttributeError):
        save_file({"a": lambda: None}, tmp_path / "a.pt")
    save_file({"a": torch.ones(2)}, tmp_path / "b.pt")
    assert torch.load(tmp_path / "b.pt")["a"].tolist() == [1, 1]
