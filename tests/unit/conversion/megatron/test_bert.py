"""BERT in both of Megatron's formats: round trips, names, settings, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_models import MemoryState, assert_same
from model_states import bert_shape

from lmcore.conversion.convert import convert
from lmcore.conversion.formats import WriteOptions, read_state
from lmcore.conversion.megatron.parameters.layout import Layout
from lmcore.conversion.megatron.parameters.names import STYLES
from lmcore.conversion.native.write import write_lmcore
from lmcore.conversion.state import Progress
from lmcore.errors import CheckpointError
from lmcore.model.shape import ModelShape


def shape_of(**own: Any) -> ModelShape:
    """Return the shape of a BERT of Megatron's kind, which parallel layouts divide."""
    shape = bert_shape(**{"bert_post_norm": False, "bert_gelu": "tanh"} | own)
    sizes = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24}
    return replace(shape, **sizes, head_dim=4, num_query_groups=4)


BERT = shape_of()
SHAPES = {
    "both heads": BERT,
    "masked head": shape_of(bert_binary_head=False, bert_token_types=0),
    "exact gelu": shape_of(bert_gelu="erf"),
}


def written(tmp_path: Path, state: MemoryState, to: str, options: WriteOptions) -> Path:
    """Convert a state to a format of Megatron by way of a run."""
    write_lmcore(state, tmp_path / "run", None)
    done = convert(tmp_path / "run", tmp_path / "out", to, options=options)
    assert done.agreement == "1e-6"
    return tmp_path / "out"


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("style", STYLES)
def test_names_and_settings(tmp_path: Path, shape: ModelShape, style: str) -> None:
    """Every set of names of rank files gives back the model, bit by bit."""
    state = MemoryState(shape, progress=Progress(7, 70), vocab_size=30)
    out = written(tmp_path, state, "megatron", WriteOptions(style=style))
    assert_same(read_state(out), state)


@pytest.mark.parametrize("style", ["core", "legacy"])
@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 4, 1), (2, 2, 2)], ids=str)
def test_layouts(tmp_path: Path, layout: tuple[int, int, int], style: str) -> None:
    """Stages hold their heads and the copy of the embedding, ranks their rows of the bias."""
    state = MemoryState(BERT)
    options = WriteOptions(style=style, layout=Layout(*layout))
    assert_same(read_state(written(tmp_path, state, "megatron", options)), state)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_torch_dist(tmp_path: Path, shape: ModelShape) -> None:
    state = MemoryState(shape, progress=Progress(7, 70))
    assert_same(read_state(written(tmp_path, state, "megatron-dist", WriteOptions())), state)


def test_legacy_files(tmp_path: Path) -> None:
    """The mappings that Megatron's modules load one by one."""
    out = written(tmp_path, MemoryState(BERT), "megatron", WriteOptions(style="legacy"))
    path = out / "release/mp_rank_00/model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    model = content["model"]
    assert set(model) == {"language_model", "lm_head", "binary_head"}
    assert set(model["language_model"]) == {"embedding", "encoder", "pooler"}
    assert set(model["language_model"]["embedding"]["tokentype_embeddings"]) == {"weight"}
    assert set(model["language_model"]["pooler"]) == {"dense.weight", "dense.bias"}
    assert set(model["lm_head"]) == {
        *("bias", "dense.weight", "dense.bias"),
        *("norm.weight", "norm.bias"),
    }
    assert set(model["binary_head"]) == {"weight", "bias"}
    assert content["args"].bert_binary_head is True
    # the names before norms of other kinds
    for name in ("weight", "bias"):
        model["lm_head"][f"layernorm.{name}"] = model["lm_head"].pop(f"norm.{name}")
    torch.save(content, path)
    assert_same(read_state(out), MemoryState(BERT))


@pytest.mark.parametrize("to", ["megatron", "megatron-dist"])
@pytest.mark.parametrize(
    "own,reason",
    [
        ({"bert_post_norm": True}, "norms after its branches instead of before them (post-norm)"),
        ({"bert_gelu": "tanh-all"}, "GELU by tanh in its head"),
        ({"bert_token_types": 1}, "1 embeddings of segments instead of 2"),
    ],
)
def test_models_that_megatron_lacks(
    tmp_path: Path, own: dict[str, Any], reason: str, to: str
) -> None:
    write_lmcore(MemoryState(shape_of(**own)), tmp_path / "run", None)
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "run", tmp_path / "out", to)
    assert reason in str(caught.value.why)


def test_gelu_of_the_legacy_models(tmp_path: Path) -> None:
    """`--openai-gelu` approximates in the head, too."""
    state = MemoryState(shape_of(bert_gelu="tanh-all"))
    out = written(tmp_path, state, "megatron", WriteOptions(style="legacy"))
    assert_same(read_state(out), state)


def test_the_optimizer_is_left_out(tmp_path: Path) -> None:
    """With a note, in both directions."""
    progress = Progress(7, 70, 7, adam={"beta1": 0.9, "beta2": 0.95, "eps": 1e-8})
    write_lmcore(MemoryState(BERT, optimizer=True, progress=progress), tmp_path / "run", None)
    done = convert(tmp_path / "run", tmp_path / "out", "megatron")
    assert not done.optimizer
    assert any("optimizer is left out: lmcore converts that of GPT" in one for one in done.notes)
    path = tmp_path / "out/iter_0000007/mp_rank_00/model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    torch.save(content | {"optimizer": {"state": {}}}, path)
    found = read_state(tmp_path / "out")
    assert found.kinds == ("weight",)
    assert any("the state of its optimizer is not read" in one for one in found.notes)


def test_a_surplus_tensor(tmp_path: Path) -> None:
    out = written(tmp_path, MemoryState(BERT), "megatron", WriteOptions())
    path = out / "release/mp_rank_00/model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    content["model"]["lm_head.other.weight"] = torch.ones(3)
    del content["model"]["binary_head.bias"]
    torch.save(content, path)
    with pytest.raises(CheckpointError) as caught:
        read_state(out)
    assert "`lm_head.other.weight` in `mp_rank_00` is surplus" in str(caught.value)
    assert "`order_head.bias` is missing" in str(caught.value)
