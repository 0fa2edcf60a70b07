"""T5 and ICT, which have several stacks of layers, in Megatron's formats."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_plugin import with_deepspeed
from megatron_files import ADAM_SETTINGS, RANK_FILE, content_of, edit, only_file, run_progress
from megatron_models import (
    BERT,
    GPT,
    RELATIVE_T5,
    T5,
    MemoryState,
    assert_same,
    megatron_bert,
    megatron_t5,
)

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


def _ict(**own: Any) -> ModelShape:
    settings = {
        "bert_post_norm": False,
        "bert_gelu": "tanh",
        "bert_token_types": 2,
        "biencoder_projection_dim": 6,
        "biencoder_shared_query_context_model": False,
        "retriever_score_scaling": True,
    }
    further = tuple(sorted((settings | own).items()))
    return dataclasses.replace(megatron_bert(), model_family="ict", further=further)


ICT = _ict()
SHARED_ICT = _ict(biencoder_projection_dim=0, biencoder_shared_query_context_model=True)
LEARNED = [(T5, "core"), (T5, "core-local"), (T5, "legacy"), (RELATIVE_T5, "core")]
ALL = [*LEARNED, (ICT, "legacy"), (SHARED_ICT, "legacy")]
NAMED = [f"{shape.model_family}, {style}" for shape, style in ALL]


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("shape,style", ALL, ids=NAMED)
def test_rank_files(tmp_path: Path, shape: ModelShape, style: str, tensor: int) -> None:
    """A run becomes rank files and is read back, bit by bit."""
    state = MemoryState(shape, progress=Progress(7, 70), vocab_size=20)
    write_lmcore(state, tmp_path / "run", None)
    options = WriteOptions(style=style, layout=Layout(tensor))
    done = convert(tmp_path / "run", tmp_path / "out", "megatron", options=options)
    assert done.agreement == "1e-6"
    assert_same(read_state(tmp_path / "out"), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("shape,style", ALL, ids=NAMED)
def test_the_state_of_adam(
    tmp_path: Path, shape: ModelShape, style: str, tensor: int, dtype: torch.dtype
) -> None:
    state = MemoryState(shape, optimizer=True, progress=run_progress())
    write_megatron(state, tmp_path, None, layout=Layout(tensor), style=style, dtype=dtype)
    found = read_state(tmp_path)
    assert_same(found, state)
    assert found.progress is not None
    assert (found.progress.optimizer_step, found.progress.adam) == (5, ADAM_SETTINGS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [T5, RELATIVE_T5], ids=["learned", "relative"])
def test_torch_dist(tmp_path: Path, shape: ModelShape, dtype: torch.dtype) -> None:
    state = MemoryState(shape, optimizer=True, progress=run_progress())
    write_distributed(state, tmp_path, None, layout=Layout(2), dtype=dtype)
    assert_same(read_state(tmp_path), state)


def test_norms_of_the_legacy_decoder(tmp_path: Path) -> None:
    """The norm after self-attention is the one before the attention to the encoder."""
    state = MemoryState(T5)
    write_megatron(state, tmp_path, None, style="legacy")
    model = content_of(tmp_path)["model"]
    assert set(model) == {"language_model", "lm_head"}
    assert set(model["language_model"]) == {"embedding", "encoder", "decoder"}
    assert set(model["lm_head"]) == {"bias"}
    decoder, encoder = (model["language_model"][one] for one in ("decoder", "encoder"))
    for held, name, ours in (
        (decoder, "post_attention_norm", "decoder.2.cross_attention_norm"),
        (decoder, "post_inter_attention_norm", "decoder.2.feed_forward_norm"),
    ):
        expected = state.read(f"{ours}.weight")
        assert torch.equal(held[f"layers.2.{name}.weight"], expected)
    expected = state.read("encoder.1.feed_forward_norm.weight")
    assert torch.equal(encoder["layers.1.post_attention_norm.weight"], expected)
    # keys and values by head: [K, 2, D, H]
    packed = decoder["layers.0.inter_attention.key_value.weight"].view(4, 2, 4, 16)
    ours = state.read("decoder.0.cross_attention.key_value.weight").view(2, 4, 4, 16)
    assert torch.equal(packed.transpose(0, 1), ours)


def test_names_of_the_first_versions(tmp_path: Path) -> None:
    """Norms and rows of keys and values of files from before versions 1 and 2."""
    state = MemoryState(T5)
    write_megatron(state, tmp_path, None, style="legacy")

    def age(content: dict[str, Any]) -> None:
        content["checkpoint_version"] = 0
        for stack in ("encoder", "decoder"):
            held = content["model"]["language_model"][stack]
            for name in list(held):
                tensor = held.pop(name)
                if ".query_key_value." in name or ".key_value." in name:
                    kinds = 3 if "query" in name else 2
                    by_head = tensor.view(4, kinds, 4, *tensor.shape[1:])
                    tensor = by_head.transpose(0, 1).reshape(tensor.shape)
                older = name.replace("_norm.", "_layernorm.")
                held[older.replace("self_attention.", "attention.")] = tensor

    edit(only_file(tmp_path), age)
    assert_same(read_state(tmp_path), state)


def test_files_of_the_biencoder(tmp_path: Path) -> None:
    state = MemoryState(ICT)
    write_megatron(state, tmp_path, None, style="legacy")
    content = content_of(tmp_path)
    assert set(content["model"]) == {"query_model", "context_model"}
    query = content["model"]["query_model"]
    assert set(query) == {"language_model", "projection_enc"}
    assert set(query["language_model"]) == {"embedding", "encoder"}
    assert set(query["projection_enc"]) == {"weight", "bias"}
    assert content["args"].biencoder_projection_dim == 6
    expected = state.read("block.blocks.3.attention.output.weight")
    held = content["model"]["context_model"]["language_model"]["encoder"]
    assert torch.equal(held["layers.3.self_attention.dense.weight"], expected)


@pytest.mark.parametrize(
    "shape,to,style,reason",
    [
        (megatron_t5(t5_feed_forward="relu"), "megatron", "core", "the feed-forward layer `relu`"),
        (megatron_t5(t5_scaled_attention=False), "megatron", "core", "are not divided"),
        (megatron_t5(t5_head_bias=False), "megatron-dist", "core", "no bias in the head"),
        (megatron_t5(num_query_groups=2), "megatron", "core", "fewer heads of keys and values"),
        (RELATIVE_T5, "megatron", "legacy", "relative positions"),
        (ICT, "megatron", "core", "which only `--to megatron --megatron-names legacy` has"),
        (ICT, "megatron-dist", "core", "which only `--to megatron --megatron-names legacy` has"),
        (_ict(bert_post_norm=True), "megatron", "legacy", "post-norm"),
    ],
)
def test_models_that_megatron_lacks(
    tmp_path: Path, shape: ModelShape, to: str, style: str, reason: str
) -> None:
    write_lmcore(MemoryState(shape), tmp_path / "run", None)
    options = WriteOptions(style=style if to == "megatron" else STYLES[0])
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "run", tmp_path / "out", to, options=options)
    assert reason in str(caught.value.why)


def test_stages_are_refused(tmp_path: Path) -> None:
    write_lmcore(MemoryState(T5), tmp_path / "run", None)
    options = WriteOptions(layout=Layout(1, 2))
    with pytest.raises(CheckpointError, match="several stacks of layers is written for one stage"):
        convert(tmp_path / "run", tmp_path / "out", "megatron", options=options)


def test_stages_are_not_read(tmp_path: Path) -> None:
    write_megatron(MemoryState(T5), tmp_path, None)
    ranks = tmp_path / "release"
    first = ranks / "mp_rank_00"
    for stage in (0, 1):
        (ranks / f"mp_rank_00_00{stage}").mkdir()
        (ranks / f"mp_rank_00_00{stage}" / RANK_FILE).write_bytes((first / RANK_FILE).read_bytes())
        edit(
            ranks / f"mp_rank_00_00{stage}" / RANK_FILE,
            lambda content: setattr(content["args"], "pipeline_model_parallel_size", 2),
        )
    (first / RANK_FILE).unlink()
    first.rmdir()
    with pytest.raises(CheckpointError, match="several stacks of layers, in 2 stages"):
        read_state(tmp_path)


FAMILIES = {
    "bert": BERT,
    "bert of the paper": megatron_bert(bert_post_norm=True, bert_gelu="erf"),
    "bert of none": megatron_bert(bert_post_norm=True, bert_gelu="tanh-all"),
    "bert with a head": dataclasses.replace(BERT, task="classification", num_labels=2),
    "gpt of Megatron": dataclasses.replace(GPT, add_bias_linear=False),
    "gpt of none": dataclasses.replace(GPT, embed_layernorm=True, add_bias_linear=False),
    "ict": ICT,
    "t5": T5,
    "relative t5": RELATIVE_T5,
    "t5 of transformers": megatron_t5(t5_head_bias=False),
}
EVERY_FORMAT = ("megatron", "megatron-dist", "megatron-deepspeed", "huggingface")


@pytest.mark.parametrize("to", EVERY_FORMAT)
@pytest.mark.parametrize("shape", FAMILIES.values(), ids=FAMILIES)
def test_the_hint_can_be_followed(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    shape: ModelShape,
    to: str,
) -> None:
    """Each family in each format: written, or refused with a reason and with what to do."""
    write_lmcore(MemoryState(shape), tmp_path / "run", None)
    try:
        with with_deepspeed(tmp_path_factory, monkeypatch):
            convert(tmp_path / "run", tmp_path / "out", to, verify=False)
    except CheckpointError as error:
        why, hint = error.why, error.hint or ""
    else:
        return
    assert why
    named = re.findall(r"`--to (\S+?)(?: --megatron-names (\S+?))?`", hint)
    assert named
    for number, (other, style) in enumerate(named):
        assert other != to or style
        options = WriteOptions(style=style or None)
        target = tmp_path / f"other-{number}"
        convert(tmp_path / "run", target, other, options=options, verify=False)
