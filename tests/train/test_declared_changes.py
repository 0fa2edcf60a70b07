"""A resumed run with each setting changed: what its `on_resume` declares is what happens.

`test_changed_settings.py` has the cases of the settings that declare `CHECKED`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from changed_flags import changed

from lmcore.config.option import CHECKED, FREE
from lmcore.config.section import run_options

LENGTH = "--train-iters 6 --save-interval 3 --global-batch-size 8 --seed 7"
VALID = "--split 80,10,10 --eval-interval 2 --eval-iters 1"
BASES = {
    "gpt": f"{LENGTH} {VALID}",
    "decay": f"{LENGTH} --lr-decay-iters 9 --lr-warmup-iters 2 --lr-warmup-fraction 0",
    "samples": "--train-samples 48 --save-interval 3 --global-batch-size 8 --lr-decay-samples 96",
    "parts": "--train-iters 6 --save-interval 3 --train-data-path {same} --valid-data-path {third}"
    " --test-data-path {fourth} --eval-interval 2 --eval-iters 1",
    "weighted": "--train-iters 6 --save-interval 3 {ranges} --eval-interval 2 --eval-iters 1",
    "names": "--train-iters 6 --save-interval 3 --train-data shakespeare --valid-data shakespeare"
    " --test-data shakespeare --eval-interval 2 --eval-iters 1",
    "wordpiece": f"{LENGTH} --data-path {{words}} --tokenizer-type BertWordPieceCase"
    " --vocab-file {vocabulary}",
    "sgd": f"{LENGTH} --optimizer sgd",
    "muon": f"{LENGTH} --optimizer muon",
    "sophia": f"{LENGTH} --optimizer sophia --sophiag-hessian-interval 2",
    "shampoo": f"{LENGTH} --optimizer shampoo --shampoo-precondition-frequency 2",
    "class": f"{LENGTH} --optimizer torch.optim:NAdam --optimizer-args momentum_decay=0.004",
    "fp16": f"{LENGTH} --precision fp16 --initial-loss-scale 1024 --loss-scale-window 2",
    "full": f"{LENGTH} --recompute full --hidden-dropout 0.1",
    "early": f"{LENGTH} {VALID} --early-stop 9",
    "profile": f"{LENGTH} --profile --profile-step-start 3 --profile-step-end 5",
    "gc": f"{LENGTH} --manual-gc-interval 1",
    "sample": f"{VALID} {LENGTH} --sample-tokens 4",
}


CHANGES: Mapping[str, tuple[str, str]] = {
    "init_method_std": ("gpt", "--init-method-std 0.5"),
    "attention_dropout": ("gpt", "--attention-dropout 0.1"),
    "hidden_dropout": ("gpt", "--hidden-dropout 0.1"),
    "train_iters": ("decay", "--train-iters 5"),
    "train_samples": ("samples", "--train-samples 40"),
    "micro_batch_size": ("gpt", "--micro-batch-size 2"),
    "include_padding_in_loss": ("gpt", "--include-padding-in-loss"),
    "eval_interval": ("gpt", "--eval-interval 1"),
    "eval_iters": ("gpt", "--eval-iters 2"),
    "exit_interval": ("gpt", "--exit-interval 5"),
    "exit_duration_in_mins": ("gpt", "--exit-duration-in-mins 1000"),
    "stop_timeout_minutes": ("gpt", "--stop-timeout-minutes 3"),
    "early_stop": ("gpt", "--early-stop 9"),
    "early_stop_delta": ("early", "--early-stop-delta 0.5"),
    "kill_switch_path": ("gpt", "--kill-switch-path {folder}/stop"),
    "compile": ("gpt", "--compile"),
    "async_metrics": ("gpt", "--no-async-metrics"),
    "check_device_interval": ("gpt", "--check-device-interval 7"),
    "manual_gc": ("gpt", "--no-manual-gc"),
    "manual_gc_interval": ("gc", "--manual-gc-interval 2"),
    "sample_prompt": ("sample", "--sample-prompt x"),
    "sample_tokens": ("gpt", "--sample-tokens 4"),
    "valid_data_path": ("parts", "--valid-data-path {other}"),
    "test_data_path": ("parts", "--test-data-path {other}"),
    "valid_weighted_split_paths": ("weighted", "{valid_ranges}"),
    "test_weighted_split_paths": ("weighted", "{test_ranges}"),
    "test_data": ("names", "--test-data -"),
    "lazy_loader": ("names", "--lazy-loader"),
    "corpora": ("names", "--corpora web=web.jsonl"),
    "data_cache_path": ("gpt", "--data-cache-path {folder}/cache"),
    "verify_data": ("gpt", "--verify-data"),
    "reset_position_ids": ("gpt", "--reset-position-ids"),
    "reset_attention_mask": ("gpt", "--reset-attention-mask"),
    "eod_mask_loss": ("gpt", "--eod-mask-loss"),
    "num_prefetch": ("gpt", "--num-prefetch 1"),
    "vocab_file": ("wordpiece", "--vocab-file {vocabulary_copy}"),
    "optimizer_args": ("class", "--optimizer-args momentum_decay=0.008"),
    "optimizer_elementwise": ("class", "--optimizer-elementwise"),
    "weight_decay": ("gpt", "--weight-decay 0.5"),
    "adam_beta1": ("gpt", "--adam-beta1 0.8"),
    "adam_beta2": ("gpt", "--adam-beta2 0.9"),
    "adam_eps": ("gpt", "--adam-eps 1e-3"),
    "sgd_momentum": ("sgd", "--sgd-momentum 0.5"),
    "muon_momentum": ("muon", "--muon-momentum 0.5"),
    "muon_nesterov": ("muon", "--no-muon-nesterov"),
    "muon_num_ns_steps": ("muon", "--muon-num-ns-steps 2"),
    "sophiag_beta1": ("sophia", "--sophiag-beta1 0.5"),
    "sophiag_beta2": ("sophia", "--sophiag-beta2 0.5"),
    "sophiag_rho": ("sophia", "--sophiag-rho 0.5"),
    "sophiag_hessian_interval": ("sophia", "--sophiag-hessian-interval 1"),
    "shampoo_eps": ("shampoo", "--shampoo-eps 1e-2"),
    "shampoo_precondition_frequency": ("shampoo", "--shampoo-precondition-frequency 1"),
    "clip_grad": ("gpt", "--clip-grad 0.01"),
    "save": ("gpt", "--save {folder}/elsewhere"),
    "save_interval": ("gpt", "--save-interval 1"),
    "save_interval_mins": ("gpt", "--save-interval-mins 0.0001"),
    "keep_last": ("gpt", "--keep-last 1"),
    "keep_every": ("gpt", "--keep-every 6 --keep-last 1"),
    "save_best": ("gpt", "--save-best"),
    "async_save": ("gpt", "--async-save --save-interval 1"),
    "save_final": ("gpt", "--no-save-final"),
    "save_optim": ("gpt", "--no-save-optim"),
    "save_rng": ("gpt", "--no-save-rng"),
    "load_rng": ("gpt", "--no-load-rng"),
    "exit_on_missing_checkpoint": ("gpt", "--no-exit-on-missing-checkpoint"),
    "use_checkpoint_opt_param_scheduler": ("gpt", "--use-checkpoint-opt-param-scheduler"),
    "schedule": ("gpt", "--schedule keep"),
    "override_opt_param_scheduler": ("gpt", "--override-opt-param-scheduler"),
    "change_blend": ("gpt", "--change-blend"),
    "override_data_order": ("gpt", "--override-data-order"),
    "change_tokenizer": ("gpt", "--change-tokenizer"),
    "device": ("gpt", "--device cpu"),
    "precision": ("gpt", "--precision bf16"),
    "loss_scale": ("fp16", "--loss-scale 64 --initial-loss-scale - --loss-scale-window -"),
    "initial_loss_scale": ("fp16", "--initial-loss-scale 64"),
    "min_loss_scale": ("fp16", "--min-loss-scale 512"),
    "loss_scale_window": ("fp16", "--loss-scale-window 1"),
    "hysteresis": ("fp16", "--hysteresis 1"),
    "recompute": ("gpt", "--recompute full"),
    "recompute_method": ("full", "--recompute-method block"),
    "recompute_num_layers": ("full", "--recompute-num-layers 2"),
    "ops": ("gpt", "--ops bias_dropout_add=reference"),
    "strict_ops": ("gpt", "--strict-ops"),
    "deterministic": ("gpt", "--deterministic"),
    "num_threads": ("gpt", "--num-threads 2"),
    "flush_subnormals": ("gpt", "--no-flush-subnormals"),
    "name": ("gpt", "--name another"),
    "log_interval": ("gpt", "--log-interval 2"),
    "log_params_norm": ("gpt", "--log-params-norm"),
    "log_num_zeros_in_grad": ("gpt", "--log-num-zeros-in-grad"),
    "log_memory_to_tensorboard": ("gpt", "--log-memory-to-tensorboard"),
    "progress": ("gpt", "--progress none"),
    "tensorboard": ("gpt", "--no-tensorboard"),
    "tensorboard_dir": ("gpt", "--tensorboard-dir {folder}/events"),
    "tensorboard_log_interval": ("gpt", "--tensorboard-log-interval 2"),
    "tensorboard_queue_size": ("gpt", "--tensorboard-queue-size 1"),
    "tensorboard_tags": ("gpt", "--tensorboard-tags megatron"),
    **dict.fromkeys(
        (
            *("wandb_project", "wandb_entity", "wandb_exp_name", "wandb_save_dir"),
            *("mlflow_experiment", "mlflow_tracking_uri", "codecarbon_dir", "codecarbon_country"),
        ),
        ("gpt", "--wandb-project p --mlflow-experiment e --codecarbon-dir {folder}/energy"),
    ),
    "profile": ("gpt", "--profile --profile-step-start 3 --profile-step-end 5"),
    "profile_step_start": ("profile", "--profile-step-start 4"),
    "profile_step_end": ("profile", "--profile-step-end 4"),
    "profile_memory": ("profile", "--profile-memory"),
    "profile_shapes": ("profile", "--profile-shapes"),
    "profile_stacks": ("profile", "--profile-stacks"),
}
"""Base and change of each setting that one process can try."""

TWO = "--nproc-per-node 2"
SAME_ROWS = "--make-vocab-size-divisible-by 4"  # as many rows of the vocabulary as with 8
LAYOUTS: Mapping[str, tuple[str, str]] = {
    "nproc_per_node": ("", TWO),
    "tensor_model_parallel_size": (TWO, f"--tensor-model-parallel-size 2 {SAME_ROWS}"),
    "sequence_parallel": (TWO, f"--tensor-model-parallel-size 2 --sequence-parallel {SAME_ROWS}"),
    "pipeline_model_parallel_size": (TWO, "--pipeline-model-parallel-size 2"),
    "num_layers_per_virtual_pipeline_stage": (
        f"{TWO} --pipeline-model-parallel-size 2",
        "--num-layers-per-virtual-pipeline-stage 1",
    ),
    "pipeline_schedule": (
        f"{TWO} --pipeline-model-parallel-size 2",
        "--pipeline-schedule zero-bubble",
    ),
    "context_parallel_size": (TWO, "--context-parallel-size 2"),
    "use_distributed_optimizer": (TWO, "--use-distributed-optimizer"),
    "zero_stage": (TWO, "--zero-stage 3"),
    "profile_ranks": (
        f"{TWO} --profile --profile-step-start 3 --profile-step-end 5",
        "--profile-ranks 1",
    ),
    "check_replicas_interval": (TWO, "--check-replicas-interval 1"),
    "distributed_backend": (TWO, "--distributed-backend gloo"),
    "distributed_timeout_minutes": (TWO, "--distributed-timeout-minutes 5"),
}
"""Base and change of each setting that needs two processes."""

CLOSE = 1e-4
"""Relative: another layout, or other kernels, sum in another order."""


@pytest.fixture(scope="module")
def paths(data_prefix: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files by the names that `BASES` and `CHANGES` use."""
    folder = tmp_path_factory.mktemp("declared")
    found = {"folder": str(folder), "same": data_prefix}
    for name in ("other", "third", "fourth"):
        for suffix in (".bin", ".idx", ".meta.json"):
            shutil.copy(data_prefix + suffix, folder / f"{name}{suffix}")
        found[name] = str(folder / name)
    for suffix in (".bin", ".idx"):  # of any tokenizer
        shutil.copy(data_prefix + suffix, folder / f"words{suffix}")
    found["words"] = str(folder / "words")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(300))]
    for name in ("vocabulary", "vocabulary_copy"):
        (folder / name).mkdir()
        found[name] = str(folder / name / "vocab.txt")
        Path(found[name]).write_text("\n".join(words) + "\n", "utf-8")
    for name, parts in {
        "ranges": {"train": "same", "valid": "third", "test": "fourth"},
        "valid_ranges": {"train": "same", "valid": "other", "test": "fourth"},
        "test_ranges": {"train": "same", "valid": "third", "test": "other"},
    }.items():
        text = "data:\n"
        for part, source in parts.items():
            text += f"  {part}_weighted_split_paths: ['part: 1 0:1 {found[source]}']\n"
        found[name] = str(folder / f"{name}.yaml")
        Path(found[name]).write_text(text, "utf-8")
    return found


WITHOUT_PREFIX = ("parts", "weighted", "names")
"""Bases with their own data sources."""

SPECIAL: Mapping[str, str] = {
    "load": "every case gives it",
    "mask_prob": "only BERT's samples have it: tests/unit/families/bert",
    "short_seq_prob": "as mask_prob",
    "decoder_seq_length": "only T5's samples have it: tests/unit/families/t5",
    "pipeline_model_parallel_split_rank": "only T5 has it: test_t5.py",
    **dict.fromkeys(
        (
            "retro_encoder_hidden_dropout",
            "retro_encoder_attention_dropout",
            "retro_attention_gate",
            "retro_verify_neighbor_count",
        ),
        "only Retro has it: test_retro.py",
    ),
    "query_in_block_prob": "only ICT's samples have it: tests/unit/data/dataset/test_ict.py",
    "bert_load": "a run that resumes does not begin with other weights: test_ict.py",
    "finetune": "it is no resume: test_resume.py, test_changed_settings.py",
    "ckpt_step": "it chooses the checkpoint: test_continue.py",
    "use_checkpoint_args": "it takes the checkpoint's settings: test_continue.py",
    "load_optim": "the state that it leaves out changes the steps: test_endings.py",
    "make_vocab_size_divisible_by": "a warning of its own: test_changed_settings.py",
    "pad_vocab_size_to": "as make_vocab_size_divisible_by: test_padded_vocabulary.py",
    "vocab_size": "it is part of a tokenizer, which is compared: test_changed_settings.py",
    "merge_file": "as vocab_file",
    "tokenizer_model": "as vocab_file",
    "tokenizer_name_or_path": "as vocab_file",
    "add_special_tokens": "only a pretrained tokenizer takes it",
    "step_graph": "the CPU cannot capture graphs",
    "engine": "test_deepspeed.py",
    **dict.fromkeys(
        ("eval_tasks", "eval_tasks_data", "eval_tasks_interval", "eval_tasks_limit"),
        "test_eval_tasks.py",
    ),
    "valid_data": "there is only one named text here; sets of data: test_valid_sets.py",
    "parse_special_tokens": "only a tokenizer of some types takes it",
    "plugin_off": "where these tests run, all plugins but `cpu` may be absent",
    "data_parallel_replicas": "it needs four processes",
    "task_valid_data": "only a run with a task has it: test_task.py",
    "calculate_per_token_loss": "test_masked_targets.py",
    "cpu_offload": "test_deepspeed.py",
    "deepspeed_config": "test_deepspeed.py",
}
"""Settings without a case here, each with the reason."""


def resumed_alike(run: Any, same: Any, *, exactly: bool) -> None:
    """Assert that a run with a changed setting took the steps of the unchanged one."""
    assert run.status == 0, run.err
    assert "settings differ" not in run.err
    changed, unchanged = run.curve(), same.curve()[: len(run.rows)]
    assert changed
    if exactly:
        assert changed == unchanged
        return
    for row, other in zip(changed, unchanged, strict=True):
        numbers = [value or 0 for value in other]  # no validation: None
        assert [value or 0 for value in row] == pytest.approx(numbers, rel=CLOSE)


def test_every_setting_has_a_case() -> None:
    """A new setting is tried with a change, or has a reason."""
    declared = {name for name, option in run_options().items() if option.on_resume != CHECKED}
    assert declared == {*CHANGES, *LAYOUTS, *SPECIAL}
    assert len(declared) == len(CHANGES) + len(LAYOUTS) + len(SPECIAL)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_change_is_what_its_setting_declares(
    train: Any, train_once: Any, paths: dict[str, str], name: str
) -> None:
    """A free change leaves every number equal, any other is named in the warning."""
    base, change = CHANGES[name]
    flags = BASES[base].format(**paths)
    prefix = None if base in WITHOUT_PREFIX else paths["same"]
    saved = train_once(flags, prefix)
    load = f"--load {saved.directory}/checkpoints/iter_0000003"
    run = train("changed", changed(f"{flags} {load}", change.format(**paths)), prefix)
    if name == "save":
        run = replace(run, directory=Path(paths["folder"]) / "elsewhere")
    if run_options()[name].on_resume == "warn":
        assert run.status == 0, run.err
        assert f"`{name}` " in run.err.partition("settings differ from the checkpoint's: ")[2]
        return
    same = train_once(f"{flags} {load}", prefix)
    assert "settings differ" not in same.err
    resumed_alike(run, same, exactly=run_options()[name].on_resume == FREE)


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_a_changed_layout_takes_the_same_steps(
    train_once: Any, start: Any, finish: Any, name: str
) -> None:
    """Two processes take the steps of one, or of two with another layout, but for rounding."""
    base, change = LAYOUTS[name]
    flags = f"{BASES['gpt']} {base}"
    saved = train_once(BASES["gpt"])
    load = f"--load {saved.directory}/checkpoints/iter_0000003"
    same = train_once(f"{BASES['gpt']} {load}")
    run = finish(start("changed", f"{flags} {change} {load}"), "changed")
    resumed_alike(run, same, exactly=False)


@pytest.mark.full
@pytest.mark.distributed
def test_another_number_of_processes_with_dropout_is_named(
    train_once: Any, start: Any, finish: Any
) -> None:
    """Each process draws its own random numbers: the steps differ, and a warning says so."""
    flags = f"{BASES['gpt']} --hidden-dropout 0.1"
    saved = train_once(flags)
    load = f"--load {saved.directory}/checkpoints/iter_0000003"
    many = f"--nproc-per-node 2 --micro-batch-size 4 {load}"
    run = finish(start("changed", f"{flags} {many}"), "changed")
    assert run.status == 0, run.err
    assert "warning: random states are seeded from seed and step" in run.err
    assert run.curve() != train_once(f"{flags} {load}").curve()
