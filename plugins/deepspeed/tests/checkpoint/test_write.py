"""Checkpoints written for Megatron-DeepSpeed, read back and looked at as DeepSpeed loads them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from damage import largest_file
from megatron_models import BIASED_LLAMA, GPT, LLAMA, MemoryState, assert_same

from lmcore.base.errors import CheckpointError
from lmcore.conversion.megatron.parameters.layout import Layout
from lmcore.conversion.state import WEIGHT, Progress
from lmcore.model.shape import ModelShape
from lmcore_deepspeed.checkpoint.directory import STYLES
from lmcore_deepspeed.checkpoint.read import read_deepspeed
from lmcore_deepspeed.checkpoint.write import write_deepspeed

SCHEDULE = {
    "style": "cosine",
    "highest": 1e-3,
    "lowest": 1e-5,
    "warmup_samples": 10.0,
    "decay_samples": 100,
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layout", [Layout(), Layout(2), Layout(2, 2)], ids=str)
@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_weights_come_back(shape: ModelShape, layout: Layout, style: str, tmp_path: Path) -> None:
    """Layer files and rank files of every layout give back the same weights."""
    if style == "legacy":
        layout = replace(layout, pipeline=1)
    state = MemoryState(shape, progress=Progress(7, 70), vocab_size=23)
    notes = write_deepspeed(state, tmp_path, None, layout=layout, style=style)
    found = read_deepspeed(tmp_path)
    assert_same(found, state)
    assert (found.vocab_size, found.progress) == (23, Progress(7, 70))
    files = sorted(path.name for path in (tmp_path / "global_step7").iterdir())
    assert files[-1] == f"mp_rank_{layout.tensor * layout.pipeline - 1:02d}_model_states.pt"
    # Microsoft's pipeline: embedding 1, blocks 2 to 5, final norm 6, output embedding 7.
    layers = [1, 2, 3, 4, 5, 6, *([] if shape.tied else [7])] if style == "pipeline" else []
    assert [name for name in files if name.startswith("layer_")] == [
        f"layer_{layer:02d}-model_{rank:02d}-model_states.pt"
        for layer in layers
        for rank in range(layout.tensor)
    ]
    assert any("--finetune" in note for note in notes)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("shape", [GPT, LLAMA], ids=["gpt", "llama"])
def test_the_state_of_adam_is_universal(shape: ModelShape, style: str, tmp_path: Path) -> None:
    """Weights in float32 and both moments are parameter by parameter."""
    progress = Progress(7, 70, optimizer_step=6, schedule=SCHEDULE, scheduled_samples=60)
    state = MemoryState(shape, optimizer=True, progress=progress, vocab_size=23)
    layout = Layout(2, 2 if style == "pipeline" else 1)
    notes = write_deepspeed(state, tmp_path, None, layout=layout, style=style, dtype=torch.bfloat16)
    found = read_deepspeed(tmp_path)
    assert (found.kinds, found.progress) == (state.kinds, progress)
    assert (found.shape, found.vocab_size) == (shape, 23)
    for name in found.parameters:
        for kind in state.kinds:
            assert torch.equal(found.read(name, kind), state.read(name, kind)), name
    assert (tmp_path / "latest_universal").read_text() == "global_step7"
    assert any("--universal-checkpoint" in note for note in notes)


def test_what_zero_3_needs(tmp_path: Path) -> None:
    """Without a pipeline there are its name of a model's file, a number of updates and all rows."""
    progress = Progress(7, 70, optimizer_step=6)
    state = MemoryState(GPT, optimizer=True, progress=progress, vocab_size=21)
    notes = write_deepspeed(state, tmp_path, None, style="legacy")
    assert any("has 24 rows of the vocabulary" in note for note in notes)
    checkpoint = tmp_path / "global_step7"
    [path] = checkpoint.glob("zero_pp_rank_*")
    assert path.name == "zero_pp_rank_0_mp_rank_00_model_states.pt"
    saved = torch.load(path, weights_only=False)
    assert (saved["module"], saved["global_steps"], saved["param_shapes"]) == (None, 7, None)
    optimizer = torch.load(checkpoint / "zero" / "optimizer_state.pt")["optimizer_state_dict"]
    assert type(optimizer["state"][0]["step"]) is int
    embedding = "language_model.embedding.word_embeddings.weight"
    content = torch.load(checkpoint / "zero" / embedding / "exp_avg.pt")
    assert content["param"].shape[0] == 24
    assert_same(read_deepspeed(tmp_path), state)
    # The other files are read without the universal part.
    shutil.rmtree(checkpoint / "zero")
    found = read_deepspeed(tmp_path)
    assert found.kinds == (WEIGHT,)
    for name in state.parameters:
        assert torch.equal(found.read(name), state.read(name)), name


@pytest.mark.parametrize(
    "samples, settings, tokens, note",
    [
        (70, {"seq_length": 8}, 560, ""),
        (70, {}, 840, "for samples of 12 tokens, the model's positions"),
        (0, {"seq_length": 8}, 0, "tokens is not known: 0 is written"),
    ],
    ids=["known", "no length", "no samples"],
)
def test_consumed_tokens(
    samples: int, settings: dict[str, int], tokens: int, note: str, tmp_path: Path
) -> None:
    """They are the samples times the length of one; a note says what is not recorded."""
    state = MemoryState(GPT, progress=Progress(7, samples))
    state.settings = settings
    notes = write_deepspeed(state, tmp_path, None)
    content = torch.load(
        tmp_path / "global_step7" / "mp_rank_00_model_states.pt", weights_only=False
    )
    assert (content["tokens"], content["args"].consumed_train_tokens) == (tokens, tokens)
    found = [one for one in notes if "consumed tokens" in one]
    assert len(found) == bool(note)
    assert all(note in one for one in found)


def test_files_of_a_parameter(tmp_path: Path) -> None:
    """Each says how ranks of tensor parallelism divide it, as DeepSpeed's own conversion does."""
    state = MemoryState(LLAMA, optimizer=True, progress=Progress(7, 70, 6), vocab_size=23)
    write_deepspeed(state, tmp_path, None, layout=Layout(2))
    zero = tmp_path / "global_step7" / "zero"

    def rule(name: str) -> dict[str, object]:
        content = torch.load(zero / name / "exp_avg.pt")
        assert content["param"].untyped_storage().nbytes() == content["param"].nbytes
        return {key: value for key, value in content.items() if key != "param"}

    assert rule("1.word_embeddings.weight") == {"cat_dim": 0, "vocab_tensor": True}
    assert rule("7.lm_head.weight") == {"cat_dim": 0, "vocab_tensor": True}
    assert rule("2.input_layernorm.weight") == {}
    assert rule("3.self_attention.query_key_value.weight") == {"cat_dim": 0}
    assert rule("3.self_attention.dense.weight") == {"cat_dim": 1}
    assert rule("3.mlp.dense_h_to_4h.weight") == {"cat_dim": 0, "param_n_sub_params": 2}
    assert rule("3.mlp.dense_4h_to_h.weight") == {"cat_dim": 1}
    assert rule("6.weight") == {}
    assert torch.load(zero / "6.weight" / "step.pt") == 6


def test_gates_joined_as_other_matrices(tmp_path: Path) -> None:
    """Universal files of older converters, whose gates of several ranks are mixed, are refused."""
    state = MemoryState(LLAMA, optimizer=True, progress=Progress(7, 70, 6), vocab_size=23)
    write_deepspeed(state, tmp_path, None, layout=Layout(2))
    path = tmp_path / "global_step7" / "zero" / "4.mlp.dense_h_to_4h.weight" / "fp32.pt"
    content = torch.load(path)
    del content["param_n_sub_params"]
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="dense_h_to_4h") as caught:
        read_deepspeed(tmp_path)
    assert "as if it had no gate" in (caught.value.why or "")


def test_gate_and_up_by_hand(tmp_path: Path) -> None:
    """Each rank has its rows of the gate, then its rows of the other projection."""
    state = MemoryState(LLAMA)
    name = "blocks.0.feed_forward.up.weight"
    rows = torch.arange(40.0)[:, None].expand(40, 16)
    state.tensors[name, WEIGHT] = rows
    write_deepspeed(state, tmp_path, None, layout=Layout(2))
    layer = torch.load(tmp_path / "global_step0" / "layer_02-model_01-model_states.pt")
    assert layer["mlp.dense_h_to_4h.weight"][:, 0].tolist() == [*range(10, 20), *range(30, 40)]


def test_half_precision(tmp_path: Path) -> None:
    """Weights can be written in bfloat16."""
    plain = replace(BIASED_LLAMA, rope_scaling_factor=1.0)
    state = MemoryState(plain)
    write_deepspeed(state, tmp_path, None, dtype=torch.bfloat16)
    found = read_deepspeed(tmp_path)
    for name in state.parameters:
        assert torch.equal(found.read(name), state.read(name).bfloat16())


@pytest.mark.parametrize(
    "shape, style, layout, message",
    [
        (BIASED_LLAMA, "pipeline", Layout(), "it has scaled rotary embeddings"),
        (replace(LLAMA, add_qkv_bias=True), "pipeline", Layout(), "biases of queries"),
        (GPT, "pipeline", Layout(3), "cannot be divided into 3 equal parts"),
        (GPT, "pipeline", Layout(1, 2, 2), "not interleaved"),
        (GPT, "legacy", Layout(1, 2), "without a pipeline"),
    ],
)
def test_models_and_layouts_that_it_lacks(
    shape: ModelShape, style: str, layout: Layout, message: str, tmp_path: Path
) -> None:
    """They are refused before anything is written."""
    with pytest.raises(CheckpointError) as caught:
        write_deepspeed(MemoryState(shape), tmp_path, None, layout=layout, style=style)
    assert message in (caught.value.why or "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "files, why",
    [("6.bias/exp_avg.pt", "Adam's state lacks 1 file"), ("*/fp32.pt", "no `NAME/fp32.pt`")],
    ids=["state", "weights"],
)
def test_an_incomplete_universal_checkpoint_is_refused(
    files: str, why: str, tmp_path: Path
) -> None:
    """A part of Adam's state is not read as if there were none."""
    write_deepspeed(MemoryState(GPT, optimizer=True), tmp_path, None)
    [directory] = tmp_path.glob("global_step*")
    for path in (directory / "zero").glob(files):
        path.unlink()
    with pytest.raises(CheckpointError, match="is not complete") as caught:
        read_deepspeed(tmp_path)
    assert why in str(caught.value.why)


def test_padding_of_the_vocabulary_in_a_universal_checkpoint(tmp_path: Path) -> None:
    """A pipeline's has all rows; a note names rows that DeepSpeed's own leave out."""
    progress = Progress(7, 70, optimizer_step=6)
    state = MemoryState(GPT, optimizer=True, progress=progress, vocab_size=22)
    notes = write_deepspeed(state, tmp_path, None)
    said = "has 24 rows of the vocabulary: Megatron-DeepSpeed has to pad it to as many or more"
    assert any(said in note for note in notes)
    assert not any("of the vocabulary" in note for note in read_deepspeed(tmp_path).notes)
    for path in tmp_path.glob("global_step7/zero/tied_modules.embed.word_embeddings.weight/*.pt"):
        content = torch.load(path, weights_only=False)
        if path.stem != "step":
            torch.save(content | {"param": content["param"][:22].clone()}, path)
    found = read_deepspeed(tmp_path)
    assert found.shape.padded_vocab_size == 22
    assert any("2 rows of padding of the vocabulary are missing" in one for one in found.notes)


def test_rows_without_padding_need_no_note(tmp_path: Path) -> None:
    """Nothing is said of a vocabulary without padding, and of weights alone."""
    for tokens, optimizer in ((24, True), (22, False)):
        state = MemoryState(GPT, optimizer=optimizer, vocab_size=tokens)
        notes = write_deepspeed(state, tmp_path / f"{tokens}", None)
        assert not any("rows of the vocabulary" in note for note in notes)


def test_a_refused_write_is_an_error_of_the_system(tmp_path: Path) -> None:
    """Layers and universal parts are written by a writer that reports it."""
    with largest_file(500), pytest.raises(OSError, match="too large"):
        write_deepspeed(MemoryState(GPT, optimizer=True), tmp_path / "out", None)


def test_gelu_without_biases(tmp_path: Path) -> None:
    """Megatron's fused approximation needs a bias: a note says that it computes another GELU."""
    for name, changes, expected in (
        ("biases", {}, False),
        ("none", {"add_bias_linear": False}, True),
        ("gated", {"add_bias_linear": False, "swiglu": True}, False),
    ):
        notes = write_deepspeed(MemoryState(replace(GPT, **changes)), tmp_path / name, None)
        assert any("computes GELU exactly" in note for note in notes) == expected
