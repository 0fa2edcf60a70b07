"""From settings to the plan: derived values, published numbers, and a file that reads back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmcore.base.errors import ConfigError, DataError
from lmcore.config.file.saved_settings import SavedSettings
from lmcore.config.load import load_config
from lmcore.config.plan import ResumePoint
from lmcore.config.resolve import RunPlan, resolve
from lmcore.config.settings import Provenance
from lmcore.config.tokenizer import TokenizerIdentity
from lmcore.config.validate import validate


def plan_of(line: str, *, world_size: int = 1, vocab_size: int = 257) -> RunPlan:
    return resolve(
        validate(load_config(line.split()), world_size=world_size),
        tokenizer=TokenizerIdentity(vocab_size),
    )


def test_derived_defaults() -> None:
    """Missing settings are derived from others; their provenance is the formula."""
    plan = plan_of("--hidden-size 32 --seq-length 16 --micro-batch-size 2", world_size=3)
    assert plan.config.model.ffn_hidden_size == 128
    assert plan.config.model.max_position_embeddings == 16
    assert plan.config.training.global_batch_size == plan.global_batch_size == 6
    assert plan.config.training.train_iters == plan.train_iters == 1500
    assert plan.train_samples == 9000
    assert plan.flops_per_sample * 6 == plan.flops_per_step
    assert plan.num_micro_batches == 1
    assert plan.data_parallel_size == 3
    assert plan.padded_vocab_size == 384
    assert plan.provenance["ffn_hidden_size"] == Provenance("derived", "4 * hidden_size")
    assert plan.provenance["hidden_size"] == Provenance("flag", "--hidden-size")


def test_a_default_that_is_given_changes_nothing() -> None:
    """`--lr 0.002` is the run without flags, warm-up included."""
    assert plan_of("--lr 0.002 --lr-decay-style cosine").fingerprint == plan_of("").fingerprint


def test_given_values_are_kept() -> None:
    """A value that is given is never derived."""
    plan = plan_of("--ffn-hidden-size 7 --max-position-embeddings 300 --global-batch-size 32")
    assert plan.config.model.ffn_hidden_size == 7
    assert plan.config.model.max_position_embeddings == 300
    assert plan.num_micro_batches == 4
    assert plan.provenance["global_batch_size"].kind == "flag"
    assert plan.model_shape == {
        "num_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "ffn_hidden_size": 7,
        "max_position_embeddings": 300,
        "padded_vocab_size": 384,
    }


def test_published_run() -> None:
    """146,484,375 samples in batches of 288 are 508,626 steps; targets as that run's log prints."""
    plan = plan_of(
        "--train-samples 146484375 --lr-decay-samples 126953125 --lr-warmup-samples 183105 "
        "--global-batch-size 288 --micro-batch-size 1 --eval-iters 40 --eval-interval 1000 "
        "--split 98,2,0"
    )
    assert plan.train_iters == 508_626
    assert plan.train_samples == 146_484_375
    assert plan.valid_samples == 5_863_680
    assert plan.test_samples == 11_520
    assert plan.num_micro_batches == 288
    assert (plan.lr_decay_samples, plan.lr_warmup_samples) == (126_953_125, 183_105)
    assert plan.config.training.train_iters is None  # so that the written file reads back


@pytest.mark.parametrize(
    "line,decay,warmup",
    [
        ("--train-iters 100", 800, 40),
        ("--train-iters 100 --lr 0.002", 800, 40),
        ("--train-iters 100 --lr-decay-style constant", 800, 40),
        ("--train-iters 100 --lr-warmup-fraction 0", 800, 0),
        ("--train-iters 100 --lr-warmup-fraction none", 800, 0),
        ("--train-iters 100 --lr-warmup-iters 7", 800, 56),
        ("--train-iters 100 --lr-warmup-iters 0", 800, 0),
        ("--train-iters 100 --lr-decay-iters 50 --lr-warmup-fraction 0.1", 400, 40),
        ("--train-samples 100", 100, 5),
        ("--train-samples 100 --lr-warmup-samples 0", 100, 0),
        ("--train-samples 100 --lr-warmup-fraction 0.05", 100, 5),
    ],
)
def test_schedule_in_samples(line: str, decay: int, warmup: float) -> None:
    """Decay and warm-up are counted in samples, whatever unit they are given in."""
    plan = plan_of(line)
    assert plan.lr_decay_samples == decay
    assert plan.lr_warmup_samples == pytest.approx(warmup)


@pytest.mark.parametrize(
    "line,valid,test",
    [
        ("--train-iters 100 --eval-interval 10 --eval-iters 2", 11 * 16, 16),
        ("--train-iters 100 --eval-iters 0", 0, 0),
        ("--train-iters 100 --eval-interval 0 --eval-iters 2", 0, 16),
    ],
)
def test_evaluation_targets(line: str, valid: int, test: int) -> None:
    """(iters // interval + 1) * eval_iters * batch, and none where validation is off."""
    plan = plan_of(line)
    assert (plan.valid_samples, plan.test_samples) == (valid, test)


def test_parameters_of_a_preset() -> None:
    """The plan of gpt2-345m has the published number of parameters."""
    plan = plan_of("--preset gpt2-345m", vocab_size=50257)
    assert plan.padded_vocab_size == 50304
    assert plan.parameter_count == 354_871_296


def test_vocabulary_smaller_than_the_tokenizers() -> None:
    """A vocabulary may be larger than the tokenizer's, never smaller."""
    assert plan_of("--vocab-size 1000").vocab_size == 1000
    with pytest.raises(ConfigError, match="`--vocab-size 100` is less than the tokenizer's 257"):
        plan_of("--vocab-size 100")
    null = plan_of("--tokenizer-type NullTokenizer --vocab-size 256")
    assert null.vocab_size == 257  # the tokenizer adds its end of document


def padded(line: str, tokens: int, rows: int, **options: int) -> tuple[int, int]:
    """Return the tokens and the rows of a run that takes the model of a checkpoint of *rows*."""
    config = {
        "model": {"make_vocab_size_divisible_by": 128, "hidden_size": 64},
        "accelerator": {"precision": "bf16"},
        "training": {"micro_batch_size": 3},
    }
    loaded = load_config(
        ["--load", "run", "--use-checkpoint-args", *line.split()],
        saved_settings=lambda _path, _step: SavedSettings("run", config, {}),
    )
    assert (loaded.config.accelerator.precision, loaded.config.training.micro_batch_size) == (
        "bf16",
        8,
    ), "precision is taken, batch sizes are not"
    manifest = SimpleNamespace(model_shape={"padded_vocab_size": rows})
    plan = resolve(
        validate(loaded, **{"world_size": 1, **options}),
        tokenizer=TokenizerIdentity(tokens),
        resume=ResumePoint(Path("run"), manifest),
    )
    return plan.vocab_size, plan.padded_vocab_size


def test_rows_of_a_checkpoint_in_another_layout() -> None:
    """A checkpoint's settings give its rows for any number of ranks that divides them."""
    assert padded("", 257, 384) == (257, 384)
    ranks = "--tensor-model-parallel-size 2"
    assert padded(ranks, 257, 384, world_size=2) == (257, 384)
    assert padded(ranks, 257, 385, world_size=2) == (257, 512)
    assert padded("", 200, 384) == (200, 384), "of another tokenizer"
    assert padded("--make-vocab-size-divisible-by 64", 257, 384) == (257, 320)
    assert padded("--vocab-size 400", 257, 384) == (400, 512)
    with pytest.raises(ConfigError, match="has 400 tokens, the checkpoint 384 rows"):
        padded("", 400, 384)


@pytest.mark.parametrize(
    "line, tokens, rows",
    [
        ("--pad-vocab-size-to 250880", 250_680, 250_880),  # BLOOM's
        ("--pad-vocab-size-to 300", 257, 300),
        ("--pad-vocab-size-to 257", 257, 257),
        ("--pad-vocab-size-to 384 --make-vocab-size-divisible-by 64", 257, 384),
        ("--padded-vocab-size 1000 --vocab-size 900", 257, 1000),
        ("--pad-vocab-size-to 300 --tensor-model-parallel-size 2 --nproc-per-node 2", 257, 300),
    ],
)
def test_a_vocabulary_padded_to_a_number(line: str, tokens: int, rows: int) -> None:
    """The rows are exactly as many as asked for, in every layout."""
    loaded = load_config(line.split())
    world_size = loaded.config.parallel.nproc_per_node or 1
    plan = resolve(validate(loaded, world_size=world_size), tokenizer=TokenizerIdentity(tokens))
    assert plan.padded_vocab_size == plan.shape.padded_vocab_size == rows
    assert rows % plan.config.model.make_vocab_size_divisible_by == 0


def test_a_number_that_the_vocabulary_cannot_be_padded_to() -> None:
    """It holds all tokens, and is a multiple of what is asked for besides."""
    with pytest.raises(ConfigError, match="256` is less than the 257 tokens of the tokenizer"):
        plan_of("--pad-vocab-size-to 256")
    with pytest.raises(ConfigError, match="300` is less than the 400 tokens of `--vocab-size`"):
        plan_of("--pad-vocab-size-to 300 --vocab-size 400")
    with pytest.raises(ConfigError, match="300` is not divisible by `--make-vocab-size") as caught:
        plan_of("--pad-vocab-size-to 300 --make-vocab-size-divisible-by 128")
    assert str(caught.value.hint).startswith("use `--pad-vocab-size-to 384`, or remove `--make")
    line = "--pad-vocab-size-to 301 --tensor-model-parallel-size 2"
    with pytest.raises(ConfigError, match="301` is not divisible by 2, which"):
        validate(load_config(line.split()), world_size=2)


def test_rows_padded_to_a_number_in_a_checkpoint() -> None:
    """The run's own rows count before the checkpoint's."""
    assert padded("--pad-vocab-size-to 300", 257, 384) == (257, 300)


def test_all_problems_at_once() -> None:
    """Every rule's problems come together, with those found elsewhere."""
    loaded = load_config(["--finetune", "--min-lr", "1", "--epochs", "3"])
    with pytest.raises(ConfigError) as caught:
        validate(loaded, further=[DataError("no list")])
    found = [problem.what for problem in (caught.value, *caught.value.others)]
    assert [what.partition(" ")[0] for what in found] == [
        "`--epochs",
        "`--min-lr",
        "`--finetune`",
        "no",
    ]


def test_one_problem_keeps_its_type() -> None:
    """A single problem is raised as it is, with its exit status."""
    with pytest.raises(DataError):
        validate(load_config([]), further=[DataError("no list")])


def test_plain_values() -> None:
    """`to_dict` is JSON, whole."""
    plan = plan_of("")
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["config"]["training"]["train_iters"] == 1500
    assert data["sources"]["train_iters"].startswith("derived")
    assert data["derived"]["parameter_count"] == plan.parameter_count
    assert data["fingerprint"] == plan.fingerprint


def test_fingerprint() -> None:
    """Equal settings agree, a changed one differs, where the run is saved does not matter."""
    base = plan_of("--seed 1")
    assert plan_of("--seed 1 --save runs/x --log-interval 3").fingerprint == base.fingerprint
    assert plan_of("--seed 2").fingerprint != base.fingerprint
    assert plan_of("--seed 1", vocab_size=500).fingerprint != base.fingerprint


def test_plan_is_frozen() -> None:
    """Nothing writes to a plan."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan_of("").train_iters = 3
