"""State of Adam that the distributed optimizer gathered in `torch_dist`, and damaged ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_buckets import KEYS, SETTINGS, buckets_of, save
from megatron_models import GPT, LLAMA, MemoryState, assert_same

from lmcore.base.errors import CheckpointError
from lmcore.conversion.formats import read_state
from lmcore.conversion.megatron.parameters.layout import Layout
from lmcore.conversion.megatron.torch_dist.read import DistributedState
from lmcore.conversion.state import WEIGHT, Progress
from lmcore.model.shape import ModelShape

# torch says that it saves in one process.
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # in torch 2.8 itself
]

NAME = "optimizer.distributed.dp_group_idx_{}.param_state/shard_0_1"


@pytest.mark.parametrize("limit", [10**9, 900], ids=["one bucket", "buckets"])
@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_buffers(
    shape: ModelShape, layout: tuple[int, int, int], limit: int, tmp_path: Path
) -> None:
    """Main parameters and moments are read bit by bit, with the updates and settings."""
    state = MemoryState(shape, optimizer=True)
    save(tmp_path, state, Layout(*layout), limit=limit, gathered=True)
    found = DistributedState(tmp_path)
    assert_same(found, state)
    assert found.progress == Progress(5, 12, 5, adam=SETTINGS)
    assert found.dtype("final_norm.weight", "exp_avg") == torch.float32


def test_order_of_local_layers(tmp_path: Path) -> None:
    """The weights decide the order of a layer's parameters, if the arguments are wrong."""
    state = MemoryState(GPT, optimizer=True)
    save(tmp_path, state, Layout(1, 2), style="core-local", gathered=True)
    content = torch.load(tmp_path / "common.pt", weights_only=False)
    content["args"].transformer_impl = "transformer_engine"
    torch.save(content, tmp_path / "common.pt")
    assert_same(DistributedState(tmp_path), state)


def objects() -> dict[Any, Any]:
    """Return the object of a model in one process."""
    parameters = Layout().parameters(GPT, 0, 0, "core")
    (vectors,) = buckets_of(parameters, MemoryState(GPT, optimizer=True), Layout(), 0, 10**9)
    return {"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): vectors}}


def shortened(content: dict[Any, Any]) -> None:
    """Remove elements of all vectors."""
    for vectors in content[0].values():
        vectors |= {key: vectors[key][:-700] for key in KEYS}


def without_a_moment(content: dict[Any, Any]) -> None:
    """Remove a moment."""
    for vectors in content[0].values():
        del vectors["exp_avg_sq"]


def with_another_size(content: dict[Any, Any]) -> None:
    """Remove elements of a moment."""
    for vectors in content[0].values():
        vectors["exp_avg"] = vectors["exp_avg"][:-7]


@pytest.mark.parametrize("change", [shortened, without_a_moment, with_another_size])
def test_buffers_that_do_not_fit(change: Callable[[dict[Any, Any]], None], tmp_path: Path) -> None:
    """They are refused, with the way to read the weights alone."""
    content = objects()
    change(content)
    state = MemoryState(GPT, optimizer=True)
    save(tmp_path, state, Layout(), gathered=True, **{NAME.format(0): [content]})
    with pytest.raises(CheckpointError, match="does not fit the model") as caught:
        DistributedState(tmp_path)
    assert "--weights-only" in str(caught.value.hint)
    found = read_state(tmp_path, weights_only=True)
    assert (found.kinds, found.progress) == ((WEIGHT,), Progress(5, 12))


def test_a_missing_rank(tmp_path: Path) -> None:
    """The model-parallel ranks that are there are named."""
    state = MemoryState(GPT, optimizer=True)
    save(tmp_path, state, Layout(1, 2), gathered=True, **{NAME.format(0): None})
    with pytest.raises(CheckpointError, match="does not fit the model") as caught:
        DistributedState(tmp_path)
    assert "the model-parallel ranks [1] only" in str(caught.value.why)


@pytest.mark.parametrize(
    "content, why",
    [
        ({0: {}}, "it was distributed by a version of Megatron before 2024"),
        ({"buckets_coalesced": True, 0: {}}, "it has several buffers for one part of the model"),
    ],
    ids=["older", "buffers"],
)
def test_other_forms(content: dict[Any, Any], why: str, tmp_path: Path) -> None:
    """The weights are read, and a note has the reason."""
    save(
        tmp_path,
        MemoryState(GPT, optimizer=True),
        Layout(),
        gathered=True,
        **{NAME.format(0): [content]},
    )
    found = DistributedState(tmp_path)
    assert found.kinds == (WEIGHT,)
    assert f"the state of its optimizer is not read: {why}" in found.notes


def test_main_parameters_that_are_not_the_models(tmp_path: Path) -> None:
    """The error names the tensor."""
    state, other = MemoryState(GPT, optimizer=True), objects()
    for vectors in other[0].values():
        vectors["param"][-1] += 1.0  # the token embedding, which is the last one
    save(tmp_path, state, Layout(), gathered=True, **{NAME.format(0): [other]})
    found = DistributedState(tmp_path)
    with pytest.raises(CheckpointError, match="does not fit the model") as caught:
        found.read("token_embedding.weight")
    assert "`token_embedding.weight`" in str(caught.value.why)
