"""Settings without effect: each option is always effective, or declares its condition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lmcore.config.derived.layout import ParallelLayout
from lmcore.config.load import load_config
from lmcore.config.rules.needs import note_without_effect
from lmcore.config.section import run_options
from lmcore.config.validate import problems_of

_ALWAYS = """
num_layers hidden_size num_attention_heads kv_channels group_query_attention ffn_hidden_size
swiglu normalization seq_length max_position_embeddings position_embedding_type
untie_embeddings_and_output_weights add_bias_linear layernorm_epsilon init_method_std
attention_dropout hidden_dropout make_vocab_size_divisible_by
train_iters train_samples micro_batch_size global_batch_size exit_interval
exit_duration_in_mins seed compile step_graph async_metrics manual_gc sample_tokens
data_path train_data_path train_weighted_split_paths data_file_list corpus train_data
split_rule blend_rule data_cache_path dataloader_type final_epoch_threshold
reset_attention_mask eod_mask_loss num_prefetch vocab_size tokenizer_type verify_data
optimizer lr lr_decay_style lr_warmup_fraction weight_decay clip_grad
save load save_interval save_interval_mins keep_last async_save save_optim save_rng
device plugin_off precision recompute ops strict_ops deterministic num_threads
engine tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
nproc_per_node
log_interval progress tensorboard profile
"""
ALWAYS = frozenset(_ALWAYS.split())
"""Options that have an effect in every run."""

SAMPLES = "--train-samples 64"
TWO = "--nproc-per-node 2"
PIPELINE = f"{TWO} --pipeline-model-parallel-size 2 --global-batch-size 32"
OWN = "--train-data shakespeare"

CASES = {
    # option: (flag that is given, other settings with which it has an effect, and without)
    "num_query_groups": ("--num-query-groups 2", "--group-query-attention", ""),
    "rotary_base": ("--rotary-base 500", "--position-embedding-type rope", ""),
    "rotary_percent": ("--rotary-percent 0.5", "--position-embedding-type rope", ""),
    "use_rope_scaling": ("--use-rope-scaling", "--position-embedding-type rope", ""),
    "rope_scaling_factor": (
        "--rope-scaling-factor 4",
        "--position-embedding-type rope --use-rope-scaling",
        "--position-embedding-type rope",
    ),
    "add_qkv_bias": ("--add-qkv-bias", "--no-add-bias-linear", ""),
    "rampup_batch_size": (
        "--rampup-batch-size 8 8 16",
        f"{SAMPLES} --global-batch-size 16",
        "--global-batch-size 16",
    ),
    "eval_interval": ("--eval-interval 5", "", "--eval-iters 0"),
    "eval_iters": ("--eval-iters 5", "", "--eval-interval 0"),
    "manual_gc_interval": ("--manual-gc-interval 5", "", "--no-manual-gc"),
    "sample_prompt": ("--sample-prompt A", "", "--sample-tokens 0"),
    "valid_data": ("--valid-data shakespeare", OWN, f"{OWN} --eval-iters 0"),
    "test_data": (
        "--test-data shakespeare",
        f"{OWN} --valid-data shakespeare",
        f"{OWN} --valid-data shakespeare --eval-iters 0",
    ),
    "valid_data_path": (
        "--valid-data-path {data}",
        "--train-data-path {data}",
        "--train-data-path {data} --eval-interval 0",
    ),
    "test_data_path": (
        "--test-data-path {data}",
        "--train-data-path {data} --eval-interval 0",
        "--train-data-path {data} --eval-iters 0",
    ),
    "valid_weighted_split_paths": (
        "--valid-weighted-split-paths V:_1_0:0.5_{data}",
        "--train-data-path {data}",
        "--train-data-path {data} --eval-interval 0",
    ),
    "test_weighted_split_paths": (
        "--test-weighted-split-paths T:_1_0:0.5_{data}",
        "--train-data-path {data} --eval-interval 0",
        "--train-data-path {data} --eval-iters 0",
    ),
    "lazy_loader": ("--lazy-loader", OWN, "--data-path {data}"),
    "split": ("--split 90,5,5", "", "--train-data-path {data} --eval-iters 0"),
    "reset_position_ids": ("--reset-position-ids", "", "--position-embedding-type none"),
    "vocab_file": (
        "--vocab-file {text}",
        "--tokenizer-type BertWordPieceCase",
        "--tokenizer-type ByteTokenizer",
    ),
    "merge_file": (
        "--merge-file {text}",
        "--tokenizer-type GPT2BPETokenizer --vocab-file {text}",
        "--tokenizer-type ByteTokenizer",
    ),
    "tokenizer_model": (
        "--tokenizer-model {text}",
        "--tokenizer-type SentencePieceTokenizer",
        "--tokenizer-type ByteTokenizer",
    ),
    "tokenizer_name_or_path": (
        "--tokenizer-name-or-path {text}",
        "--tokenizer-type HFTokenizer",
        "--tokenizer-type ByteTokenizer",
    ),
    "vocab_extra_ids": (
        "--vocab-extra-ids 2",
        "--tokenizer-type BertWordPieceCase --vocab-file {text}",
        "--tokenizer-type ByteTokenizer",
    ),
    "add_special_tokens": (
        "--no-add-special-tokens",
        "--tokenizer-type Llama2Tokenizer --tokenizer-model {text}",
        "--tokenizer-type ByteTokenizer",
    ),
    "parse_special_tokens": (
        "--parse-special-tokens",
        "--tokenizer-type SentencePieceTokenizer --tokenizer-model {text}",
        "--tokenizer-type ByteTokenizer",
    ),
    "optimizer_args": ("--optimizer-args eps=1", "--optimizer torch.optim:NAdam", ""),
    "optimizer_elementwise": ("--optimizer-elementwise", "--optimizer torch.optim:NAdam", ""),
    "min_lr": ("--min-lr 1e-4", "", "--lr-decay-style constant"),
    "lr_decay_iters": (
        "--lr-decay-iters 9",
        "",
        "--lr-decay-style inverse-square-root --lr-warmup-fraction 0",
    ),
    "lr_decay_samples": (
        "--lr-decay-samples 60",
        SAMPLES,
        f"{SAMPLES} --lr-decay-style constant --lr-warmup-samples 8",
    ),
    "lr_warmup_iters": ("--lr-warmup-iters 2", "", SAMPLES),
    "lr_warmup_samples": ("--lr-warmup-samples 8", SAMPLES, ""),
    "lr_cooldown_fraction": (
        "--lr-cooldown-fraction 0.5",
        "--lr-decay-style constant-cooldown",
        "",
    ),
    "adam_beta1": ("--adam-beta1 0.8", "--optimizer lamb", "--optimizer sgd"),
    "adam_beta2": ("--adam-beta2 0.8", "", "--optimizer sophia"),
    "adam_eps": ("--adam-eps 1e-7", "--optimizer muon", "--optimizer sgd"),
    "sgd_momentum": ("--sgd-momentum 0.8", "--optimizer sgd", ""),
    "muon_momentum": ("--muon-momentum 0.8", "--optimizer muon", ""),
    "muon_nesterov": ("--no-muon-nesterov", "--optimizer muon", ""),
    "muon_num_ns_steps": ("--muon-num-ns-steps 6", "--optimizer muon", ""),
    "sophiag_beta1": ("--sophiag-beta1 0.8", "--optimizer sophia", ""),
    "sophiag_beta2": ("--sophiag-beta2 0.8", "--optimizer sophia", ""),
    "sophiag_rho": ("--sophiag-rho 0.8", "--optimizer sophia", ""),
    "sophiag_hessian_interval": ("--sophiag-hessian-interval 5", "--optimizer sophia", ""),
    "shampoo_eps": ("--shampoo-eps 1e-9", "--optimizer shampoo", ""),
    "shampoo_max_preconditioner_dim": (
        "--shampoo-max-preconditioner-dim 8",
        "--optimizer shampoo",
        "",
    ),
    "shampoo_precondition_frequency": (
        "--shampoo-precondition-frequency 8",
        "--optimizer shampoo",
        "",
    ),
    "load_optim": ("--no-load-optim", "--load RUN", ""),
    "load_rng": ("--no-load-rng", "--load RUN", "--load RUN --finetune"),
    "finetune": ("--finetune", "--load RUN", ""),
    "exit_on_missing_checkpoint": ("--no-exit-on-missing-checkpoint", "--load RUN", ""),
    "use_checkpoint_opt_param_scheduler": (
        "--use-checkpoint-opt-param-scheduler",
        "--load RUN",
        "--load RUN --finetune",
    ),
    "override_opt_param_scheduler": ("--override-opt-param-scheduler", "--load RUN", ""),
    "change_blend": ("--change-blend", "--load RUN", ""),
    "override_data_order": ("--override-data-order", "--load RUN", "--load RUN --finetune"),
    "change_tokenizer": ("--change-tokenizer", "--load RUN --finetune", ""),
    "loss_scale": ("--loss-scale 8", "--precision fp16", "--precision bf16"),
    "initial_loss_scale": ("--initial-loss-scale 8", "--precision fp16", "--precision bf16"),
    "min_loss_scale": ("--min-loss-scale 8", "--precision fp16", "--precision fp32"),
    "loss_scale_window": (
        "--loss-scale-window 8",
        "--precision fp16",
        "--precision fp16 --loss-scale 8",
    ),
    "hysteresis": ("--hysteresis 8", "--precision fp16", "--precision fp32"),
    "recompute_method": ("--recompute-method block", "--recompute full", ""),
    "recompute_num_layers": (
        "--recompute-num-layers 2",
        "--recompute full",
        "--recompute selective",
    ),
    "sequence_parallel": ("--sequence-parallel", f"{TWO} --tensor-model-parallel-size 2", TWO),
    "num_layers_per_virtual_pipeline_stage": (
        "--num-layers-per-virtual-pipeline-stage 1",
        PIPELINE,
        "",
    ),
    "pipeline_schedule": ("--pipeline-schedule gpipe", PIPELINE, TWO),
    "use_distributed_optimizer": ("--use-distributed-optimizer", TWO, "--nproc-per-node 1"),
    "zero_stage": ("--zero-stage 3", TWO, f"{TWO} --tensor-model-parallel-size 2"),
    "data_parallel_replicas": (
        "--data-parallel-replicas 2",
        "--nproc-per-node 4 --zero-stage 1",
        "--nproc-per-node 4",
    ),
    "cpu_offload": ("--cpu-offload", "--engine deepspeed", ""),
    "deepspeed_config": ("--deepspeed-config {json}", "--engine deepspeed", ""),
    "distributed_backend": ("--distributed-backend gloo", TWO, "--nproc-per-node 1"),
    "distributed_timeout_minutes": (
        "--distributed-timeout-minutes 5",
        TWO,
        "--nproc-per-node 1",
    ),
    "name": ("--name mine", "", "--save DIR"),
    "tensorboard_dir": ("--tensorboard-dir DIR", "", "--no-tensorboard"),
    "tensorboard_log_interval": ("--tensorboard-log-interval 5", "", "--no-tensorboard"),
    "tensorboard_queue_size": ("--tensorboard-queue-size 5", "", "--no-tensorboard"),
    "profile_step_start": ("--profile-step-start 9", "--profile", ""),
    "profile_step_end": ("--profile-step-end 100", "--profile", "--train-iters 5"),
    "profile_ranks": ("--profile-ranks 0", "--profile", ""),
    "profile_memory": ("--profile-memory", "--profile", ""),
    "profile_shapes": ("--profile-shapes", "--profile", ""),
    "profile_stacks": ("--profile-stacks", "--profile", ""),
}
"""Settings with which each conditional option has an effect, and settings without which not."""


def test_every_option_has_decided() -> None:
    """A new option is always effective, or declares its condition and has a case."""
    options = run_options()
    assert {name for name, option in options.items() if not option.needs} == ALWAYS
    assert {name for name, option in options.items() if option.needs} == CASES.keys()


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that gives note and errors of the settings on a command line."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # DeepSpeed
    for name in ("data.bin", "data.idx", "data.meta.json", "text"):
        (tmp_path / name).touch()
    (tmp_path / "ds.json").write_text("{}")
    files = {name: str(tmp_path / name) for name in ("data", "text")}
    files["json"] = str(tmp_path / "ds.json")

    def check(line: str) -> str:
        words = [word.format(**files).replace("_1_0", " 1 0") for word in line.split()]
        words = [word.replace("0.5_", "0.5 ") for word in words]
        loaded = load_config(words)
        processes = loaded.config.parallel.nproc_per_node
        layout = ParallelLayout.of(loaded.config, processes) if processes else None
        problems = problems_of(loaded, world_size=processes)
        return "\n".join([note_without_effect(loaded, layout=layout) or "", *map(str, problems)])

    return check


@pytest.mark.parametrize("name", CASES)
def test_a_setting_without_effect_is_named(found: Callable[[str], str], name: str) -> None:
    """It is in the note or an error without its condition, and in neither with it."""
    given, effective, idle = CASES[name]
    shown = "`" + given.split()[0]
    assert shown not in found(f"{given} {effective}")
    assert shown in found(f"{given} {idle}")


def test_each_setting_comes_once(found: Callable[[str], str]) -> None:
    """All are in one line, each with all of its conditions."""
    note = found("--sequence-parallel --profile-memory --lr-cooldown-fraction 0.2").strip()
    assert note.startswith("settings without effect: ")
    assert note.count("\n") == 0
    assert "`--sequence-parallel` (needs `--tensor-model-parallel-size` above 1)" in note
    assert "`--lr-cooldown-fraction 0.2`" in note  # the default's value, but asked for


def test_a_value_that_asks_for_nothing(found: Callable[[str], str]) -> None:
    """A switch that stays off, an empty value and 0 for off need nothing."""
    line = "--no-sequence-parallel --zero-stage 0 --loss-scale 0 --sample-prompt none"
    more = "--eval-iters 0 --eval-interval 0 --nproc-per-node 1 --precision bf16 --sample-tokens 0"
    assert found(f"{line} {more}").strip() == ""


def test_defaults_of_a_file_and_values_of_a_preset(
    tmp_path: Path, found: Callable[[str], str]
) -> None:
    """The `config.yaml` of a run may hold every default; a preset's values may be overridden."""
    file = tmp_path / "run.yaml"
    lines = "profile:\n  profile_step_end: 12\n  profile_memory: {}\n"
    file.write_text(lines.format("false"))
    assert found(str(file)).strip() == ""
    file.write_text(lines.format("true"))
    assert "`profile_memory: True` of " in found(str(file))
    preset = "--preset llama-1b --position-embedding-type none --lr-decay-style constant"
    assert found(preset).strip() == ""
