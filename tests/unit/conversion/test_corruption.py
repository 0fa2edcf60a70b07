"""Damage from a seed to checkpoints of other programs: a clear error or tensors of the right form.

These formats have no checksums, so that a changed value of a weight cannot be seen.
"""

from __future__ import annotations

import os
import pickle
import random
import re
import shutil
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from damage import TO_A_FILE, time_limit
from model_states import GPT2, RandomState

from lmcore.base.errors import CheckpointError, LmcoreError
from lmcore.conversion.foreign_pickle.load import load_tensors
from lmcore.conversion.formats import WriteOptions, read_state, write_state
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.model.checkpoint_format import formats

OTHERS = [name for name in formats() if name != "lmcore"]


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
    write_state(formats()[name], RandomState(GPT2), pristine, ByteTokenizer(), WriteOptions())
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
    write_state(formats()[name], RandomState(GPT2), tmp_path, ByteTokenizer(), WriteOptions())
    largest = max(
        (path for path in tmp_path.rglob("*") if path.is_file()), key=lambda one: one.stat().st_size
    )
    largest.unlink()
    os.mkfifo(largest)
    with time_limit(), pytest.raises(LmcoreError, match=re.escape(str(tmp_path))):
        read_state(tmp_path, name)


@pytest.mark.parametrize(
    "content, why",
    [
        (b"hello", "it begins with the text `hello`"),
        (b"some text\nof two lines\n", "it begins with the text `some text`"),
        (b"\n", "it begins with the bytes `0a`"),
        (pickle.dumps({"a": 1}), "it begins with the bytes `80 04 95"),
        (b"version https://git-lfs.github.com/spec/v1\n", "it is a pointer of Git LFS"),
    ],
    ids=["word", "text", "empty line", "pickle", "lfs"],
)
def test_another_file_in_the_place_of_tensors(content: bytes, why: str, tmp_path: Path) -> None:
    """It is named with what it has and what it should have; nothing of it is run."""
    path = tmp_path / "model_optim_rng.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model_optim_rng\.pt` is not a file of") as caught:
        load_tensors(path)
    assert str(caught.value.why).startswith(why)
    assert caught.value.hint


def test_another_archive_in_the_place_of_tensors(tmp_path: Path) -> None:
    """A zip archive of another program is refused; the older format of torch is none."""
    path = tmp_path / "model_optim_rng.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "a")
    with pytest.raises(CheckpointError, match="is not a file of") as caught:
        load_tensors(path)
    assert caught.value.why == "it is a zip archive without `data.pkl`"
    torch.save([1, 2], path, _use_new_zipfile_serialization=False)
    assert load_tensors(path) == [1, 2]


def test_a_named_pipe_in_the_place_of_a_file(tmp_path: Path) -> None:
    """It is refused at once: nobody writes to it, and nothing waits for that."""
    path = tmp_path / "model.pt"
    os.mkfifo(path)
    with time_limit(), pytest.raises(CheckpointError, match="cannot read") as caught:
        load_tensors(path)
    assert caught.value.why == "it is a named pipe, not a file"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(4, device="meta"),
        torch.eye(4).to_sparse(),
        torch.ones(1).expand(10**6, 10**6),
    ],
    ids=["meta", "sparse", "repeated"],
)
def test_a_tensor_without_its_values(tensor: torch.Tensor, tmp_path: Path) -> None:
    """No reader gets it, wherever in the file it is; a small view that repeats values is one."""
    path = tmp_path / "model.pt"
    repeated = torch.ones(1).expand(8)
    content = {"model": [("a", {"b": tensor})], "position": repeated}
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="is damaged") as caught:
        load_tensors(path)
    assert f"it lacks values of a tensor {list(tensor.shape)}" in str(caught.value.why)
    torch.save({"position": repeated}, path)
    assert torch.equal(load_tensors(path)["position"], repeated)
