"""A resumed run whose settings differ from the checkpoint's: refused, or named in one warning."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
from collections.abc import Mapping
from typing import Any

import pytest
from changed_flags import changed

from lmcore.cli.main import main
from lmcore.config.option import CHECKED
from lmcore.config.section import run_options
from lmcore.data.prepare.plain_text import prepare_text
from lmcore.data.tokenizer import build_tokenizer

LENGTH = "--train-iters 4 --global-batch-size 8 --save-interval 2 --split 80,10,10"
BASES = {
    "gpt": f"{LENGTH} --lr-warmup-fraction 0.1",
    "rotary": f"{LENGTH} --position-embedding-type rope --rotary-percent 0.5 --rotary-base 500"
    " --use-rope-scaling --group-query-attention --no-add-bias-linear --optimizer sgd",
    "samples": "--train-samples 32 --global-batch-size 8 --split 80,10,10 --lr-warmup-samples 8",
    "wordpiece": f"{LENGTH} --data-path {{null}} --tokenizer-type BertWordPieceCase"
    " --vocab-file {vocabulary}",
    "shampoo": f"{LENGTH} --optimizer shampoo",
    "blend": f"{LENGTH} --data-path 0.6 {{same}} 0.3 {{other}} 0.1 {{third}}",
    # The rules round 55% of the 15 documents to 8 and 9.
    "rounding": "--train-iters 4 --global-batch-size 8 --split 55,9,36",
    # A little more than two epochs.
    "epochs": "--train-iters 6 --global-batch-size 128 --micro-batch-size 128 --split 100,0,0",
}

CHECKED_CHANGES: Mapping[str, tuple[str, str]] = {
    "num_layers": ("gpt", "--num-layers 3"),
    "hidden_size": ("gpt", "--hidden-size 32"),
    "num_attention_heads": ("gpt", "--num-attention-heads 4"),
    "kv_channels": ("gpt", "--kv-channels 16"),
    "group_query_attention": ("gpt", "--group-query-attention"),
    "num_query_groups": ("rotary", "--num-query-groups 2"),
    "ffn_hidden_size": ("gpt", "--ffn-hidden-size 32"),
    "swiglu": ("gpt", "--swiglu --ffn-hidden-size 64"),
    "glu_activation": ("gpt", "--glu-activation reglu"),
    "embed_layernorm": ("gpt", "--embed-layernorm"),
    "normalization": ("gpt", "--normalization RMSNorm"),
    "seq_length": ("gpt", "--seq-length 8 --max-position-embeddings 16"),
    "max_position_embeddings": ("gpt", "--max-position-embeddings 32"),
    "position_embedding_type": ("gpt", "--position-embedding-type none"),
    "rotary_base": ("rotary", "--rotary-base 400"),
    "rotary_percent": ("rotary", "--rotary-percent 1"),
    "use_rope_scaling": ("rotary", "--no-use-rope-scaling"),
    "rope_scaling_factor": ("rotary", "--rope-scaling-factor 4"),
    "untie_embeddings_and_output_weights": ("gpt", "--untie-embeddings-and-output-weights"),
    "add_bias_linear": ("gpt", "--no-add-bias-linear"),
    "add_qkv_bias": ("rotary", "--add-qkv-bias"),
    "layernorm_epsilon": ("gpt", "--layernorm-epsilon 1e-6"),
    "global_batch_size": ("gpt", "--global-batch-size 4"),
    "rampup_batch_size": ("samples", "--rampup-batch-size 4 4 40"),
    "step_batch_size_schedule": ("samples", "--step-batch-size-schedule 0:4 128:8"),
    "shampoo_max_preconditioner_dim": ("shampoo", "--shampoo-max-preconditioner-dim 8"),
    "seed": ("gpt", "--seed 5"),
    "data_path": ("gpt", "--data-path {other}"),
    "train_data_path": ("gpt", "--train-data-path {other} --split -"),
    "train_weighted_split_paths": ("gpt", "--no-tensorboard {ranges} --split -"),
    "data_file_list": ("gpt", "--data-file-list {list} --split -"),
    "corpus": ("gpt", "--corpus shakespeare --split -"),
    "train_data": ("gpt", "--train-data shakespeare --split -"),
    "mock_data": ("gpt", "--mock-data"),
    "split": ("gpt", "--split 70,20,10"),
    "split_rule": ("rounding", "--split-rule legacy"),
    "blend_rule": ("blend", "--blend-rule lmcore-2026.11"),
    "dataloader_type": ("gpt", "--dataloader-type cyclic"),
    "final_epoch_threshold": ("epochs", "--final-epoch-threshold 0"),
    "tokenizer_type": ("gpt", "--data-path {null} --tokenizer-type NullTokenizer --vocab-size 300"),
    "vocab_extra_ids": ("wordpiece", "--vocab-extra-ids 2"),
    "optimizer": ("gpt", "--optimizer lamb"),
    "lr": ("gpt", "--lr 1e-3"),
    "min_lr": ("gpt", "--min-lr 1e-4"),
    "lr_decay_style": ("gpt", "--lr-decay-style linear"),
    "lr_decay_iters": ("gpt", "--lr-decay-iters 8"),
    "lr_decay_samples": ("samples", "--lr-decay-samples 24"),
    "lr_warmup_fraction": ("gpt", "--lr-warmup-fraction 0.2"),
    "lr_warmup_iters": ("gpt", "--lr-warmup-iters 1 --lr-warmup-fraction -"),
    "lr_warmup_samples": ("samples", "--lr-warmup-samples 16"),
    "lr_cooldown_fraction": ("gpt", "--lr-cooldown-fraction 0.5"),
}


@pytest.fixture(scope="module")
def paths(data_prefix: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Data sources by the names that `CHECKED_CHANGES` uses."""
    folder = tmp_path_factory.mktemp("other")
    for suffix in (".bin", ".idx"):
        shutil.copy(data_prefix + suffix, folder / f"null{suffix}")
    text = folder / "text.txt"
    text.write_text("".join(f"line {number}\n" for number in range(600)), "utf-8")
    tokenizer = build_tokenizer("ByteTokenizer", vocab_file=None, merge_file=None, vocab_size=None)
    prepare_text(text, tokenizer, folder / "text", document_characters=256)
    shutil.copy(text, folder / "third.txt")
    prepare_text(folder / "third.txt", tokenizer, folder / "third", document_characters=200)
    other = f"{folder / 'text_text_document'}"
    (folder / "list.txt").write_text(f"1.0 {other} corpus\n", "utf-8")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(300))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", "utf-8")
    ranges = f"data:\n  train_weighted_split_paths: ['part: 1 0:0.5 {data_prefix}']\n"
    (folder / "ranges.yaml").write_text(ranges, "utf-8")
    return {
        "ranges": str(folder / "ranges.yaml"),
        "vocabulary": str(folder / "vocab.txt"),
        "same": data_prefix,
        "other": other,
        "third": str(folder / "third_text_document"),
        "null": str(folder / "null"),
        "list": str(folder / "list.txt"),
    }


def test_every_checked_setting_has_a_case() -> None:
    """A new setting that declares `CHECKED` is tried below."""
    checked = {name for name, option in run_options().items() if option.on_resume == CHECKED}
    others = SIZES_OF_FAMILIES | SETTINGS_OF_TASKS | SAMPLES_OF_FAMILIES
    assert checked == set(CHECKED_CHANGES) | others
    assert checked >= FAST


SIZES_OF_FAMILIES = {
    *("model_family", "bert_binary_head", "bert_post_norm", "bert_gelu", "bert_token_types"),
    *("decoder_num_layers", "t5_feed_forward", "t5_scaled_attention", "t5_scaled_head"),
    *("t5_head_bias", "relative_attention_num_buckets", "relative_attention_max_distance"),
    *("biencoder_projection_dim", "biencoder_shared_query_context_model"),
    "retriever_score_scaling",
    *("retro_chunk_length", "retro_num_neighbors", "retro_num_retrieved_chunks"),
    *("retro_encoder_layers", "retro_first_layer"),
}
"""Settings that are compared as parts of the model's shape: see `test_plugin_family.py`."""

SAMPLES_OF_FAMILIES = {
    *("titles_data_path", "use_one_sent_docs"),
    *("retro_project_dir", "retro_cyclic_train_iters"),
}
"""Settings of a family's samples, in the fingerprint of their order: `test_ict.py` and
`test_retro.py` change some."""

SETTINGS_OF_TASKS = {
    f"task{part}"
    for part in ("", "_data", "_text", "_choices", "_choice_tokens", "_label", "_labels")
}
"""Settings of runs with labelled texts: `test_task.py` changes them."""

FAST = {
    *("num_layers", "add_qkv_bias", "rampup_batch_size", "shampoo_max_preconditioner_dim"),
    *("data_path", "corpus", "seed", "split_rule", "blend_rule", "final_epoch_threshold"),
    *("tokenizer_type", "vocab_extra_ids"),
}
"""Settings of the fast set: of each kind of run, of model, batch, data and tokenizer."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FAST else pytest.mark.full)
        for name in sorted(CHECKED_CHANGES)
    ],
)
def test_a_checked_setting_is_refused(
    train: Any, train_once: Any, paths: dict[str, str], name: str
) -> None:
    """A changed value stops the run with an error, and nothing is written."""
    base, change = CHECKED_CHANGES[name]
    flags = BASES[base].format(**paths)
    saved = train_once(flags)
    sources = ("--train", "--data-file", "--mock-data", "--corpus", "--no-tensorboard {ranges}")
    prefix = None if change.startswith(sources) else paths["same"]
    flags = changed(flags, f"{change.format(**paths)} --load {saved.directory}")
    run = train("changed", flags, prefix)
    assert run.status != 0, run.err
    assert "checkpoint" in run.err
    assert not (run.directory / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    "first, then",
    [
        ("", "--rampup-batch-size 4 4 40"),
        ("--rampup-batch-size 4 4 12", "--rampup-batch-size -"),
        ("", "--global-batch-size 4"),
    ],
)
def test_steps_that_do_not_fit_the_samples_are_refused(
    train: Any, train_once: Any, first: str, then: str
) -> None:
    """Samples would run out before the last step, or be left over; the hint's flags continue."""
    base = changed("--train-samples 48 --global-batch-size 8 --save-interval 2", first)
    saved = train_once(base)
    load = f"--load {saved.directory}/checkpoints/iter_0000002"
    run = train("changed", changed(f"{base} {load}", then))
    assert run.status == 2, run.err
    assert "the batch sizes are not the checkpoint's" in run.err
    (flags,) = re.findall(r"the first run's `(.*)`", run.err)
    run = train("same", changed(changed(f"{base} {load}", then), flags))
    assert run.status == 0, run.err
    assert run.curve() == saved.curve()[2:]


@pytest.mark.parametrize("name", ["seed", "seq_length", "split", "dataloader_type"])
def test_the_hint_of_another_order_works(
    train: Any, train_once: Any, paths: dict[str, str], name: str
) -> None:
    """`--change-blend` is not offered where it is refused; the setting is named."""
    base, change = CHECKED_CHANGES[name]
    flags = BASES[base].format(**paths)
    load = f"--load {train_once(flags).directory}/checkpoints/iter_0000002"
    flags = changed(flags, f"{change} {load}")
    run = train("changed", flags)
    hint = run.err.rpartition("hint: ")[2]
    assert f"`--{name.replace('_', '-')}` is " in run.err
    assert "--change-blend" not in hint
    assert train("changed", f"{flags} --override-data-order").status == 0


def test_equal_settings_are_not_named(train: Any, train_once: Any, paths: dict[str, str]) -> None:
    """A run that resumes with its own settings gets no warning."""
    for name, base in BASES.items():
        flags = base.format(**paths)
        run = train(f"same-{name}", f"{flags} --load {train_once(flags).directory}")
        assert run.status == 0, run.err
        assert "differ" not in run.err


def test_changed_settings_are_named_in_one_warning(train: Any, train_once: Any) -> None:
    """Each changed setting with both values; the steps after it follow the new values."""
    base = BASES["gpt"]
    flags = changed(
        base,
        "--weight-decay 0.5 --adam-beta1 0.8 --adam-beta2 0.9 --adam-eps 1e-7 --clip-grad 0.25"
        " --attention-dropout 0.1 --precision bf16 --micro-batch-size 2 --reset-position-ids"
        " --reset-attention-mask --eod-mask-loss --eval-iters 1 --eval-interval 2",
    )
    saved = train_once(base)
    checkpoint = saved.directory / "checkpoints/iter_0000002"
    run = train("named", f"{flags} --load {checkpoint}")
    assert run.status == 0, run.err
    (line,) = [line for line in run.err.splitlines() if "settings differ" in line]
    for row in (
        "`weight_decay` 0.01 -> 0.5",
        "`adam_beta1` 0.9 -> 0.8",
        "`adam_beta2` 0.999 -> 0.9",
        "`adam_eps` 1e-08 -> 1e-07",
        "`clip_grad` 1.0 -> 0.25",
        "`attention_dropout` 0.0 -> 0.1",
        "`precision` fp32 -> bf16",
        "`micro_batch_size` 4 -> 2",
        "`reset_position_ids` false -> true",
        "`reset_attention_mask` false -> true",
        "`eod_mask_loss` false -> true",
        "`eval_iters` 0 -> 1",
        "`eval_interval` 250 -> 2",
    ):
        assert row in line
    assert line.count(" -> ") == 13
    assert "--use-checkpoint-args" not in line


def test_the_warning_says_what_use_checkpoint_args_takes(train: Any, train_once: Any) -> None:
    """It leaves out the settings of the optimizer, also where these do not suit its state."""
    saved = train_once(changed(BASES["gpt"], "--adam-beta2 0.9"))
    load = f"--load {saved.directory}/checkpoints/iter_0000002 --use-checkpoint-args"
    run = train("named", changed(BASES["gpt"], load))
    assert run.status == 0, run.err
    (line,) = [line for line in run.err.splitlines() if "settings differ" in line]
    assert "`adam_beta2` 0.9 -> 0.999" in line
    assert "`--continue` in the place of `--load` takes all settings" in line


def test_other_kernels_are_named_if_the_run_has_dropout(train: Any, train_once: Any) -> None:
    """Kernels draw the random numbers of dropout in their own ways."""
    change = "--ops bias_dropout_add=reference"
    for dropout, count in (("--hidden-dropout 0.3", 1), ("--hidden-dropout 0", 0)):
        base = changed(BASES["gpt"], dropout)
        saved = train_once(base)
        flags = f"{change} --load {saved.directory}/checkpoints/iter_0000002"
        run = train(f"kernels{count}", changed(base, flags))
        assert run.status == 0, run.err
        named = "settings differ from the checkpoint's: `ops` none -> bias_dropout_add=reference"
        assert run.err.count(named) == count
        if count:
            assert run.rows[-1]["loss"] != saved.rows[-1]["loss"]


def test_a_changed_padding_of_the_vocabulary_is_a_warning(train: Any, train_once: Any) -> None:
    """The rows that no token has may be part of the softmax: losses change, but not by default."""
    usual = train_once(BASES["gpt"])
    flags = "--make-vocab-size-divisible-by 64 --load {}/checkpoints/iter_0000002"
    run = train("usual", changed(BASES["gpt"], flags.format(usual.directory)))
    assert run.rows[-1]["loss"] == pytest.approx(usual.rows[-1]["loss"], rel=1e-6)
    base = f"{BASES['gpt']} --include-padding-in-loss"
    saved = train_once(base)
    run = train("padded", changed(base, flags.format(saved.directory)))
    assert run.status == 0, run.err
    (line,) = [line for line in run.err.splitlines() if "padded to 320 rows" in line]
    assert line.startswith("warning: ")
    assert "`--make-vocab-size-divisible-by 264`" in line
    assert run.rows[-1]["loss"] != saved.rows[-1]["loss"]


def test_all_differences_come_with_the_command_that_accepts_them(
    train: Any, train_once: Any, copy_of: Any
) -> None:
    """Another schedule and another order of the samples: one error, and its flags suffice."""
    base = BASES["epochs"]
    saved = copy_of(train_once(base), "run")
    longer = changed(base, f"--train-iters 9 --final-epoch-threshold 0 --load {saved.directory}")
    run = train("run", longer)
    assert run.status == 2, run.err
    assert run.err.count("error:") == 2
    (flags,) = re.findall(r"add `(.*)`", run.err)
    run = train("run", f"{longer} {flags}")
    assert run.status == 0, run.err
    assert run.summary["iteration"] == 9


def test_without_the_model_options_the_command_names_the_file(
    train: Any, train_once: Any, copy_of: Any
) -> None:
    """The command in the hint takes the model from the run's `config.yaml`, and works."""
    saved = copy_of(train_once(BASES["epochs"]), "run")
    other = "--hidden-size 32 --optimizer sgd"
    run = train("run", f"--train-iters 9 {other} --load {saved.directory}")
    assert run.status == 2, run.err
    (command,) = re.findall(r"`lmcore (train .*)`", run.err)
    assert "--no-load-optim" not in command, "the optimizer is the run's again"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert main(shlex.split(command)) == 0


@pytest.mark.parametrize("way", ["finetune", "resume"])
def test_another_tokenizer_needs_a_flag(
    train: Any, train_once: Any, paths: dict[str, str], way: str
) -> None:
    """The advice never pads the vocabulary of another tokenizer to the checkpoint's size."""
    flags = BASES["wordpiece"].format(**paths)
    saved = train_once(flags)
    other = changed(
        flags, f"--tokenizer-type ByteTokenizer --vocab-file - --load {saved.directory}"
    )
    other += " --make-vocab-size-divisible-by 312" + (" --finetune" if way == "finetune" else "")
    run = train("other", other)
    assert run.status == 2, run.err
    assert "tokenizer is not the checkpoint's" in run.err
    assert "--make-vocab-size-divisible-by" not in run.err
    more = train("more", f"{other} --hidden-size 32")
    assert more.err.count("error:") == 2
    assert "--change-tokenizer" not in more.err, "no command accepts it beside another difference"
    if way == "finetune":
        (given,) = re.findall(r"hint: use the checkpoint's, `(.*?)`", run.err)
        assert train("same", changed(other, given)).status == 0
        assert train("other", f"{other} --change-tokenizer").status == 0


def test_a_run_at_learning_rate_zero_is_refused(train: Any, train_once: Any) -> None:
    """The checkpoint's schedule has ended, and its lowest rate is 0."""
    base = BASES["gpt"]
    saved = train_once(base)
    longer = changed(base, f"--train-iters 8 --load {saved.directory} --change-blend")
    run = train("zero", f"{longer} --use-checkpoint-opt-param-scheduler")
    assert run.status == 2, run.err
    assert "learning rate of every remaining step is 0" in run.err
    run = train("refused", longer)
    assert "`keep` is the checkpoint's schedule as it is: not possible" in run.err
    assert "--schedule keep" not in run.err


def test_a_decay_that_ends_early_is_named(train: Any) -> None:
    """Steps with learning rate 0 before the end are counted in a warning."""
    run = train("early", changed(BASES["gpt"], "--train-iters 8 --lr-decay-iters 4"))
    assert run.status == 0, run.err
    assert "the last 5 steps have learning rate 0" in run.err
