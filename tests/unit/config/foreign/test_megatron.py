"""Megatron's flags: each is an option here or is in exactly one table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError
from lmcore.config.derived.model_math import model_shape
from lmcore.config.foreign.megatron import FIXED, RENAMED, UNSUPPORTED
from lmcore.config.foreign.megatron_flags import prepare_flags, train_flags
from lmcore.config.load import load_config
from lmcore.config.options.flags import _SYNONYMS, UnsupportedFlagError, parse_flags
from lmcore.config.section import run_options
from lmcore.config.token_lengths import TOKEN_OPTIONS
from lmcore.config.validate import validate
from lmcore.model.family import parameters_of
from lmcore.model.parameters import parameter_count

# Every flag in the documents of the five systems and in the list of what they can do.
FLAGS = (Path(__file__).parents[3] / "golden/megatron_flags.txt").read_text().split()


ROTARY = "--use-rotary-position-embeddings"
LISTS = Path(__file__).parents[5] / "shared/data/flags"
"""Lists of the flags of Megatron-LM, its forks and their tools, one file each."""


def own_flags() -> set[str]:
    options = [*run_options().values(), *TOKEN_OPTIONS]
    return {one.flag for one in options} | {
        f"--no-{one.flag[2:]}" for one in options if one.type is bool
    }


@pytest.mark.parametrize("flag", FLAGS)
def test_every_documented_flag_has_one_place(flag: str) -> None:
    """A flag is ours, renamed, fixed or unsupported, and never two of these."""
    name = flag.replace("_", "-")
    places = [
        place
        for place, names in {
            "own": own_flags(),
            "renamed": RENAMED,
            "fixed": FIXED,
            "unsupported": UNSUPPORTED,
        }.items()
        if name in names
    ]
    assert len(places) == 1


@pytest.mark.parametrize(
    "name",
    [
        "megatron_lm",
        *(
            f"{fork}_{tool}"
            for fork in ("argonne", "bigscience")
            for tool in ("megatron_deepspeed", "convert", "generate", "preprocess", "tasks")
        ),
    ],
)
def test_every_flag_of_the_other_programs_is_known(name: str) -> None:
    """No flag of Megatron-LM, of the two forks and of their tools is taken for a misspelt one."""
    if not LISTS.is_dir():
        pytest.skip(f"no lists at {LISTS}")
    rows = (LISTS / f"{name}.tsv").read_text().splitlines()[1:]
    flags = {row.partition("\t")[0].replace("_", "-") for row in rows}
    assert flags - own_flags() - {*RENAMED, *FIXED, *UNSUPPORTED} == set()


@pytest.mark.parametrize("flag", UNSUPPORTED)
def test_the_hint_of_an_unsupported_flag_leads_further(flag: str) -> None:
    """Every flag that a hint names is one of lmcore, which is not refused in its turn."""
    known = own_flags() | {"--to", "--json-keys", "--workers", "--continue", "--output"}
    named = re.findall(r"--[a-z][a-z0-9-]+", UNSUPPORTED[flag])
    assert set(named) <= known
    assert flag not in named


@pytest.mark.parametrize("flag", [flag for flag, one in FIXED.items() if one.only])
def test_the_hint_of_a_fixed_flag_leads_further(flag: str) -> None:
    """The same for the values that a flag without effect does not take."""
    assert set(re.findall(r"--[a-z][a-z0-9-]+", FIXED[flag].hint)) <= own_flags()


@pytest.mark.parametrize(
    "line,option,value",
    [
        ("--override-lr-scheduler", "override_opt_param_scheduler", True),
        ("--use-checkpoint-lr-scheduler", "use_checkpoint_opt_param_scheduler", True),
        ("--rotary-position-embeddings-theta 500000", "rotary_base", 500_000),
        ("--deterministic-mode", "deterministic", True),
        ("--no-pipeline-parallel", "pipeline_model_parallel_size", 1),
        ("--wandb-project poems --wandb-entity team", "wandb_entity", "team"),
        ("--codecarbon-dir energy", "codecarbon_dir", "energy"),
        ("--zero-reduce-bucket-size 5e8", "zero_stage", None),
    ],
)
def test_flags_of_published_commands(line: str, option: str, value: object) -> None:
    """Flags with an equal here, or that ask for what happens anyway, are accepted."""
    assert load_config(line.split()).value(option) == value


def test_tables_are_disjoint() -> None:
    """No flag is in two tables, or in a table and an option here."""
    names = [*own_flags(), *RENAMED, *FIXED, *UNSUPPORTED]
    assert len(set(names)) == len(names)
    assert not [name for name in names if "_" in name]


@pytest.mark.parametrize("flag", RENAMED)
def test_renamed_flags_lead_to_an_option(flag: str) -> None:
    """A renamed flag is translated to an option here."""
    assert RENAMED[flag].replacement.split()[0] in own_flags()


@pytest.mark.parametrize("flag", UNSUPPORTED)
def test_unsupported_flags_have_a_hint(flag: str) -> None:
    """A flag that is refused says what to do instead."""
    with pytest.raises(ConfigError, match="is not supported") as caught:
        validate(load_config([flag, "1"]))
    assert caught.value.hint
    assert isinstance(caught.value, UnsupportedFlagError)


@pytest.mark.parametrize("flag", FIXED)
def test_fixed_flags_change_nothing(flag: str) -> None:
    """A flag whose effect happens anyway is accepted, with a notice, and sets nothing."""
    same = FIXED[flag]
    value = list(same.only[:1]) if same.only else []
    loaded = load_config([flag, *value])
    assert loaded.config == load_config([]).config
    notice, _defaults = loaded.notices
    assert notice.endswith(f"changes nothing here:\n  `{' '.join([flag, *value])}`: {same.note}")
    if same.only:
        with pytest.raises(ConfigError, match="is not supported"):
            validate(load_config([flag, "other"]))


@pytest.mark.parametrize(
    "line,option,value",
    [
        ("--batch-size 4", "micro_batch_size", 4),
        ("--warmup .01", "lr_warmup_fraction", 0.01),
        ("--vocab v.json", "vocab_file", "v.json"),
        ("--fine-tune", "finetune", True),
        ("--use-checkpoint-opt_params_scheduler", "use_checkpoint_opt_param_scheduler", True),
        ("--bf16", "precision", "bf16"),
        ("--fp16", "precision", "fp16"),
        ("--rampup-batch-size 16 16 5859375", "rampup_batch_size", (16, 16, 5859375)),
        ("--loss-scale-window 500", "loss_scale_window", 500),
        ("--initial-loss-scale 65536", "initial_loss_scale", 65536.0),
        ("--norm-epsilon 1e-6", "layernorm_epsilon", 1e-6),
        ("--optimizer adamw", "optimizer", "adam"),
        ("--checkpoint-activations", "recompute", "full"),
        ("--recompute-activations", "recompute", "selective"),
        ("--recompute-granularity full", "recompute", "full"),
        ("--activations-checkpoint-method uniform", "recompute", "full"),
        ("--no-load-optim", "load_optim", False),
        ("--no-save-rng", "save_rng", False),
        ("--use-rotary-position-embeddings", "position_embedding_type", "rope"),
        ("--no-position-embedding", "position_embedding_type", "none"),
        (f"{ROTARY} --no-position-embedding", "position_embedding_type", "rope"),
        (f"--no-position-embedding {ROTARY}", "position_embedding_type", "rope"),
        ("--rope-theta 500000", "rotary_base", 500_000),
        ("--disable-bias-linear", "add_bias_linear", False),
        ("--num-key-value-heads 8", "num_query_groups", 8),
        ("--num-key-value-heads 8", "group_query_attention", True),
        ("--normalization rmsnorm", "normalization", "RMSNorm"),
    ],
)
def test_old_names_set_options(line: str, option: str, value: object) -> None:
    """Each renamed flag sets today's option."""
    assert load_config(line.split()).value(option) == value


@pytest.mark.parametrize(
    "flag,hint",
    [
        ("--bogus", "`--help` lists the flags"),
        ("--optimizer-cpu-state", "`--help` lists the flags"),  # not `--no-cpu-offload`
        ("--qk-layer-scale", "`--help` lists the flags"),  # not a flag that is refused
        ("--no-tensorbord", "did you mean `--no-tensorboard`?"),
        ("--num-heads", "did you mean `--num-attention-heads`?"),
        ("--tensor-parallel-size", "did you mean `--tensor-model-parallel-size`?"),
    ],
)
def test_suggestions(flag: str, hint: str) -> None:
    """An unknown flag's suggestion is near, has an effect, and is not the opposite."""
    with pytest.raises(ConfigError) as caught:
        load_config([flag])
    assert (caught.value.what, caught.value.hint) == (f"unknown flag `{flag}`", hint)


def test_an_evaluation_is_no_training() -> None:
    """Its data would be training data here: no other problem of the command is judged."""
    line = "--task LAMBADA --valid-data lambada_test.jsonl --strict-lambada --overlapping-eval 32"
    with pytest.raises(UnsupportedFlagError) as caught:
        load_config(line.split())
    assert caught.value.what == "`--task LAMBADA` is not supported"
    assert "`lmcore evaluate CHECKPOINT --task NAME`" in caught.value.hint
    for word in ("--data-path", "--train"):
        assert word not in caught.value.hint


@pytest.mark.parametrize("value", ["clasification", "multiplechoice", "Multiple-Choise"])
def test_a_slip_for_a_task_is_no_evaluation(value: str) -> None:
    """A value that Megatron's flag has not either is one of ours, misspelt."""
    with pytest.raises(ConfigError) as caught:
        load_config(["--task", value])
    meant = "classification" if value.startswith("c") else "multiple-choice"
    assert caught.value.what == f"`--task {value}`: unknown choice"
    assert caught.value.hint == (
        f"did you mean `{meant}`? known: `classification`, `multiple-choice`, `regression`"
    )


@pytest.mark.parametrize("value", ["RACE", "mnli", "=QQP"])
def test_a_task_of_megatron_has_its_own_hint(value: str) -> None:
    """It names the task here that takes the same data."""
    with pytest.raises(UnsupportedFlagError) as caught:
        load_config([f"--task{value}"] if value[0] == "=" else ["--task", value])
    assert "`--task classification` or `--task multiple-choice`" in caught.value.hint
    assert "`lmcore evaluate CHECKPOINT --task mnli --finetune`" in caught.value.hint


def test_flags_of_models_that_are_not_here() -> None:
    """They are refused with the reason."""
    for flag in ("--num-classes 128", "--bert-embedder-type x", "--patch-dim 4"):
        with pytest.raises(ConfigError) as caught:
            validate(load_config(flag.split()))
        wanted = "leave it out: only BERT, GPT, ICT, Llama, Retro and T5 models are trained"
        assert caught.value.hint == wanted


def test_lengths_and_layers_of_both_stacks() -> None:
    """Megatron's flags of the encoder are the model's, the decoder's have a section."""
    line = "--encoder-num-layers 3 --encoder-seq-length 256 --decoder-seq-length 64"
    config = load_config(f"--model-family t5 {line} --decoder-num-layers 2".split()).config
    assert (config.model.num_layers, config.model.seq_length) == (3, 256)
    assert (config.t5.decoder_num_layers, config.t5.decoder_seq_length) == (2, 64)


def test_published_command() -> None:
    """A published command of a 3.6B run is read; all that cannot be done is named."""
    line = """--model-parallel-size 1 --num-layers 30 --hidden-size 3072 --num-attention-heads 32
        --batch-size 8 --seq-length 2048 --max-position-embeddings 1024 --train-iters 1000
        --resume-dataloader --train-data c4/en --lazy-loader --tokenizer-type GPT2BPETokenizer
        --cache-dir cache --split 949,50,1 --distributed-backend ccl --lr 0.00015 --no-load-optim
        --lr-decay-style cosine --weight-decay 1e-2 --clip-grad 1.0 --warmup .01
        --checkpoint-activations --deepspeed-activation-checkpointing --bf16"""
    with pytest.raises(ConfigError) as caught:
        validate(load_config(line.split()))
    assert "`--seq-length 2048` exceeds `--max-position-embeddings 1024`" in caught.value.what
    assert [one.what for one in caught.value.others] == [
        "`--tokenizer-type GPT2BPETokenizer` needs `--vocab-file` and `--merge-file`",
    ]
    assert load_config(line.split()).config.data.train_data == ("c4/en",)


def test_published_llama() -> None:
    """The flags of a published Llama 2 7B give its parameters."""
    line = """--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008
        --num-key-value-heads 32 --seq-length 4096 --max-position-embeddings 4096 --swiglu
        --normalization rmsnorm --use-rotary-position-embeddings --disable-bias-linear
        --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
        --no-query-key-layer-scaling --bf16"""
    loaded = validate(load_config(line.split())).loaded
    assert parameter_count(parameters_of(model_shape(loaded.config.model, 32000))) == 6_738_415_616


def test_tables_of_data_preparation() -> None:
    """`lmcore data prepare` knows the names of the preparing scripts."""
    assert prepare_flags()["--json-key"].replacement == "--json-keys"
    assert set(prepare_flags()) <= set(train_flags()) | own_flags() | {"--vocab"}


def test_flags_of_the_preparing_scripts_that_change_nothing() -> None:
    """`--chunk-size` and `--keep-sequential-samples` are accepted, with a line that says why."""
    parsed = parse_flags(
        ["--chunk-size", "25", "--keep-sequential-samples"], {}, foreign=prepare_flags()
    )
    assert not parsed.problems
    assert list(parsed.without_effect) == ["--chunk-size 25", "--keep-sequential-samples"]


def test_no_flag_of_megatron_has_another_name() -> None:
    """Its own hint is shown, so that a suggestion beside it would never be."""
    assert not _SYNONYMS.keys() & train_flags().keys()
