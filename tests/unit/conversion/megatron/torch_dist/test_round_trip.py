"""`torch_dist`: round trips, files that torch itself wrote, and bad files."""

from __future__ import annotations

import argparse
import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from damage import time_limit
from megatron_models import BIASED_LLAMA, GPT, LLAMA, MemoryState, assert_same

from lmcore.base.errors import CheckpointError
from lmcore.conversion.formats import read_state
from lmcore.conversion.megatron.directory import is_megatron, is_megatron_dist
from lmcore.conversion.megatron.optimizer.groups import group_values
from lmcore.conversion.megatron.parameters.layout import Layout
from lmcore.conversion.megatron.parameters.names import foreign_name
from lmcore.conversion.megatron.parameters.packing import Packing
from lmcore.conversion.megatron.run.written_arguments import architecture_arguments
from lmcore.conversion.megatron.torch_dist.read import DistributedState
from lmcore.conversion.megatron.torch_dist.write import write_distributed
from lmcore.conversion.state import ADAM, WEIGHT, Progress
from lmcore.model.shape import ModelShape

# torch says that it saves in one process.
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # in torch 2.8 itself
]

KINDS = {WEIGHT: ""} | {kind: f"optimizer.state.{kind}." for kind in ADAM}


@pytest.mark.parametrize("shape", [GPT, LLAMA, BIASED_LLAMA], ids=["gpt", "llama", "biased"])
def test_round_trip(shape: ModelShape, tmp_path: Path) -> None:
    """Weights come back bit by bit, with step and samples."""
    progress = Progress(7, 70)
    state = MemoryState(shape, progress=progress, vocab_size=23)
    write_distributed(state, tmp_path, None, layout=Layout(2, 2))
    assert is_megatron_dist(tmp_path)
    assert not is_megatron(tmp_path)
    found = DistributedState(tmp_path)
    assert_same(found, state)
    assert (found.progress, found.vocab_size) == (progress, 23)


@pytest.mark.parametrize("each", [False, True], ids=["steps of groups", "of parameters"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_round_trip_of_adam(
    shape: ModelShape, dtype: torch.dtype, each: bool, tmp_path: Path
) -> None:
    """Main parameters and moments come back bit by bit, with the updates and settings."""
    adam = {"beta1": 0.85, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.2}
    state = MemoryState(shape, optimizer=True, progress=Progress(7, 70, 6, adam=adam))
    write_distributed(state, tmp_path, None, dtype=dtype, style="core-local" if each else "core")
    found = DistributedState(tmp_path)
    assert_same(found, state)
    assert found.progress == state.progress


def test_names_of_main_parameters(tmp_path: Path) -> None:
    """The names of the plain and of the distributed optimizer give the same values, in float32."""
    state = MemoryState(GPT, optimizer=True, progress=Progress(7, 70))
    write_distributed(state, tmp_path, None, dtype=torch.bfloat16)
    foreign = "decoder.final_layernorm.weight"
    for kind in ("fp32_param", "param"):
        loaded = {f"optimizer.state.{kind}.{foreign}": torch.empty(16)}
        dcp.load(loaded, checkpoint_id=tmp_path / "iter_0000007", no_dist=True)
        assert torch.equal(*loaded.values(), state.read("final_norm.weight"))
    content = torch.load(tmp_path / "iter_0000007" / "common.pt", weights_only=False)
    assert content["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"


def test_half_precision(tmp_path: Path) -> None:
    """Weights can be written in bfloat16; torch reads the files as its own."""
    state = MemoryState(GPT, progress=Progress(7, 70))
    write_distributed(state, tmp_path, None, dtype=torch.bfloat16)
    found = DistributedState(tmp_path)
    assert found.dtype("final_norm.weight") == torch.bfloat16
    name = "decoder.layers.mlp.linear_fc2.weight"
    loaded = {name: torch.empty(4, 16, 24, dtype=torch.bfloat16)}
    dcp.load(loaded, checkpoint_id=tmp_path / "iter_0000007", no_dist=True)
    for layer in range(4):
        expected = state.read(f"blocks.{layer}.feed_forward.down.weight").bfloat16()
        assert torch.equal(loaded[name][layer], expected)
        assert torch.equal(found.read(f"blocks.{layer}.feed_forward.down.weight"), expected)


def saved_by_torch(
    directory: Path,
    state: MemoryState,
    *,
    half: bool = False,
    by_layer: bool = False,
    **changes: Any,
) -> None:
    """Save *state* with torch's own writer under Megatron's names."""
    shape = state.shape
    packing = Packing(shape, 1)
    tensors: dict[str, Any] = {}
    layers: dict[str, list[torch.Tensor]] = {}
    for name in state.parameters:
        for kind, prefix in KINDS.items():
            (tensor,) = packing.split(name, state.read(name, kind))
            foreign = foreign_name(name, "core")
            held = {prefix + foreign: tensor}
            if half and kind == WEIGHT:
                held = {foreign: tensor.bfloat16(), f"optimizer.state.fp32_param.{foreign}": tensor}
            for stored, one in held.items():
                before, _, rest = stored.partition("decoder.layers.")
                if not rest or by_layer:
                    tensors[stored] = one.contiguous()
                else:
                    inside = rest.partition(".")[2]
                    layers.setdefault(f"{before}decoder.layers.{inside}", []).append(one)
    tensors |= {name: torch.stack(one) for name, one in layers.items()}
    tensors |= {"rng_state": torch.zeros(3), "decoder.layers.mlp.linear_fc1._extra_state": [None]}
    tensors |= changes
    dcp.save(tensors, checkpoint_id=directory, no_dist=True)
    groups = [{"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 5}]
    args = argparse.Namespace(**architecture_arguments(shape), consumed_train_samples=12)
    content = {"args": args, "iteration": 5, "optimizer": {"optimizer": {"param_groups": groups}}}
    torch.save(content, directory / "common.pt")
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("by_layer", [False, True], ids=["stacked", "by layer"])
def test_the_state_of_adam(half: bool, by_layer: bool, tmp_path: Path) -> None:
    """Moments and float32 parameters are read under their names, step and settings from groups."""
    state = MemoryState(LLAMA, optimizer=True)
    saved_by_torch(tmp_path, state, half=half, by_layer=by_layer)
    found = DistributedState(tmp_path)
    assert_same(found, state)
    settings = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    assert found.progress == Progress(5, 12, 5, adam=settings)


def test_main_parameters_that_do_not_fit(tmp_path: Path) -> None:
    """A main parameter that does not round to its weight is refused, not read."""
    state = MemoryState(GPT, optimizer=True)
    key = "optimizer.state.fp32_param.embedding.word_embeddings.weight"
    shifted = state.read("token_embedding.weight").roll(4)
    saved_by_torch(tmp_path, state, half=True, **{key: shifted})
    found = DistributedState(tmp_path)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        found.read("token_embedding.weight")


def test_a_distributed_state_that_is_not_read(tmp_path: Path) -> None:
    """Flattened moments are left out with a note."""
    state = MemoryState(GPT, optimizer=True)
    moments = {
        f"{KINDS[kind]}{foreign_name('final_norm.weight', 'core')}": torch.zeros(1, 1, 16)
        for kind in ADAM
    }
    saved_by_torch(tmp_path, state, **moments)
    found = DistributedState(tmp_path)
    assert found.kinds == (WEIGHT,)
    assert "saved in pieces of parameters" in found.notes[0]


def test_an_optimizer_that_contains_itself(tmp_path: Path) -> None:
    """It gives no number of updates and no settings, and is not followed without end."""
    inner: dict[str, Any] = {}
    inner["optimizer"] = inner
    with time_limit():
        assert group_values(inner) == (None, {})
    known = {"param_groups": [{"step": 3}]}
    assert group_values({"optimizer": {"optimizer": known}})[0] == 3


def refusal(tmp_path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        DistributedState(tmp_path)
    return f"{caught.value} {caught.value.why}"


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    """Surplus ones, other shapes and other dtypes are listed, and missing moments."""
    state = MemoryState(GPT, optimizer=True)
    saved_by_torch(
        tmp_path,
        state,
        **{
            "decoder.layers.mlp.router.weight": torch.zeros(4, 2),
            "decoder.final_layernorm.weight": torch.zeros(3),
            "decoder.final_layernorm.bias": torch.zeros(16, dtype=torch.int8),
        },
    )
    text = refusal(tmp_path)
    assert "`decoder.layers.mlp.router.weight` is surplus" in text
    assert "`decoder.final_layernorm.weight` has shape [3] instead of [16]" in text
    assert "`decoder.final_layernorm.bias` has dtype int8" in text


def test_missing_layers(tmp_path: Path) -> None:
    """Arguments with more layers than the stack are refused."""
    state = MemoryState(GPT, optimizer=True)
    saved_by_torch(tmp_path, state)
    content = torch.load(tmp_path / "common.pt", weights_only=False)
    content["args"].num_layers = 5
    torch.save(content, tmp_path / "common.pt")
    assert "has shape [4, 16] instead of [5, 16]" in refusal(tmp_path)
    del content["args"]
    torch.save(content, tmp_path / "common.pt")
    assert "lacks the arguments" in refusal(tmp_path)


class Evil:
    """Object that runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch evil",)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_code_is_refused(name: str, tmp_path: Path) -> None:
    """Neither pickle runs code."""
    write_distributed(MemoryState(GPT), tmp_path, None)
    path = tmp_path / "release" / name
    if name == ".metadata":
        stream = io.BytesIO()
        pickle.dump(Evil(), stream, protocol=2)
        path.write_bytes(stream.getvalue())
    else:
        torch.save({"args": Evil()}, path)
    assert "system" in refusal(tmp_path)
    assert not Path("evil").exists()


@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp"])
def test_truncated_files(name: str, tmp_path: Path) -> None:
    """A file that is cut off is an error, when it is opened or when it is read."""
    write_distributed(MemoryState(GPT), tmp_path, None)
    path = tmp_path / "release" / name
    path.write_bytes(path.read_bytes()[:-50])
    assert str(tmp_path) in refusal(tmp_path)


def test_missing_files_are_listed(tmp_path: Path) -> None:
    """A file of one rank that was not copied is named, and nothing else of the index."""
    write_distributed(MemoryState(GPT), tmp_path, None)
    [path] = tmp_path.rglob("__0_0.distcp")
    path.unlink()
    with pytest.raises(CheckpointError, match="is not complete") as caught:
        DistributedState(tmp_path)
    assert caught.value.why == "its index names 1 file that is missing: `__0_0.distcp`"


@pytest.mark.parametrize("name", [".metadata", "common.pt", "metadata.json"])
@pytest.mark.parametrize("tracker", [True, False], ids=["tracker", "no tracker"])
def test_a_checkpoint_without_one_of_its_files(name: str, tracker: bool, tmp_path: Path) -> None:
    """The missing file is named, although the format is not recognized without it."""
    write_distributed(MemoryState(GPT, progress=Progress(3, 24)), tmp_path, None)
    (tmp_path / "iter_0000003" / name).unlink()
    if not tracker:
        (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    for path in (tmp_path, tmp_path / "iter_0000003"):
        with pytest.raises(CheckpointError, match="is not complete") as caught:
            read_state(path)
        assert f"lacks `{name}`" in str(caught.value.why)


@pytest.mark.parametrize("content", ["", "some text", "{}"], ids=["empty", "text", "object"])
def test_damaged_descriptions_are_named(content: str, tmp_path: Path) -> None:
    """The file that names the format, and the index of the tensors, are damaged, not missing."""
    write_distributed(MemoryState(GPT, progress=Progress(3, 24)), tmp_path, None)
    path = tmp_path / "iter_0000003" / "metadata.json"
    whole = path.read_bytes()
    path.write_text(content)
    with pytest.raises(CheckpointError, match=r"metadata\.json` is damaged") as caught:
        read_state(tmp_path)
    assert f"it is {'something else' if content else 'empty'} instead" in str(caught.value.why)
    path.write_bytes(whole)
    (tmp_path / "iter_0000003" / ".metadata").write_text(content)
    with pytest.raises(CheckpointError, match=r"\.metadata` is damaged") as caught:
        read_state(tmp_path)
    assert f"it is {'another file' if content else 'empty'} instead" in str(caught.value.why)


def test_another_backend_is_named(tmp_path: Path) -> None:
    """Megatron's other distributed formats are not read."""
    write_distributed(MemoryState(GPT, progress=Progress(3, 24)), tmp_path, None)
    path = tmp_path / "iter_0000003" / "metadata.json"
    path.write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(CheckpointError, match="has a format that is not read") as caught:
        read_state(tmp_path)
    assert "`zarr`" in str(caught.value.why)
    assert "`--ckpt-format torch_dist`" in str(caught.value.hint)
