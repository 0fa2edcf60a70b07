"""Saved arguments: layout, precision, models that lmcore lacks, and notes about training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_files import content_of, edit, one_rank, only_file, run_progress
from megatron_models import GPT, MemoryState

from lmcore.base.errors import CheckpointError
from lmcore.conversion.megatron.rank_files.read import MegatronState
from lmcore.conversion.megatron.rank_files.write import write_megatron
from lmcore.conversion.megatron.run.saved_arguments import saved_layout, saved_precision


@pytest.mark.parametrize(
    "args, known, expected",
    [
        (
            {
                "tensor_model_parallel_size": 2,
                "pipeline_model_parallel_size": 4,
                "virtual_pipeline_model_parallel_size": 3,
                "data_parallel_size": 8,
                "context_parallel_size": 1,
            },
            {},
            {"tensor": 2, "pipeline": 4, "data": 8, "stages_per_process": 3},
        ),
        ({"model_parallel_size": 2}, {"data": 4}, {"tensor": 2, "data": 4}),
        ({"tensor_model_parallel_size": 3}, {"tensor": 2}, {"tensor": 2}),
        (
            {"world_size": 16, "context_parallel_size": 2},
            {"tensor": 2, "pipeline": 1},
            {"tensor": 2, "pipeline": 1, "data": 4, "context": 2},
        ),
        ({"world_size": 5}, {"tensor": 2, "pipeline": 1}, {"tensor": 2, "pipeline": 1}),
        ({"tensor_model_parallel_size": "2", "data_parallel_size": True}, {}, {}),
    ],
    ids=["all", "older", "known first", "world size", "no multiple", "other types"],
)
def test_layout(args: dict[str, Any], known: dict[str, Any], expected: dict[str, int]) -> None:
    """Axes have lmcore's names; what is not recorded is left out."""
    assert saved_layout(args, **known) == expected


@pytest.mark.parametrize(
    "args, expected",
    [
        ({"bf16": True, "fp16": False}, "bf16"),
        ({"fp16": True}, "fp16"),
        ({"bf16": False, "fp16": False}, "fp32"),
        ({"bf16": None}, None),
        ({}, None),
    ],
    ids=["bf16", "fp16", "fp32", "none", "nothing"],
)
def test_precision(args: dict[str, Any], expected: str | None) -> None:
    """A run without either flag set computes in float32; without both flags nothing is known."""
    assert saved_precision(args) == expected


@pytest.mark.parametrize(
    "field, value",
    [
        ("num_experts", 8),
        ("multi_latent_attention", True),
        ("position_embedding_type", "mrope"),
        ("apply_layernorm_1p", True),
        ("qk_layernorm", True),
        ("rotary_interleaved", True),
        ("normalization", "DeepNorm"),
        ("use_mup", True),
        ("enable_mhc_connections", True),
        ("fp4_param_gather", True),
    ],
)
def test_models_that_lmcore_lacks(field: str, value: object, tmp_path: Path) -> None:
    """The argument and its value are named."""
    path = one_rank(tmp_path)
    edit(path, lambda content: setattr(content["args"], field, value))
    with pytest.raises(CheckpointError) as caught:
        MegatronState(tmp_path)
    assert field in (caught.value.why or "")
    assert str(value) in (caught.value.why or "")


def test_layers_of_a_specification(tmp_path: Path) -> None:
    """A note names `--spec`, whose layers the arguments do not describe."""
    path = one_rank(tmp_path)
    assert not any("--spec" in note for note in MegatronState(tmp_path).notes)
    edit(path, lambda content: setattr(content["args"], "spec", ["my.layers", "make"]))
    [note] = [note for note in MegatronState(tmp_path).notes if "--spec" in note]
    assert "`--spec my.layers make`" in note


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {
                "weight_decay_incr_style": "cosine",
                "start_weight_decay": 0.05,
                "end_weight_decay": 0.2,
            },
            "weight decay from 0.05 to 0.2 (`--weight-decay-incr-style cosine`)",
        ),
        ({"decoupled_weight_decay": False}, "added its weight decay to the gradients"),
        ({"decoupled_lr": 1e-4, "lr": 3e-4}, "another learning rate, 0.0001"),
    ],
)
def test_arguments_that_change_updates(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Each has a note; a weight decay that changed is not recorded by argparse's default."""
    write_megatron(MemoryState(GPT, progress=run_progress()), tmp_path, None)
    content = content_of(tmp_path)
    vars(content["args"]).update(weight_decay=0.01, weight_decay_incr_style="constant")
    torch.save(content, only_file(tmp_path))
    found = MegatronState(tmp_path)
    assert (found.settings["weight_decay"], found.training_notes) == (0.01, [])
    vars(content["args"]).update(changes)
    torch.save(content, only_file(tmp_path))
    found = MegatronState(tmp_path)
    (note,) = found.training_notes
    assert words in note
    assert ("weight_decay" in found.settings) == ("start_weight_decay" not in changes)
