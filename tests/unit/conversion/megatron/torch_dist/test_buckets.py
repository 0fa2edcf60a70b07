"""Buckets of the distributed optimizer in `torch_dist`: by hand in many layouts, and damaged."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_buckets import KEYS, SETTINGS, buckets_of, save
from megatron_models import GPT, LLAMA, MemoryState, assert_same

from lmcore.base.errors import CheckpointError
from lmcore.conversion.convert import convert
from lmcore.conversion.formats import read_state
from lmcore.conversion.loading.weights import WeightReader
from lmcore.conversion.megatron.parameters.layout import Layout
from lmcore.conversion.megatron.torch_dist.read import DistributedState
from lmcore.conversion.native.read import LmcoreState
from lmcore.conversion.state import WEIGHT, Progress
from lmcore.model.shape import ModelShape

# torch says that it saves in one process.
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # in torch 2.8 itself
]


@pytest.mark.parametrize("limit", [10**9, 900], ids=["one bucket", "buckets"])
@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_buckets(
    shape: ModelShape, layout: tuple[int, int, int], limit: int, tmp_path: Path
) -> None:
    """Main parameters and moments are read bit by bit, with the updates and settings."""
    state = MemoryState(shape, optimizer=True)
    save(tmp_path, state, Layout(*layout), limit=limit)
    found = DistributedState(tmp_path)
    assert_same(found, state)
    assert found.progress == Progress(5, 12, 5, adam=SETTINGS)
    assert found.dtype("final_norm.weight", "exp_avg") == torch.float32


def test_loss_scale_beside_buckets(tmp_path: Path) -> None:
    """It is an object of each model-parallel rank, as the settings are."""
    scaler = {"scale": torch.tensor([512.0]), "growth_tracker": 3, "hysteresis_tracker": 2}
    key = "optimizer.distributed.dp_group_idx_0.grad_scaler/shard_0_1"
    state = MemoryState(GPT, optimizer=True)
    save(tmp_path, state, Layout(), dtype=torch.float16, **{key: [scaler]})
    found = DistributedState(tmp_path).progress
    assert found is not None
    assert found.loss_scale == {"value": 512.0, "good_steps": 3, "tolerance": 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_order_of_local_layers(dtype: torch.dtype, tmp_path: Path) -> None:
    """Layers of `--transformer-impl local` have another order, which the weights decide, too."""
    state = MemoryState(GPT, optimizer=True)
    save(tmp_path, state, Layout(1, 2), style="core-local", dtype=dtype)
    assert_same(DistributedState(tmp_path), state)
    content = torch.load(tmp_path / "common.pt", weights_only=False)
    content["args"].transformer_impl = "transformer_engine"
    torch.save(content, tmp_path / "common.pt")
    assert_same(DistributedState(tmp_path), state)


def test_uneven_stages(tmp_path: Path) -> None:
    """The layers of each stage are found by the sizes of its buckets."""
    state = MemoryState(dataclasses.replace(LLAMA, num_layers=3), optimizer=True)

    class Uneven(Layout):
        def layers(self, count: int, stage: int, part: int) -> range:
            return range(1) if stage == 0 else range(1, count)

    save(tmp_path, state, Uneven(1, 2), limit=500)
    assert_same(DistributedState(tmp_path), state)


BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)"


@pytest.mark.parametrize("change", ["size", "kind", "dtype", "dims", "ranks"])
def test_buckets_that_do_not_fit(change: str, tmp_path: Path) -> None:
    """Buckets of another model are refused, with the way to read the weights alone."""
    state = MemoryState(GPT, optimizer=True)
    name = f"{BUCKET}.bucket_idx_0"
    changes: dict[str, Any] = {
        "size": {f"{name}.{key}": torch.zeros(640) for key in KEYS},
        "kind": {f"{name}.exp_avg_sq": None},
        "dtype": {f"{name}.exp_avg": torch.zeros(3, dtype=torch.uint8)},
        "dims": {f"{name}.exp_avg": torch.zeros(3, 3)},
        "ranks": {f"{name.replace('idx_0', 'idx_7', 1)}.param": torch.zeros(3)},
    }
    save(tmp_path, state, Layout(), **changes[change])
    with pytest.raises(CheckpointError, match="does not fit the model") as caught:
        DistributedState(tmp_path)
    assert "--weights-only" in str(caught.value.hint)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_main_parameters_that_are_not_the_models(
    dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The error names the tensor; without the optimizer the model's own weights are read."""
    state, other = MemoryState(GPT, optimizer=True), MemoryState(GPT, optimizer=True)
    other.tensors["final_norm.bias", WEIGHT] = torch.full((16,), 7.0)
    parameters = Layout().parameters(GPT, 0, 0, "core")
    (vectors,) = buckets_of(parameters, other, Layout(), 0, 10**9)
    main = {f"{BUCKET}.bucket_idx_0.param": vectors["param"]}
    save(tmp_path / "in", state, Layout(), dtype=dtype, **main)
    found = DistributedState(tmp_path / "in")
    with pytest.raises(CheckpointError, match="does not fit the model") as caught:
        found.read("final_norm.bias")
    assert "`final_norm.bias`" in str(caught.value.why)
    assert "--weights-only" in str(caught.value.hint)
    done = convert(tmp_path / "in", tmp_path / "out", "lmcore", weights_only=True)
    assert not done.optimizer
    assert any("left out" in note for note in done.notes)
    back = LmcoreState(tmp_path / "out")
    assert back.kinds == (WEIGHT,)
    reader = WeightReader(tmp_path / "in")
    for name in state.parameters:
        rounded = state.read(name).to(dtype).float()
        assert torch.equal(back.read(name), rounded)
        assert torch.equal(reader.read(name).to(dtype).float(), rounded)
    assert "`final_norm.bias`" in caplog.text


def test_weights_only(tmp_path: Path) -> None:
    """Buckets of another model do not matter, nor does the optimizer's progress."""
    state = MemoryState(LLAMA, optimizer=True)
    save(tmp_path, state, Layout(), **{f"{BUCKET}.bucket_idx_0.exp_avg": torch.zeros(3)})
    found = read_state(tmp_path, weights_only=True)
    assert found.kinds == (WEIGHT,)
    assert found.progress == Progress(5, 12)
    assert found.dtype("final_norm.weight") == torch.bfloat16


def test_settings_that_name_code(tmp_path: Path) -> None:
    """The stored settings of the optimizer run no code."""
    state = MemoryState(GPT, optimizer=True)
    key = "optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1"
    # megatron-core, if it is loaded beside, lets torch load a namespace, but no fraction.
    save(tmp_path, state, Layout(), **{key: [Fraction(1, 2)]})
    with pytest.raises(CheckpointError, match="is refused"):
        DistributedState(tmp_path)
