"""Runs with a byte tokenizer, of a model with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lmcore.conversion.native.write import write_lmcore
from lmcore.conversion.state import ModelState
from lmcore.data.tokenizer import ByteTokenizer


@pytest.fixture
def run_of(tmp_path: Path) -> Callable[[ModelState], Path]:
    """Function that writes a state as a run directory with the byte tokenizer."""

    def write(state: ModelState) -> Path:
        directory = tmp_path / "run"
        write_lmcore(state, directory, ByteTokenizer())
        return directory

    return write
