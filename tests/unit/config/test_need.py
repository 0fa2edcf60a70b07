"""Settings without effect: each option is always effective, or declares its condition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from stand_in_engine import stand_in_for_deepspeed

from lmcore.config.derived.layout import ParallelLayout
from lmcore.config.load import load_config
from lmcore.config.rules.needs import note_without_effect
from lmcore.config.section import run_options
from lmcore.config.validate import problems_of

_ALWAYS = """
num_layers hidden_size num_attention_heads kv_channels group_query_attention ffn_hidden_size
swiglu glu_activation embed_layernorm model_family normalization seq_length
max_position_embeddings position_embedding_type
untie_embeddings_and_output_weights add_bias_linear layernorm_epsilon init_method_std
model_family include_padding_in_loss attention_dropout hidden_dropout make_vocab_size_divisible_by
pad_vocab_size_to
train_iters train_samples micro_batch_size global_batch_size exit_interval kill_switch_path
exit_duration_in_mins stop_timeout_minutes seed compile step_graph async_metrics manual_gc
check_device_interval sample_tokens
data_path train_data_path train_weighted_split_paths data_file_list corpus mock_data train_data
split_rule blend_rule data_cache_path dataloader_type final_epoch_threshold
reset_attention_mask eod_mask_loss num_prefetch vocab_size tokenizer_type verify_data
optimizer lr lr_decay_style lr_warmup_fraction weight_decay clip_grad
save load save_interval save_interval_mins save_final keep_last async_save save_optim
save_rng
deepspeed_config device plugin_off precision recompute ops strict_ops deterministic num_threads
flush_subnormals
engine tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
nproc_per_node
log_interval log_memory_to_tensorboard progress tensorboard wandb_project mlflow_experiment
codecarbon_dir
profile task eval_tasks
"""
ALWAYS = frozenset(_ALWAYS.split())
"""Options that have an effect in every run."""

SAMPLES = "--train-samples 64"
TWO = "--nproc-per-node 2"
PIPELINE = f"{TWO} --pipeline-model-parallel-size 2 --global-batch-size 32"
OWN = "--train-data shakespeare"

CASES = [
    *(
        ("--model-family bert", "", flag)
        for flag in (
            "--no-bert-binary-head, --bert-post-norm, --bert-gelu erf, --bert-token-types 3",
            "--mask-prob 0.2, --short-seq-prob 0.2",
        )
    ),
    *(
        ("--model-family t5", "", flag)
        for flag in (
            "--decoder-num-layers 2, --decoder-seq-length 100, --t5-feed-forward relu",
            "--no-t5-scaled-attention, --t5-scaled-head, --no-t5-head-bias",
            "--mask-prob 0.2, --short-seq-prob 0.2",
        )
    ),
    *(
        ("--model-family ict", "--model-family bert", flag)
        for flag in (
            "--biencoder-projection-dim 8, --biencoder-shared-query-context-model",
            "--retriever-score-scaling, --query-in-block-prob 0.2, --use-one-sent-docs",
            "--titles-data-path {data}, --bert-load .",
        )
    ),
    *(
        ("--model-family retro", "", flag)
        for flag in (
            "--retro-project-dir {data}, --retro-chunk-length 32, --retro-num-neighbors 3",
            "--retro-num-retrieved-chunks 1, --retro-encoder-layers 1, --retro-first-layer 2",
            "--retro-encoder-hidden-dropout 0.1, --retro-encoder-attention-dropout 0.1",
            "--retro-attention-gate 0.5, --retro-cyclic-train-iters 5",
            "--no-retro-verify-neighbor-count",
        )
    ),
    *(
        (
            "--model-family t5 --position-embedding-type relative",
            other,
            "--relative-attention-num-buckets 16, --relative-attention-max-distance 64",
        )
        for other in ("--model-family t5", "")
    ),
    (
        "--task classification",
        "",
        "--task-data {text}, --task-valid-data {text}, --task-text a, --task-label b",
    ),
    ("--task classification", "", "--task-labels a b"),
    ("--task multiple-choice", "--task classification", "--task-choices a"),
    ("--task multiple-choice", "--task regression", "--task-choice-tokens 9"),
    ("--group-query-attention", "", "--num-query-groups 2"),
    (
        "--position-embedding-type rope",
        "",
        "--rotary-base 500, --rotary-percent 0.5, --use-rope-scaling",
    ),
    (
        "--position-embedding-type rope --use-rope-scaling",
        "--position-embedding-type rope",
        "--rope-scaling-factor 4",
    ),
    ("--no-add-bias-linear", "", "--add-qkv-bias"),
    (f"{SAMPLES} --global-batch-size 16", "--global-batch-size 16", "--rampup-batch-size 8 8 16"),
    (f"{SAMPLES} --micro-batch-size 2", "", "--step-batch-size-schedule 0:2"),
    ("--eod-mask-loss", "", "--no-calculate-per-token-loss"),
    ("", "--eval-iters 0", "--eval-interval 5"),
    ("", "--eval-interval 0", "--eval-iters 5"),
    ("", "--no-manual-gc", "--manual-gc-interval 5"),
    ("", "--eval-interval 0", "--early-stop 5, --save-best"),
    ("--early-stop 5", "", "--early-stop-delta 0.1"),
    (
        "--eval-tasks lambada",
        "",
        "--eval-tasks-data {data}, --eval-tasks-interval 5, --eval-tasks-limit 5",
    ),
    ("--save-interval 5 --keep-last 2", "--keep-last 2", "--keep-every 5"),
    (TWO, "", "--check-replicas-interval 5"),
    (
        f"{TWO} --tensor-model-parallel-size 2",
        f"{TWO} --zero-stage 1",
        "--check-replicas-interval 5",
    ),
    ("", "--sample-tokens 0", "--sample-prompt A"),
    (OWN, f"{OWN} --eval-iters 0", "--valid-data shakespeare"),
    (
        f"{OWN} --valid-data shakespeare",
        f"{OWN} --valid-data shakespeare --eval-iters 0",
        "--test-data shakespeare",
    ),
    (
        "--train-data-path {data}",
        "--train-data-path {data} --eval-interval 0",
        "--valid-data-path {data}, --valid-weighted-split-paths V:_1_0:0.5_{data}",
    ),
    (
        "--train-data-path {data} --eval-interval 0",
        "--train-data-path {data} --eval-iters 0",
        "--test-data-path {data}, --test-weighted-split-paths T:_1_0:0.5_{data}",
    ),
    (OWN, "--data-path {data}", "--lazy-loader, --corpora web=web.jsonl"),
    ("", "--train-data-path {data} --eval-iters 0", "--split 90,5,5"),
    ("", "--position-embedding-type none", "--reset-position-ids"),
    ("--tokenizer-type BertWordPieceCase", "--tokenizer-type ByteTokenizer", "--vocab-file {text}"),
    (
        "--tokenizer-type GPT2BPETokenizer --vocab-file {text}",
        "--tokenizer-type ByteTokenizer",
        "--merge-file {text}",
    ),
    (
        "--tokenizer-type SentencePieceTokenizer",
        "--tokenizer-type ByteTokenizer",
        "--tokenizer-model {text}",
    ),
    (
        "--tokenizer-type HFTokenizer",
        "--tokenizer-type ByteTokenizer",
        "--tokenizer-name-or-path {text}",
    ),
    (
        "--tokenizer-type BertWordPieceCase --vocab-file {text}",
        "--tokenizer-type ByteTokenizer",
        "--vocab-extra-ids 2",
    ),
    (
        "--tokenizer-type Llama2Tokenizer --tokenizer-model {text}",
        "--tokenizer-type ByteTokenizer",
        "--no-add-special-tokens",
    ),
    (
        "--tokenizer-type SentencePieceTokenizer --tokenizer-model {text}",
        "--tokenizer-type ByteTokenizer",
        "--parse-special-tokens",
    ),
    ("--optimizer torch.optim:NAdam", "", "--optimizer-args eps=1, --optimizer-elementwise"),
    ("", "--lr-decay-style constant", "--min-lr 1e-4"),
    ("", "--lr-decay-style constant --lr-warmup-fraction 0", "--lr-decay-iters 9"),
    (
        SAMPLES,
        f"{SAMPLES} --lr-decay-style constant --lr-warmup-samples 8",
        "--lr-decay-samples 60",
    ),
    ("", SAMPLES, "--lr-warmup-iters 2"),
    (SAMPLES, "", "--lr-warmup-samples 8"),
    ("--lr-decay-style constant-cooldown", "", "--lr-cooldown-fraction 0.5"),
    ("--optimizer lamb", "--optimizer sgd", "--adam-beta1 0.8"),
    ("", "--optimizer sophia", "--adam-beta2 0.8"),
    ("--optimizer muon", "--optimizer sgd", "--adam-eps 1e-7"),
    ("--optimizer sgd", "", "--sgd-momentum 0.8"),
    ("--optimizer muon", "", "--muon-momentum 0.8, --no-muon-nesterov, --muon-num-ns-steps 6"),
    (
        "--optimizer sophia",
        "",
        "--sophiag-beta1 0.8, --sophiag-beta2 0.8, --sophiag-rho 0.8, --sophiag-hessian-interval 5",
    ),
    (
        "--optimizer shampoo",
        "",
        "--shampoo-eps 1e-9, --shampoo-max-preconditioner-dim 8",
    ),
    ("--optimizer shampoo", "", "--shampoo-precondition-frequency 8"),
    (
        "--load RUN",
        "",
        "--no-load-optim, --finetune, --override-opt-param-scheduler, --change-blend",
    ),
    ("--load RUN", "", "--no-exit-on-missing-checkpoint"),
    ("--load RUN", "", "--ckpt-step 5, --use-checkpoint-args"),
    (
        "--load RUN",
        "--load RUN --finetune",
        "--no-load-rng, --use-checkpoint-opt-param-scheduler, --override-data-order",
    ),
    ("--load RUN", "--load RUN --finetune", "--schedule extend"),
    ("--load RUN --finetune", "", "--change-tokenizer"),
    ("--precision fp16", "--precision bf16", "--loss-scale 8, --initial-loss-scale 8"),
    ("--precision fp16", "--precision fp32", "--min-loss-scale 8, --hysteresis 8"),
    ("--precision fp16", "--precision fp16 --loss-scale 8", "--loss-scale-window 8"),
    ("--recompute full", "", "--recompute-method block"),
    ("--recompute full", "--recompute selective", "--recompute-num-layers 2"),
    (f"{TWO} --tensor-model-parallel-size 2", TWO, "--sequence-parallel"),
    (PIPELINE, "", "--num-layers-per-virtual-pipeline-stage 1"),
    (f"{PIPELINE} --model-family t5", PIPELINE, "--pipeline-model-parallel-split-rank 1"),
    (PIPELINE, TWO, "--pipeline-schedule gpipe"),
    (
        TWO,
        "--nproc-per-node 1",
        "--use-distributed-optimizer, --distributed-backend gloo, --distributed-timeout-minutes 5",
    ),
    (TWO, f"{TWO} --tensor-model-parallel-size 2", "--zero-stage 3"),
    ("--nproc-per-node 4 --zero-stage 1", "--nproc-per-node 4", "--data-parallel-replicas 2"),
    ("--engine deepspeed", "", "--cpu-offload"),
    ("", "--engine deepspeed", "--log-params-norm, --log-num-zeros-in-grad"),
    ("", "--save DIR", "--name mine"),
    (
        "",
        "--no-tensorboard",
        "--tensorboard-dir DIR, --tensorboard-log-interval 5, --tensorboard-queue-size 5",
    ),
    ("--no-tensorboard --wandb-project p", "--no-tensorboard", "--tensorboard-tags megatron"),
    ("--wandb-project p", "", "--wandb-entity team, --wandb-exp-name mine, --wandb-save-dir DIR"),
    ("--mlflow-experiment e", "", "--mlflow-tracking-uri http://localhost:5000"),
    ("--codecarbon-dir DIR", "", "--codecarbon-country FRA"),
    (
        "--profile",
        "",
        "--profile-step-start 9, --profile-ranks 0, --profile-memory, --profile-shapes",
    ),
    ("--profile", "", "--profile-stacks"),
    ("--profile", "--train-iters 5", "--profile-step-end 100"),
]
"""Settings with which some options have an effect, settings with which they have none, and the
flags of these options."""

GIVEN = {
    flag.split()[0].removeprefix("--"): (flag, effective, idle)
    for effective, idle, flags in CASES
    for flag in flags.split(", ")
}


def test_every_option_has_decided() -> None:
    """A new option is always effective, or declares its condition and has a case."""
    options = run_options()
    assert {name for name, option in options.items() if not option.needs} == ALWAYS
    flags = {flag[2:]: name for name, option in options.items() for flag in option.flags}
    assert {name for name, option in options.items() if option.needs} == {
        flags[flag] for flag in GIVEN
    }


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that gives note and errors of the settings on a command line."""
    stand_in_for_deepspeed(monkeypatch)
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


@pytest.mark.parametrize("flag", GIVEN)
def test_a_setting_without_effect_is_named(found: Callable[[str], str], flag: str) -> None:
    """It is in the note or an error without its condition, and in neither with it."""
    given, effective, idle = GIVEN[flag]
    shown = f"`--{flag}"
    assert shown not in found(f"{given} {effective}")
    assert shown in found(f"{given} {idle}")


@pytest.mark.parametrize(
    "flag", ["--mask-prob 0.2", "--short-seq-prob 0.2", "--no-calculate-per-token-loss"]
)
def test_settings_of_pretraining(found: Callable[[str], str], flag: str) -> None:
    """Options of samples of BERT, and of masked targets, have no effect with a head for a task."""
    bert = "--model-family bert"
    assert flag not in found(f"{bert} {flag}")
    assert flag in found(f"{bert} --task classification {flag}")


def test_each_setting_comes_once(found: Callable[[str], str]) -> None:
    """All are in one line, each with all of its conditions."""
    note = found("--sequence-parallel --profile-memory --lr-cooldown-fraction 0.2").strip()
    assert note.startswith("ignored: ")
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
    assert "`profile_memory: true` of " in found(str(file))
    preset = "--preset llama-1b --position-embedding-type none --lr-decay-style constant"
    assert found(preset).strip() == ""
