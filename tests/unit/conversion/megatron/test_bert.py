"""BERT in both of Megatron's formats: round trips, names, settings, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_buckets import save
from megatron_files import ADAM_SETTINGS, RANK_FILE, edit, run_progress
from megatron_models import BERT, MASKED_BERT, MemoryState, assert_same, megatron_bert

from lmcore.base.errors import CheckpointError
from lmcore.conversion.convert import convert
from lmcore.conversion.formats import WriteOptions, read_state
from lmcore.conversion.megatron.parameters.layout import Layout
from lmcore.conversion.megatron.parameters.names import STYLES
from lmcore.conversion.megatron.rank_files.write import write_megatron
from lmcore.conversion.megatron.torch_dist.write import write_distributed
from lmcore.conversion.native.write import write_lmcore
from lmcore.conversion.state import Progress
from lmcore.model.shape import ModelShape

SHAPES = {
    "both heads": BERT,
    "masked head": MASKED_BERT,
    "exact gelu": megatron_bert(bert_gelu="erf"),
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
    write_lmcore(MemoryState(megatron_bert(**own)), tmp_path / "run", None)
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "run", tmp_path / "out", to)
    assert reason in str(caught.value.why)


def test_gelu_of_the_legacy_models(tmp_path: Path) -> None:
    """`--openai-gelu` approximates in the head, too."""
    state = MemoryState(megatron_bert(bert_gelu="tanh-all"))
    out = written(tmp_path, state, "megatron", WriteOptions(style="legacy"))
    assert_same(read_state(out), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("shape", [BERT, MASKED_BERT], ids=["both heads", "masked head"])
def test_the_state_of_adam(
    tmp_path: Path,
    shape: ModelShape,
    style: str,
    layout: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    """Main parameters, moments and updates come back from rank files, bit by bit."""
    state = MemoryState(shape, optimizer=True, progress=run_progress())
    write_megatron(state, tmp_path, None, layout=Layout(*layout), style=style, dtype=dtype)
    found = read_state(tmp_path)
    assert_same(found, state)
    assert found.progress is not None
    assert (found.progress.optimizer_step, found.progress.adam) == (5, ADAM_SETTINGS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_state_of_adam_in_torch_dist(
    tmp_path: Path, shape: ModelShape, dtype: torch.dtype
) -> None:
    state = MemoryState(shape, optimizer=True, progress=run_progress())
    write_distributed(state, tmp_path, None, layout=Layout(2, 2), dtype=dtype)
    found = read_state(tmp_path)
    assert_same(found, state)
    assert found.progress is not None
    assert (found.progress.optimizer_step, found.progress.adam) == (5, ADAM_SETTINGS)


@pytest.mark.parametrize("to", ["megatron", "megatron-dist"])
def test_a_run_with_its_optimizer(tmp_path: Path, to: str) -> None:
    """A run goes there and back with it; no note says that it is left out."""
    state = MemoryState(BERT, optimizer=True, progress=run_progress())
    for name in state.parameters:
        state.tensors[name, "exp_avg_sq"].abs_()
    write_lmcore(state, tmp_path / "run", None)
    done = convert(tmp_path / "run", tmp_path / "out", to)
    assert done.optimizer
    assert not any("optimizer is left out" in note for note in done.notes)
    assert convert(tmp_path / "out", tmp_path / "back", "lmcore").optimizer
    assert_same(read_state(tmp_path / "back"), state)


# Matrices and vectors after the layers, in the order of Megatron's modules; the copy of the
# embedding is made after the language model, before the heads, but saved after them.
_OF_THE_NORM = ("final_norm.weight", "final_norm.bias")
_OF_THE_HEAD = ("masked_head.dense.bias", "masked_head.norm.weight", "masked_head.norm.bias")
AFTER_THE_LAYERS = {
    "core-local": (
        ("masked_head.dense", "token_embedding", "order_head", "pooler"),
        (*_OF_THE_NORM, *_OF_THE_HEAD, "masked_head.bias", "order_head.bias", "pooler.bias"),
    ),
    "legacy": (
        ("pooler", "token_embedding", "masked_head.dense", "order_head"),
        (*_OF_THE_NORM, "pooler.bias", "masked_head.bias", *_OF_THE_HEAD, "order_head.bias"),
    ),
}


@pytest.mark.parametrize("style", AFTER_THE_LAYERS)
def test_numbers_by_hand(tmp_path: Path, style: str) -> None:
    """The last stage's heads and its copy of the embedding have Megatron's numbers."""
    state = MemoryState(BERT, optimizer=True, progress=run_progress())
    write_megatron(state, tmp_path, None, layout=Layout(1, 2), style=style)
    directory = tmp_path / "iter_0000006"
    first, last = (
        torch.load(directory / f"mp_rank_00_00{stage}" / RANK_FILE, weights_only=False)
        for stage in (0, 1)
    )
    # Three embeddings and 4 matrices in each of 2 layers, then 8 vectors in each.
    decayed, others = first["optimizer"]["param_groups"]
    assert (len(decayed["params"]), len(others["params"])) == (11, 16)
    embeddings = ("token_embedding", "position_embedding", "type_embedding")
    for number, name in enumerate(embeddings):
        found = first["optimizer"]["state"][number]["exp_avg"]
        assert torch.equal(found, state.read(f"{name}.weight", "exp_avg")), name
    matrices, vectors = AFTER_THE_LAYERS[style]
    decayed, others = last["optimizer"]["param_groups"]
    assert decayed["params"] == list(range(8 + len(matrices)))
    numbers = {8 + place: f"{name}.weight" for place, name in enumerate(matrices)}
    numbers |= dict(zip(others["params"][16:], vectors, strict=True))
    for number, name in numbers.items():
        found = last["optimizer"]["state"][number]["exp_avg"]
        assert torch.equal(found, state.read(name, "exp_avg")), (number, name)


def test_the_copy_that_is_saved_last(tmp_path: Path) -> None:
    """Before megatron-core the last stage's embedding is saved after the heads, made before."""
    state = MemoryState(BERT, optimizer=True, progress=run_progress())
    write_megatron(state, tmp_path, None, layout=Layout(1, 2), style="legacy", dtype=torch.bfloat16)

    def save_last(content: dict[str, Any]) -> None:
        model = content["model"]
        model["word_embeddings_for_head"] = model.pop("word_embeddings_for_head")
        assert list(model) == [
            *("language_model", "lm_head", "binary_head"),
            "word_embeddings_for_head",
        ]

    edit(tmp_path / "iter_0000006/mp_rank_00_001" / RANK_FILE, save_last)
    assert_same(read_state(tmp_path), state)


def test_embeddings_with_a_learning_rate_of_their_own(tmp_path: Path) -> None:
    """`--decoupled-lr` is for the token embedding, not for segments, positions and heads."""
    state = MemoryState(BERT, optimizer=True, progress=run_progress())
    write_megatron(state, tmp_path, None)
    path = tmp_path / "iter_0000006/mp_rank_00" / RANK_FILE

    def divide(content: dict[str, Any]) -> None:
        matrices, others = content["optimizer"]["param_groups"]
        own = {**matrices, "params": matrices["params"][:1], "is_decoupled_lr": True}
        matrices["params"] = matrices["params"][1:]
        content["optimizer"]["param_groups"] = [matrices, own, others]

    edit(path, divide)
    assert_same(read_state(tmp_path), state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # in torch 2.8 itself
@pytest.mark.parametrize("gathered", [False, True], ids=["buckets", "gathered"])
@pytest.mark.parametrize("limit", [10**9, 900], ids=["one bucket", "several"])
@pytest.mark.parametrize("layout", [(1, 1, 1), (1, 2, 1), (2, 2, 2)], ids=str)
def test_the_distributed_optimizer_in_torch_dist(
    tmp_path: Path, layout: tuple[int, int, int], limit: int, gathered: bool
) -> None:
    """The heads are in one piece, with the copy of the embedding, which has its own bucket."""
    state = MemoryState(BERT, optimizer=True)
    save(tmp_path, state, Layout(*layout), limit=limit, gathered=gathered)
    assert_same(read_state(tmp_path), state)


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
