"""Models that only BigScience's fork has: ALiBi, normalized embeddings and its gates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_files import edit
from megatron_models import GPT, LLAMA, MemoryState, assert_same

from lmcore.base.errors import CheckpointError
from lmcore.conversion.megatron.parameters.layout import Layout
from lmcore.conversion.megatron.rank_files.read import MegatronState
from lmcore.conversion.megatron.rank_files.write import write_megatron
from lmcore.conversion.state import WEIGHT
from lmcore_deepspeed.checkpoint.directory import STYLES
from lmcore_deepspeed.checkpoint.read import read_deepspeed
from lmcore_deepspeed.checkpoint.write import write_deepspeed

BLOOM = replace(GPT, position_embedding_type="alibi", embed_layernorm=True)
GEGLU = replace(BLOOM, glu_activation="geglu")
UP = "blocks.0.feed_forward.up.weight"


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layout", [Layout(), Layout(2)], ids=str)
@pytest.mark.parametrize("shape", [BLOOM, GEGLU], ids=["bloom", "geglu"])
def test_weights_come_back(shape: Any, layout: Layout, style: str, tmp_path: Path) -> None:
    """Layer files and rank files give back the same weights."""
    state = MemoryState(shape)
    notes = write_deepspeed(state, tmp_path, None, layout=layout, style=style)
    assert_same(read_deepspeed(tmp_path), state)
    assert any("only BigScience's" in note for note in notes)


def test_layers_as_bigscience_numbers_them(tmp_path: Path) -> None:
    """The embedding is layer 1 and has the norm, the blocks are 3 to 6, the final norm is 8."""
    write_deepspeed(MemoryState(BLOOM), tmp_path, None)
    layers = sorted((tmp_path / "global_step0").glob("layer_*"))
    assert [path.name[6:8] for path in layers] == ["01", "03", "04", "05", "06", "08"]
    assert set(torch.load(layers[0])) == {
        "word_embeddings.weight",
        "word_embeddings.norm.weight",
        "word_embeddings.norm.bias",
    }


def rows_of(state: MemoryState) -> None:
    """Set each row of a first projection to its number."""
    rows = torch.arange(48.0)[:, None].expand(48, 16)
    state.tensors[UP, WEIGHT] = rows


def test_the_gate_is_the_second_half(tmp_path: Path) -> None:
    """Each rank has its rows of the other projection, then of the gate, which lmcore has first."""
    state = MemoryState(GEGLU)
    rows_of(state)
    write_deepspeed(state, tmp_path, None, layout=Layout(2))
    layer = torch.load(tmp_path / "global_step0" / "layer_03-model_01-model_states.pt")
    assert layer["mlp.dense_h_to_4h.weight"][:, 0].tolist() == [*range(36, 48), *range(12, 24)]


def test_swiglu_by_the_flag_of_bigscience(tmp_path: Path) -> None:
    """`--glu-activation swiglu` is the model of `--swiglu`, with the halves exchanged."""
    shape = replace(BLOOM, swiglu=True)
    write_deepspeed(MemoryState(shape), tmp_path, None)

    def other(content: dict[str, Any]) -> None:
        content["args"].swiglu, content["args"].glu_activation = False, "swiglu"

    edit(tmp_path / "global_step0" / "mp_rank_00_model_states.pt", other)
    found = read_deepspeed(tmp_path)
    assert found.shape == shape
    first, second = MemoryState(shape).read(UP).chunk(2)
    assert torch.equal(found.read(UP), torch.cat([second, first]))


def test_positions_by_their_number(tmp_path: Path) -> None:
    """A file stores BigScience's positions as a number."""
    write_deepspeed(MemoryState(BLOOM), tmp_path, None)
    path = tmp_path / "global_step0" / "mp_rank_00_model_states.pt"
    edit(path, lambda content: setattr(content["args"], "position_embedding_type", 3))
    assert read_deepspeed(tmp_path).shape == BLOOM


def test_files_of_ranks(tmp_path: Path) -> None:
    """Megatron's rank files have it with older names, and cannot with megatron-core's."""
    write_megatron(MemoryState(GEGLU), tmp_path / "older", None, layout=Layout(2), style="legacy")
    assert_same(MegatronState(tmp_path / "older"), MemoryState(GEGLU))
    with pytest.raises(CheckpointError) as caught:
        write_megatron(MemoryState(GEGLU), tmp_path / "core", None)
    assert caught.value.why == "it has ALiBi, normalized embeddings, the activation geglu"


def test_an_unknown_gate_is_refused(tmp_path: Path) -> None:
    """The argument and its value are named."""
    write_deepspeed(MemoryState(replace(LLAMA, swiglu=False)), tmp_path, None)
    path = tmp_path / "global_step0" / "mp_rank_00_model_states.pt"
    edit(path, lambda content: setattr(content["args"], "glu_activation", "maxout"))
    with pytest.raises(CheckpointError) as caught:
        read_deepspeed(tmp_path)
    assert caught.value.why == "`glu_activation` is `maxout`"
