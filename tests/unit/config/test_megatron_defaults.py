"""`--defaults megatron` against the defaults of Megatron's own argument definitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmcore.base.errors import ConfigError
from lmcore.config.file.run_file import write_run_file
from lmcore.config.load import load_config
from lmcore.config.megatron_defaults import MEGATRON_DEFAULTS
from lmcore.config.resolve import resolve
from lmcore.config.rules.needs import note_without_effect
from lmcore.config.section import run_options
from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.config.validate import validate

THEIRS: dict[str, Any] = {
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "attention_dropout": 0.1,
    "calculate_per_token_loss": False,
    "clip_grad": 1.0,
    "context_parallel_size": 1,
    "distributed_timeout_minutes": 10,
    "eval_interval": 1000,
    "eval_iters": 100,
    "hidden_dropout": 0.1,
    "hysteresis": 2,
    "init_method_std": 0.02,
    "initial_loss_scale": 2**32,
    "layernorm_epsilon": 1e-5,
    "log_interval": 100,
    "loss_scale_window": 1000,
    "lr_decay_style": "linear",
    "lr_warmup_fraction": None,
    "lr_warmup_iters": 0,
    "lr_warmup_samples": 0,
    "make_vocab_size_divisible_by": 128,
    "min_loss_scale": 1.0,
    "min_lr": 0.0,
    "normalization": "LayerNorm",
    "optimizer": "adam",
    "pipeline_model_parallel_size": 1,
    "position_embedding_type": "learned_absolute",
    "profile_ranks": (0,),
    "profile_step_end": 12,
    "profile_step_start": 10,
    "recompute_num_layers": 1,
    "rope_scaling_factor": 8.0,
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "seed": 1234,
    "sgd_momentum": 0.9,
    "split": "969,30,1",
    "tensor_model_parallel_size": 1,
    "tensorboard_log_interval": 1,
    "tensorboard_queue_size": 1000,
    "vocab_extra_ids": 0,
    "weight_decay": 0.01,
}
"""Defaults in the argument definitions of Megatron-LM (commit 000c4ac2), Argonne's (3ca7e05a) and
BigScience's (007719ad) Megatron-DeepSpeed, which agree in these."""

OF_ONE = {
    "megatron": {"precision": "fp32", "split_rule": "megatron-core", "final_epoch_threshold": 0.8},
    "megatron-deepspeed": {
        "sophiag_beta1": 0.9,
        "sophiag_beta2": 0.95,
        "sophiag_rho": 0.01,
        "split_rule": "legacy",
        "final_epoch_threshold": 0.8,
    },
    "bigscience": {"split_rule": "legacy", "final_epoch_threshold": 0.95},
}
"""Defaults of one of them alone, and what their code does without a flag: fp32 unless `--bf16` or
`--fp16` is given, the rule by which documents are divided, the threshold of the last epoch."""

KEPT = {
    "exit_on_missing_checkpoint": "a misspelt `--load` would begin a new run",
    "manual_gc": "no result depends on it",
    "manual_gc_interval": "no result depends on it",
    "muon_momentum": "differs between versions",
    "muon_nesterov": "differs between versions",
    "muon_num_ns_steps": "differs between versions",
    "lr_cooldown_fraction": "of one fork, for a decay that has to be asked for",
    "zero_stage": "of DeepSpeed's engine",
    "distributed_backend": "the device's",
    "num_query_groups": "without effect unless groups are asked for",
    "dataloader_type": "none there, which is `single`",
}
"""Options of Megatron's flags that `--defaults` leaves alone, with the reason."""

FILES = {
    "megatron": "megatron_lm.tsv",
    "megatron-deepspeed": "argonne_megatron_deepspeed.tsv",
    "bigscience": "bigscience_megatron_deepspeed.tsv",
}


@pytest.mark.parametrize("name", MEGATRON_DEFAULTS)
def test_values(name: str) -> None:
    """Each option has Megatron's default, and the source says so where lmcore's is another."""
    loaded = load_config(["--defaults", name])
    for option, value in {**THEIRS, **OF_ONE[name]}.items():
        assert loaded.value(option) == value, option
        own = run_options()[option].default == value
        shown = str(loaded.provenance[option])
        assert shown == "default" if own else shown.endswith("'s default"), option
    assert not any(loaded.given(option) for option in loaded.options)
    assert not validate(loaded).loaded.problems


@pytest.mark.parametrize("name", MEGATRON_DEFAULTS)
def test_every_flag_with_a_default(name: str, shared_data: Path) -> None:
    """Each flag of the fork that is an option here is compared, or has a reason or no default."""
    rows = (shared_data / "flags" / FILES[name]).read_text().splitlines()[1:]
    flags = [row.split("\t")[0] for row in rows if row.endswith("\town")]
    options = {flag.removeprefix("--no-").removeprefix("--").replace("-", "_") for flag in flags}
    open_ones = options - THEIRS.keys() - OF_ONE[name].keys() - KEPT.keys()
    for option in open_ones:
        assert run_options()[option].default in (None, (), False, True) or option in {
            *("num_layers", "hidden_size", "num_attention_heads", "seq_length"),
            *("micro_batch_size", "lr"),  # required there
        }, option
    assert len(flags) > 50


def test_files_flags_and_presets_are_above() -> None:
    """Megatron's defaults are the lowest source."""
    loaded = load_config(["--defaults", "megatron", "--preset", "gpt2-124m", "--eval-iters", "3"])
    assert (loaded.value("eval_iters"), loaded.value("eval_interval")) == (3, 1000)
    assert str(loaded.provenance["lr_warmup_fraction"]) == "preset: gpt2-124m"
    assert load_config(["--defaults", "lmcore"]).config == load_config([]).config
    with pytest.raises(ConfigError, match=r"--defaults megatron-lm`: unknown choice"):
        load_config(["--defaults", "megatron-lm"])


def test_the_run_file_repeats_them(tmp_path: Path) -> None:
    """A run's file sets what `--defaults` set, with its source; it is nothing that a user gave."""
    loaded = load_config(["--defaults", "megatron-deepspeed", "--train-iters", "9"])
    plan = resolve(validate(loaded), tokenizer=TokenizerIdentity(vocab_size=257))
    path = tmp_path / "config.yaml"
    path.write_text(write_run_file(plan))
    again = load_config([str(path)])
    assert again.config.optimizer == loaded.config.optimizer
    assert again.config.model.hidden_dropout == 0.1
    assert again.provenance["hidden_dropout"].source == "Megatron-DeepSpeed's default"
    assert note_without_effect(again) is None, "settings of Sophia are not the user's"


def test_a_translated_command_names_what_differs() -> None:
    """A line for each default in force that has an effect, unless `--defaults` chooses."""
    (_, note) = load_config(["--batch-size", "4"]).notices
    head, *rows = note.splitlines()
    assert head.startswith("defaults that differ from Megatron's; `--defaults megatron` takes ")
    assert rows[:3] == [
        "  `lr_decay_style`: cosine; Megatron: linear",
        "  `lr_warmup_fraction`: 0.05; Megatron: none",
        "  `attention_dropout`: 0.0; Megatron: 0.1",
    ]
    assert "  `precision`: of the device; Megatron: fp32" in rows
    assert "calculate_per_token_loss" not in note
    for flags in (["--eod-mask-loss"], ["--model-family", "bert"]):
        (_, masked) = load_config(["--batch-size", "4", *flags]).notices
        assert "  `calculate_per_token_loss`: true; Megatron: false" in masked.splitlines()
    flags = "--batch-size 4 --lr-decay-style linear --lr-warmup-iters 1 --bf16 --eval-interval 0"
    (_, note) = load_config(f"{flags} --hidden-dropout 0 --attention-dropout 0".split()).notices
    assert note.splitlines()[1:] == [
        "  `include_padding_in_loss`: false; Megatron: true",
        "  `split_rule`: megatron-core; Megatron-DeepSpeed, BigScience: legacy",
        "  `final_epoch_threshold`: 0.8; BigScience: 0.95",
    ]
    for line in ("--batch-size 4 --defaults megatron", "--batch-size 4 --defaults lmcore"):
        assert len(load_config(line.split()).notices) == 1
    assert load_config(["--micro-batch-size", "4"]).notices == ()


def test_a_run_that_continues_has_its_own(tmp_path: Path) -> None:
    """`--continue` takes all settings from the run."""
    (tmp_path / "config.yaml").write_text("training:\n  train_iters: 4\n")
    with pytest.raises(ConfigError, match="cannot be combined with `--continue`") as caught:
        load_config(["--continue", str(tmp_path), "--defaults", "megatron"])
    assert caught.value.hint == "leave it out: all settings are the run's"
    assert len(load_config(["--continue", str(tmp_path), "--batch-size", "4"]).notices) == 1
