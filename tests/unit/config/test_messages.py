"""Whole messages, as a user reads them; `UPDATE_GOLDEN=1 pytest ...` rewrites the files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError
from lmcore.config.load import load_config
from lmcore.config.resolve import resolve
from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.config.validate import validate

GOLDEN = Path(__file__).parents[2] / "golden/errors"

CASES = {
    "flag_misspelt": "--trian-iters 5",
    "flag_old_misspelt": "--warmpu .01",
    "flag_without_value": "--lr",
    "flag_twice": "--micro-batch-size 4 --batch-size 2",
    "flag_wrong_type": "--num-layers four",
    "flag_out_of_range": "--attention-dropout 1.5",
    "flag_unknown_choice": "--lr-decay-style cosin",
    "flag_unsupported": "--fp16-lm-cross-entropy",
    "flag_unsupported_value": "--expert-model-parallel-size 8",
    "preset_misspelt": "--preset gpt2-124",
    "file_missing": "run.yml",
    "file_problems": "bad.yaml",
    "optimizer_option": "--optimizer sgd --adam-beta2 0.95",
    "heads": "--hidden-size 8192 --num-attention-heads 48",
    "groups": "--num-attention-heads 4 --group-query-attention --num-query-groups 3",
    "groups_alone": "--num-query-groups 2",
    "gate_too_narrow": "--hidden-size 16 --swiglu",
    "rotation_of_other_positions": "--rotary-base 500000 --use-rope-scaling",
    "rotation_of_odd_channels": "--position-embedding-type rope --kv-channels 5",
    "positions": "--seq-length 2048 --max-position-embeddings 1024",
    "batch_sizes": "--micro-batch-size 4 --global-batch-size 10",
    "ramp_two_numbers": "--rampup-batch-size 16 16 --global-batch-size 64",
    "ramp_with_iters": "--rampup-batch-size 16 16 1000 --global-batch-size 64 --train-iters 10",
    "ramp_without_end": "--rampup-batch-size 16 16 1000 --train-samples 1000",
    "ramp_from_above": "--rampup-batch-size 64 16 1000 --global-batch-size 64 --train-samples 1000",
    "ramp_past_its_end": "--rampup-batch-size 16 32 1000 --global-batch-size 64 "
    "--train-samples 1000",
    "ramp_sizes": "--rampup-batch-size 10 6 1000 --global-batch-size 64 --train-samples 1000",
    "loss_scale_twice": "--loss-scale 1024 --hysteresis 4",
    "loss_scale_below": "--initial-loss-scale 4 --min-loss-scale 8",
    "iters_and_samples": "--train-iters 10 --train-samples 1000",
    "samples_with_iters": "--train-samples 1000 --lr-warmup-iters 10",
    "no_validation": "--split 100,0,0",
    "merges_missing": "--tokenizer-type GPT2BPETokenizer --vocab-file vocab.json",
    "data_missing": "--data-path web",
    "weight_negative": "--data-path -0.5 web 1 books",
    "weight_lacking": "--data-path 0.5 web books",
    "weight_unreadable": "--data-path 0,5 web 0.5 books",
    "data_missing_of_several": "--data-path 1 web_text_document 2 web",
    "data_named_twice": "--data-path 1 web_text_document 2 web_text_document",
    "range_unreadable": "--train-weighted-split-paths T: 1 0-0.9 web",
    "ranges_overlap": "--train-weighted-split-paths T: 1 0:0.9 web_text_document "
    "--valid-weighted-split-paths V: 1 0.8:1 web_text_document",
    "sources_twice": "--data-path web_text_document --train-data shakespeare",
    "valid_without_train": "--data-path web_text_document --valid-data-path web_text_document",
    "train_without_valid": "--train-data-path web_text_document",
    "split_with_parts": "--train-data shakespeare --valid-data shakespeare --split 9,1,0",
    "change_without_load": "--change-blend",
    "vocabulary_too_small": "--vocab-size 100",
    "profile_without_steps": "--profile --profile-step-start 12",
    "profile_after_the_end": "--profile --train-iters 8",
    "profile_rank": "--profile --profile-ranks 0 3",
    "many": "--lrr 1 --seed x --num-layers 0 bad.yaml",
}

PIPELINE = "--pipeline-model-parallel-size"
PER_STAGE = "--num-layers-per-virtual-pipeline-stage"
OF_SEVERAL = {
    "layout_processes": (6, f"--tensor-model-parallel-size 2 {PIPELINE} 2"),
    "layout_heads": (3, "--tensor-model-parallel-size 3 --ffn-hidden-size 768"),
    "layout_groups": (4, "--tensor-model-parallel-size 4 --group-query-attention"),
    "layout_sequence": (2, "--context-parallel-size 2 --seq-length 30"),
    "layout_no_pipeline": (2, f"{PER_STAGE} 1"),
    "layout_few_layers": (8, f"{PIPELINE} 8 --global-batch-size 64"),
    "layout_unequal_stages": (
        2,
        f"{PIPELINE} 2 {PER_STAGE} 3 --num-layers 8 --global-batch-size 16",
    ),
    "layout_interleaved": (
        2,
        f"{PIPELINE} 2 --pipeline-schedule interleaved --global-batch-size 16",
    ),
    "layout_schedule_with_stages": (
        2,
        f"{PIPELINE} 2 --pipeline-schedule gpipe {PER_STAGE} 1 --global-batch-size 16",
    ),
    "layout_v_of_few_layers": (
        4,
        f"{PIPELINE} 4 --pipeline-schedule zero-bubble-v --num-layers 6 --global-batch-size 32",
    ),
    "layout_replicas": (4, "--zero-stage 2 --data-parallel-replicas 4"),
    "layout_replicas_of_all": (4, "--data-parallel-replicas 2"),
    "layout_zero_twice": (2, "--use-distributed-optimizer --zero-stage 0"),
    "layout_zero_bubble": (
        4,
        f"{PIPELINE} 2 --pipeline-schedule zero-bubble --zero-stage 3 --global-batch-size 32",
    ),
    "layout_micro_batches": (4, f"{PIPELINE} 4 --micro-batch-size 4"),
    "layout_groups_of_micro_batches": (
        2,
        f"{PIPELINE} 2 {PER_STAGE} 1 --micro-batch-size 4 --global-batch-size 12",
    ),
    "layout_optimizer": (2, "--optimizer muon --zero-stage 2"),
}
"""Number of processes, and flags."""

BAD = "preset: gpt2\nmodel:\n  num_layer: 3\n  hidden_size: wide\nlr: 1e-4\nmodle: {}\n"


@pytest.mark.parametrize("name", CASES)
def test_message(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what, why and what to do, in the same words as recorded."""
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text(BAD, encoding="utf-8")
    for made in ("vocab.json", "web_text_document.bin", "web_text_document.idx"):
        Path(made).touch()
    compare(name, f"$ lmcore train {CASES[name]}\n{refused(CASES[name], 1)}\n")


@pytest.mark.parametrize("name", OF_SEVERAL)
def test_message_of_several_processes(name: str) -> None:
    """So does the message about a layout that the processes cannot have."""
    world_size, flags = OF_SEVERAL[name]
    compare(
        name, f"$ lmcore train {flags} ({world_size} processes)\n{refused(flags, world_size)}\n"
    )


def refused(flags: str, world_size: int) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(
            validate(load_config(flags.split()), world_size=world_size),
            tokenizer=TokenizerIdentity(vocab_size=257),
        )
    return caught.value.render()


def compare(name: str, text: str) -> None:
    golden = GOLDEN / f"config_{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_no_stale_recording() -> None:
    """Every recorded message belongs to a case."""
    recorded = {path.stem for path in GOLDEN.glob("config_*.txt")}
    assert recorded == {f"config_{name}" for name in CASES | OF_SEVERAL}
