"""The distributed optimizer's buffers: by hand, in several buckets, and damaged."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_models import GPT, LLAMA, MemoryState, assert_same

from lmcore.base.errors import CheckpointError
from lmcore.conversion.formats import read_state
from lmcore.conversion.megatron.parameters.layout import Layout
from lmcore.conversion.megatron.rank_files.read import MegatronState
from lmcore.conversion.megatron.rank_files.write import write_megatron
from lmcore.conversion.state import ADAM, WEIGHT, Progress

KEYS = {"param": WEIGHT, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
DTYPES = (torch.bfloat16, torch.float32)


def distribute(path: Path, parts: int, buckets: Sequence[int]) -> None:
    """Move the state of Adam of one rank to `distrib_optim.pt`, as Megatron does.

    *buckets* are the numbers of parameters of the first buckets; the last one has the others.
    """
    content = torch.load(path, weights_only=False)
    saved = content["optimizer"]
    held, mains = saved["optimizer"]["state"], list(chain(*saved["fp32_from_fp16_params"]))
    places: dict[bool, list[int]] = {True: [], False: []}
    keys = ["model"] if parts == 1 else [f"model{part}" for part in range(parts)]
    models = [list(content[key].values()) for key in keys]
    weights = list(chain(*models))
    for decays in (True, False):
        places[decays] = [i for i, one in enumerate(weights) if (one.ndim > 1) == decays]
    number_of = {place: i for i, place in enumerate(places[True] + places[False])}
    state: dict[Any, Any] = {"buckets_coalesced": True}
    first = 0
    for part, model in enumerate(models):
        order = [number_of[first + i] for i in range(len(model))][::-1]
        first += len(model)
        groups, rest = [], order
        for count in buckets:
            groups.append(rest[:count])
            rest = rest[count:]
        flat = {}
        for key, kind in KEYS.items():
            pieces: list[torch.Tensor] = []
            for group in [*groups, rest]:
                size = 0
                for i in group:
                    tensor = mains[i] if kind == WEIGHT else held[i][kind]
                    pieces += [torch.zeros(-size % 64), tensor.reshape(-1)]
                    size += -size % 64 + tensor.numel()
            flat[key] = torch.cat(pieces)
        state[part] = {DTYPES: {**flat, "numel_unpadded": flat["param"].numel()}}
    for group in saved["optimizer"]["param_groups"]:
        del group["params"]
    content["optimizer"] = {"optimizer": {"param_groups": saved["optimizer"]["param_groups"]}}
    torch.save(content, path)
    torch.save(state, path.with_name("distrib_optim.pt"))


def written(
    tmp_path: Path, layout: Layout, buckets: Sequence[int], shape: Any = GPT
) -> MemoryState:
    settings = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    progress = Progress(4, 32, 4, adam=settings)
    state = MemoryState(shape, optimizer=True, progress=progress)
    write_megatron(state, tmp_path, None, layout=layout, dtype=torch.bfloat16)
    for path in tmp_path.glob("iter_0000004/*/model_optim_rng.pt"):
        distribute(path, layout.virtual, buckets)
    return state


@pytest.mark.parametrize("buckets", [(), (3, 4, 1), (1, 1, 1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_buffers(
    shape: Any, layout: tuple[int, int, int], buckets: Sequence[int], tmp_path: Path
) -> None:
    """Parameters and moments are found whatever the buckets are."""
    state = written(tmp_path, Layout(*layout), buckets, shape)
    found = MegatronState(tmp_path)
    assert_same(found, state)
    assert found.progress == state.progress


def test_positions_by_hand(tmp_path: Path) -> None:
    """The last parameter comes first, and each begins at a multiple of 64."""
    state = written(tmp_path, Layout(), ())
    path = tmp_path / "iter_0000004/mp_rank_00/distrib_optim.pt"
    flat = torch.load(path, weights_only=False)[0][DTYPES]["exp_avg"]
    assert torch.equal(flat[:16], state.read("final_norm.bias", "exp_avg"))
    assert torch.equal(flat[64:80], state.read("final_norm.weight", "exp_avg"))
    assert torch.equal(flat[-384:].view(24, 16), state.read("token_embedding.weight", "exp_avg"))


@pytest.mark.parametrize("change", ["order", "size", "kind", "zeros"])
def test_buffers_that_do_not_fit(change: str, tmp_path: Path) -> None:
    """Other weights, another size and other values are refused."""
    written(tmp_path, Layout(), (5,))
    path = tmp_path / "iter_0000004/mp_rank_00/distrib_optim.pt"
    state = torch.load(path, weights_only=False)
    held = state[0][DTYPES]
    if change == "order":
        held["param"] = held["param"].flip(0)
    if change == "size":
        state[0][DTYPES] |= {key: held[key][:-64] for key in KEYS}
    if change == "kind":
        held["exp_avg"] = [held["exp_avg"]]
    if change == "zeros":
        held["param"] = torch.zeros_like(held["param"])
    torch.save(state, path)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        MegatronState(tmp_path)


@pytest.mark.parametrize("change", ["absent", "old", "several"])
def test_state_that_is_not_read(change: str, tmp_path: Path) -> None:
    """The weights are read without it, and a note gives the reason."""
    written(tmp_path, Layout(), ())
    path = tmp_path / "iter_0000004/mp_rank_00/distrib_optim.pt"
    state = torch.load(path, weights_only=False)
    if change == "old":
        del state["buckets_coalesced"]
    if change == "several":
        state[0][torch.float32] = state[0][DTYPES]
    torch.save(state, path)
    if change == "absent":
        path.unlink()
    found = MegatronState(tmp_path)
    assert found.kinds == (WEIGHT,)
    reasons = {"absent": "there is no `distrib_optim.pt`", "old": "before 2024"}
    assert reasons.get(change, "several buffers") in " ".join(found.notes)
    assert not set(ADAM) & set(found.kinds)


def test_weights_only(tmp_path: Path) -> None:
    """Buffers of other weights are an error; the model's own weights are read without them."""
    state = written(tmp_path, Layout(), ())
    path = tmp_path / "iter_0000004/mp_rank_00/distrib_optim.pt"
    content = torch.load(path, weights_only=False)
    content[0][DTYPES]["param"] += 3.0
    torch.save(content, path)
    with pytest.raises(CheckpointError) as caught:
        read_all(MegatronState(tmp_path))
    assert "--weights-only`" in str(caught.value.hint)
    path.unlink()
    found = read_state(tmp_path, weights_only=True)
    assert (found.kinds, found.progress) == ((WEIGHT,), Progress(4, 32))
    assert not any("optimizer" in note for note in found.notes)
    for name in state.parameters:
        assert torch.equal(found.read(name), state.read(name).bfloat16()), name


def read_all(state: MegatronState) -> None:
    """Read every tensor."""
    for name in state.parameters:
        for kind in state.kinds:
            state.read(name, kind)


@pytest.mark.parametrize("layout", [Layout(), Layout(1, 2)], ids=str)
def test_the_first_distributed_optimizer(layout: Layout, tmp_path: Path) -> None:
    """Its state, in separate files, is not read: a note says so, unless it was not saved."""
    progress = Progress(4, 32, 4)
    state = MemoryState(GPT, progress=progress)
    write_megatron(state, tmp_path, None, layout=layout)
    for path in list(tmp_path.glob("iter_0000004/mp_rank_*/model_optim_rng.pt")):
        path.rename(path.with_name("model_rng.pt"))
        apart = path.parent.with_name(f"{path.parent.name}_000") / "optim.pt"
        apart.parent.mkdir()
        torch.save({"optimizer": {}}, apart)
    found = MegatronState(tmp_path)
    assert_same(found, state)
    [note] = [note for note in found.notes if "optimizer" in note]
    assert "distributed by a version of Megatron before 2024" in note
    assert not any("optimizer" in one for one in MegatronState(tmp_path, weights_only=True).notes)
    for path in tmp_path.glob("iter_0000004/mp_rank_*/model_rng.pt"):
        content = torch.load(path, weights_only=False)
        content["args"].no_save_optim = True
        torch.save(content, path)
    assert not any("optimizer" in one for one in MegatronState(tmp_path).notes)
