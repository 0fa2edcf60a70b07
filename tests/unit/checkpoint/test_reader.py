"""Tests of reading and saving tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from lmcore.base.errors import CheckpointError
from lmcore.checkpoint import (
    CheckpointReader,
    TensorEntry,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
    save_streamed,
    verify_checkpoint,
)
from lmcore.checkpoint import save as save_module
from lmcore.checkpoint import write_plan as write_plans


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert as_bytes(found[name]) == as_bytes(tensor), name


def test_each_tensor_is_read_bit_by_bit(saved: Path, tensors: dict[str, torch.Tensor]) -> None:
    reader = CheckpointReader(saved)
    same({name: reader.read(name) for name in reader.manifest.tensors}, tensors)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_streamed_save_equals_a_save(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    monkeypatch.setattr(write_plans, "_LARGEST_BYTES", 1000)  # several chunks of a tensor
    monkeypatch.setattr(save_module, "_num_threads", lambda size, at_most: num_threads)
    reader = CheckpointReader(saved)
    order = list(reader.manifest.tensors)[::-1]
    read = []

    def of(name: str) -> torch.Tensor:
        read.append(name)
        return reader.read(name)

    entries = {name: reader.manifest.tensors[name] for name in order}
    copy = save_streamed(
        tmp_path / "copy", 100, entries, of, reader.manifest.meta, model_shape={"hidden_size": 4}
    )
    assert read == order if num_threads == 1 else sorted(read) == sorted(order)
    assert len(list(copy.glob("*.distcp"))) == num_threads
    assert verify_checkpoint(copy) == []
    again = CheckpointReader(copy)
    expected = {name: reader.read(name) for name in order}
    same({name: again.read(name) for name in order}, expected)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    assert load_checkpoint(copy, loaded).meta == read_manifest(saved).meta
    same(loaded, expected)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_failure_while_reading_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    monkeypatch.setattr(save_module, "_num_threads", lambda size, at_most: num_threads)

    def broken(name: str) -> torch.Tensor:
        raise CheckpointError(f"`{name}` is damaged")

    entry = TensorEntry("float32", (3,))
    with pytest.raises(CheckpointError, match="`w` is damaged"):
        save_streamed(tmp_path, 1, {"w": entry}, broken, {}, model_shape={})
    with pytest.raises(ValueError, match="`w` is"):
        save_streamed(tmp_path, 1, {"w": entry}, lambda _: torch.zeros(4), {}, model_shape={})
    names = [f"w{number}" for number in range(20)]
    begun = []

    def broken_at_once(name: str) -> torch.Tensor:
        begun.append(name)
        return broken(name)

    with pytest.raises(CheckpointError, match="is damaged"):
        save_streamed(
            *(tmp_path, 1, dict.fromkeys(names, entry), broken_at_once, {}), model_shape={}
        )
    assert len(begun) <= num_threads, "the other thread went on after the failure"
    assert list(tmp_path.iterdir()) == []


def test_a_missing_tensor_and_a_short_file_are_named(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, 1, {"model.weight": torch.ones(3)}, {}, model_shape={})
    with pytest.raises(CheckpointError, match=r"no tensor `model\.wieght`") as caught:
        CheckpointReader(saved).read("model.wieght")
    assert "model.weight" in str(caught.value.hint)
    (saved / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is not complete"):
        CheckpointReader(saved)
