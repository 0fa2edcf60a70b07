"""Damage from a seed to checkpoints of other programs: a clear error or tensors of the right form.

These formats have no checksums, so that a changed value of a weight cannot be seen.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from damage import TO_A_FILE, time_limit
from model_states import GPT2, RandomState

from lmcore.conversion.foreign_pickle import load_tensors
from lmcore.conversion.formats import FORMATS, WriteOptions, read_state
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.errors import CheckpointError, LmcoreError

OTHERS = [name for name in FORMATS if name != "lmcore"]


def outcome(directory: Path, name: str) -> str:
    """Read every tensor as a conversion does, and return the result."""
    try:
        with time_limit():
            state = read_state(directory, name)
            for kind in state.kinds:
                for parameter, shape in state.parameters.items():
                    assert tuple(state.read(parameter, kind).shape) == shape
    except LmcoreError as error:
        return "refused" if str(directory) in error.render() else f"refused: {error.render()}"
    return "read"


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("count", [36, pytest.param(300, marks=pytest.mark.full)])
def test_damage_from_a_seed(tmp_path: Path, name: str, count: int) -> None:
    pristine, directory = tmp_path / "pristine", tmp_path / "damaged"
    pristine.mkdir()
    FORMATS[name].write(RandomState(GPT2), pristine, ByteTokenizer(), WriteOptions())
    draw = random.Random(count)
    files = sorted(path.relative_to(pristine) for path in pristine.rglob("*") if path.is_file())
    needed = [path for path in files if path.suffix in {".safetensors", ".pt"}]
    outcomes: Counter[str] = Counter()
    for number in range(count):
        damage = TO_A_FILE[number % len(TO_A_FILE)]
        shutil.copytree(pristine, directory)
        path = draw.choice(files if draw.random() < 0.5 else needed)
        if damage.__name__ == "exchanged" and len(list((directory / path).parent.iterdir())) < 2:
            shutil.rmtree(directory)
            continue
        damage(directory / path, draw)
        try:
            outcomes[outcome(directory, name)] += 1
        except BaseException as error:
            error.add_note(f"case {number}: {damage.__name__} of {path}")
            raise
        shutil.rmtree(directory)
    assert set(outcomes) == {"read", "refused"}, outcomes
    assert outcomes["refused"] > count // 4


@pytest.mark.parametrize("name", OTHERS)
def test_a_pipe_instead_of_a_file(name: str, tmp_path: Path) -> None:
    """Nobody writes to it: no file of weights is waited for."""
    FORMATS[name].write(RandomState(GPT2), tmp_path, ByteTokenizer(), WriteOptions())
    largest = max(
        (path for path in tmp_path.rglob("*") if path.is_file()), key=lambda one: one.stat().st_size
    )
    largest.unlink()
    os.mkfifo(largest)
    with time_limit(), pytest.raises(LmcoreError, match=re.escape(str(tmp_path))):
        read_state(tmp_path, name)


def test_a_named_pipe_in_the_place_of_a_file(tmp_path: Path) -> None:
    """It is refused at once: nobody writes to it, and nothing waits for that."""
    path = tmp_path / "model.pt"
    os.mkfifo(path)
    with time_limit(), pytest.raises(CheckpointError, match="cannot read") as caught:
        load_tensors(path)
    assert caught.value.why == "it is a named pipe, not a file"
