"""Whole messages, as a user reads them; `UPDATE_GOLDEN=1 pytest ...` rewrites the files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmcore.config.load import load_config
from lmcore.config.resolve import resolve
from lmcore.errors import ConfigError

GOLDEN = Path(__file__).parents[2] / "golden/errors"

CASES = {
    "flag_misspelt": "--trian-iters 5",
    "flag_old_misspelt": "--warmpu .01",
    "flag_without_value": "--lr",
    "flag_twice": "--lr 1e-3 --lr 1e-4",
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
    "many": "--lrr 1 --seed x --num-layers 0 bad.yaml",
}

BAD = "preset: gpt2\nmodel:\n  num_layer: 3\n  hidden_size: wide\nlr: 1e-4\nmodle: {}\n"


@pytest.mark.parametrize("name", CASES)
def test_message(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what, why and what to do, in the same words as recorded."""
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text(BAD, encoding="utf-8")
    for made in ("vocab.json", "web_text_document.bin", "web_text_document.idx"):
        Path(made).touch()
    with pytest.raises(ConfigError) as caught:
        resolve(load_config(CASES[name].split()), world_size=1, vocab_size=257)
    text = f"$ lmcore train {CASES[name]}\n{caught.value.render()}\n"
    golden = GOLDEN / f"config_{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


def test_no_stale_recording() -> None:
    """Every recorded message belongs to a case."""
    assert {path.stem for path in GOLDEN.glob("config_*.txt")} == {f"config_{n}" for n in CASES}
