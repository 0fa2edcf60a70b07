"""Hints: every error of a flag rule is raised by a line here, and following its hint ends it.

A hint in words is followed by the lines beside the line that raises the error.  The JSON after
`--deepspeed-config` is written to a file.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hints import followed, instructions
from stand_in_engine import stand_in_for_deepspeed

import lmcore
from lmcore.base.errors import ConfigError, LmcoreError
from lmcore.cli.data.prepare import PrepareSection
from lmcore.cli.run import torchrun_flags
from lmcore.config.foreign.generate import GivenModel, generate_flags
from lmcore.config.foreign.megatron import FIXED, PREPARE_UNSUPPORTED, RENAMED, UNSUPPORTED
from lmcore.config.foreign.megatron_flags import prepare_flags
from lmcore.config.load import load_config
from lmcore.config.option import Option, options_of
from lmcore.config.options.flags import parse_flags
from lmcore.config.section import run_options
from lmcore.config.validate import problems_of
from lmcore.model.training_engine import engines

SOURCE = Path(lmcore.__file__).parent / "config"
# Their errors are about scripts, and about commands whose flags are no settings of a run.
OF_OTHER_COMMANDS = {
    *("convert.py", "evaluate.py", "launch_command.py", "shell.py", "shell_values.py"),
}
RULES = [
    *(
        file
        for folder in ("derived", "foreign", "rules")
        for file in (SOURCE / folder).glob("*.py")
        if file.name not in OF_OTHER_COMMANDS
    ),
    SOURCE / "checkpoint_step.py",
]
RULE_NAMES = frozenset(map(str, RULES))
ERRORS = {"ConfigError", "MissingPackageError", "UnsupportedFlagError"}

PIPELINE = "--pipeline-model-parallel-size"
STAGES = f"{PIPELINE} 2 --global-batch-size 16 --micro-batch-size 4"
VIRTUAL = "--num-layers-per-virtual-pipeline-stage"
RAMP = "--train-samples 1000 --rampup-batch-size"
SCHEDULE = "--train-samples 1000 --step-batch-size-schedule"
SPLIT_PATHS = "--train-weighted-split-paths"
NO_VALIDATION = "--eval-iters 0"
TASK = "--task classification --task-data {}"

LINES: dict[str, tuple[str, ...]] = {
    "--num-layers 1000000 --hidden-size 1000000": ("--num-layers 2 --hidden-size 64",),
    "--hidden-size 65": (),
    "--task classification": (),
    "--task classification --task-data missing": (TASK,),
    f"{TASK} --task-text a b c": (f"{TASK} --task-text a b",),
    f"{TASK} --valid-data shakespeare": (f"{TASK} --task-valid-data {{}}",),
    f"{TASK} --test-data shakespeare": (),
    f"{TASK} --split 8,1,1": (),
    f"{TASK} --task-labels a a": (f"{TASK} --task-labels a b",),
    f"{TASK} --eod-mask-loss": (TASK,),
    "--eval-tasks lambada --model-family bert": (),
    "--eval-tasks lambada --context-parallel-size 2 --seq-length 32 "
    "--max-position-embeddings 35": (),
    "--group-query-attention --num-query-groups 3": (),
    "--swiglu --hidden-size 16": (),
    "--seq-length 2048 --max-position-embeddings 1024": (),
    "--model-family bret": ("--model-family bert",),
    "--position-embedding-type relative": (
        "--position-embedding-type rope",
        "--position-embedding-type relative --model-family t5",
    ),
    "--model-family t5 --seq-length 256 --decoder-seq-length 20": (),
    "--model-family t5 --swiglu": ("--model-family t5 --t5-feed-forward gated-silu",),
    "--swiglu --glu-activation geglu": ("--glu-activation geglu",),
    "--model-family bert --glu-activation geglu": ("--model-family gpt --glu-activation geglu",),
    "--model-family t5 --embed-layernorm": ("--model-family gpt --embed-layernorm",),
    "--model-family bert --position-embedding-type alibi": (
        "--model-family bert --position-embedding-type learned_absolute",
    ),
    "--model-family llama": (
        "--model-family llama --normalization RMSNorm --swiglu --position-embedding-type rope",
        "--model-family gpt",
    ),
    "--position-embedding-type rope --kv-channels 6 --rotary-percent 0.5": (
        "--position-embedding-type rope --kv-channels 8 --rotary-percent 0.5",
    ),
    "--train-iters 5 --train-samples 50": (),
    "--train-samples 5": (),
    "--train-samples 50 --lr-decay-iters 3": (),
    "--train-iters 50 --lr-warmup-samples 3": (),
    "--train-iters 50 --lr-warmup-iters 60": (),
    "--train-samples 50 --lr-warmup-samples 60": (),
    "--lr 1e-4 --min-lr 1e-3": (),
    "--micro-batch-size 1000000 --seq-length 1000000": ("--micro-batch-size 8",),
    "--use-checkpoint-opt-param-scheduler --override-opt-param-scheduler": (),
    "--micro-batch-size 4 --global-batch-size 10": (),
    f"{SCHEDULE} 0:8 1M:12": (),
    f"{SCHEDULE} 0:8 1:16": (),
    f"{SCHEDULE} 1M:16": (),
    f"{SCHEDULE} 0:8 1M:16 --global-batch-size 32": (),
    f"{SCHEDULE} 0:8 1M:16 --rampup-batch-size 8 8 100 --global-batch-size 16": (),
    f"{SCHEDULE} 0:64 1M:80 --pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble": (),
    f"{SCHEDULE} 0:16 1M:32 --pipeline-model-parallel-size 2": (),
    "--pad-vocab-size-to 300 --make-vocab-size-divisible-by 128": (),
    "--pad-vocab-size-to 301 --tensor-model-parallel-size 2": (),
    f"{RAMP} 16 16": (),
    f"{RAMP} 16 16 100": (),
    f"{RAMP} 32 16 100 --global-batch-size 16": (),
    f"{RAMP} 16 32 100 --global-batch-size 64": (),
    f"{RAMP} 10 6 1000 --global-batch-size 64": (),
    "--optimizer a:b:c": ("--optimizer torch.optim:NAdam",),
    "--precision fp16 --initial-loss-scale 1 --min-loss-scale 2": (),
    "--optimizer muon --zero-stage 2": (),
    "--optimizer sophia --tensor-model-parallel-size 2": (),
    "--tokenizer-type GPT2BPETokenizer": (),
    "--tokenizer-type NullTokenizer": (),
    "--tokenizer-type ByteTokenizer --vocab-extra-ids 3": (),
    "--vocab-file vocab.json": (),
    "--bert-load folder": (),
    "--titles-data-path web": (),
    "--decoder-seq-length 8": (),
    "--vocab-extra-ids 3": (),
    "--vocab-file missing --merge-file merges.txt": (
        "--vocab-file vocab.json --merge-file merges.txt",
    ),
    "--tokenizer-type HFTokenizer --tokenizer-name-or-path missing": (
        "--tokenizer-type HFTokenizer --tokenizer-name-or-path folder",
    ),
    "--corpus shakespeare --data-path web": (),
    "--data-path web --valid-data-path books": (),
    "--data-path web --valid-data a=books a=web": ("--data-path web --valid-data a=books b=web",),
    "--data-path web --valid-data 'a b=books'": ("--data-path web --valid-data a=books",),
    "--model-family retro --data-path web --valid-data a=books": (),
    "--data-file-list missing": ("--data-file-list list.txt",),
    "--data-path raw": (),
    "--data-path part": (),
    "--data-path 1 part": ("--data-path 1 part_text_document",),
    "--data-path folder": ("--data-path folder/inner",),
    "--data-path missing": ("--data-path web",),
    "--data-path web web": ("--data-path web",),
    "--split 1,x": (),
    "--split 0,1": (),
    "--train-data-path web --valid-data-path books --split 9,1,0": (),
    "--split 100,0,0": (),
    "--train-data-path web": (),
    "--load runs --change-blend --override-data-order": (),
    "--ict-load runs": ("--load runs --finetune",),
    "--model-family ict --ict-load runs --bert-load runs": (
        "--model-family ict --ict-load runs",
        "--model-family ict --bert-load runs",
    ),
    "--load runs --change-blend --finetune": (),
    "--load runs --change-blend --dataloader-type cyclic": (),
    f"{SPLIT_PATHS} 'a: 1 0:1 web' 'b: 1 0:1 books' {NO_VALIDATION}": (
        f"{SPLIT_PATHS} 'a: 1 0:1 web, 1 0:1 books' {NO_VALIDATION}",
    ),
    f"{SPLIT_PATHS} 'a: 1 0:1' {NO_VALIDATION}": (f"{SPLIT_PATHS} 'a: 1 0:1 web' {NO_VALIDATION}",),
    f"{SPLIT_PATHS} 'a: 1 0:1 web' 'a: 1 0:1 books' {NO_VALIDATION}": (
        f"{SPLIT_PATHS} 'a: 1 0:1 web' {NO_VALIDATION}",
    ),
    f"{SPLIT_PATHS} 'a: 1 0-1 web' {NO_VALIDATION}": (
        f"{SPLIT_PATHS} 'a: 1 0:1 web' {NO_VALIDATION}",
    ),
    f"{SPLIT_PATHS} 'a: 1 1:0 web' {NO_VALIDATION}": (
        f"{SPLIT_PATHS} 'a: 1 0:1 web' {NO_VALIDATION}",
    ),
    f"{SPLIT_PATHS} 'a: x 0:1 web' {NO_VALIDATION}": (
        f"{SPLIT_PATHS} 'a: 1 0:1 web' {NO_VALIDATION}",
    ),
    f"{SPLIT_PATHS} 'a: 1 0:0.6 web, 1 0.5:1 web' {NO_VALIDATION}": (
        f"{SPLIT_PATHS} 'a: 1 0:0.5 web, 1 0.5:1 web' {NO_VALIDATION}",
    ),
    "--data-path web 1 books": ("--data-path 1 web 1 books", "--data-path web books"),
    "--data-path 1 1 web 2": ("--data-path 1 web",),
    "--data-path 1 web 1": ("--data-path 1 web",),
    "--data-path 0 web 1 books": ("--data-path 1 web 1 books", "--data-path 1 books"),
    "--load runs --ckpt-step first": (),
    "--keep-every 150 --save-interval 100": (),
    "--save web.idx": (),
    "--profile --profile-step-start 5 --profile-step-end 5": (),
    "--profile --profile-step-start 1 --profile-step-end 10 --train-iters 3": (),
    "--profile --profile-ranks none": (),
    "--profile --profile-ranks 9": (),
    "--tensor-model-parallel-size 3": (),
    "--context-parallel-size 2 --seq-length 30": (),
    "--sequence-parallel --tensor-model-parallel-size 2 --seq-length 31": (),
    f"{PIPELINE} 8 --global-batch-size 64": (),
    f"{STAGES} {VIRTUAL} 3": (),
    f"{STAGES} --num-layers 3 {VIRTUAL} 3": (),
    f"{STAGES} --pipeline-schedule interleaved": (),
    f"{STAGES} --num-layers 2 --pipeline-schedule interleaved": (),
    f"{STAGES} --pipeline-schedule gpipe {VIRTUAL} 1": (),
    f"{STAGES} --num-layers 3 --pipeline-schedule zero-bubble-v": (),
    f"{STAGES} --model-family t5 --pipeline-schedule zero-bubble": (),
    f"{STAGES} --model-family t5 {VIRTUAL} 1": (),
    f"{STAGES} --model-family t5 --pipeline-model-parallel-split-rank 2": (),
    f"{PIPELINE} 4 --global-batch-size 64 --model-family t5 --num-layers 1": (),
    "--tensor-model-parallel-size 2 --nproc-per-node 3": (),
    "--use-distributed-optimizer --zero-stage 0": (),
    "--zero-stage 1 --data-parallel-replicas 2": (),
    "--zero-stage 1 --data-parallel-replicas 2 --nproc-per-node 1": (
        "--zero-stage 1 --data-parallel-replicas 2 --nproc-per-node 4",
    ),
    f"{STAGES} --pipeline-schedule zero-bubble --zero-stage 3": (),
    f"{STAGES} --pipeline-schedule zero-bubble-v --zero-stage 1": (),
    f"{PIPELINE} 2 --micro-batch-size 8": (),
    f"{PIPELINE} 2 --micro-batch-size 1 --global-batch-size 6 --pipeline-schedule zero-bubble": (),
    f"{PIPELINE} 2 --micro-batch-size 1 --global-batch-size 16 {RAMP} 6 2 100 "
    "--pipeline-schedule zero-bubble": (),
    "--step-graph --recompute full": (),
    f"--step-graph {STAGES}": (),
    "--engine nativ": ("--engine native",),
    f"--engine deepspeed {STAGES}": (),
    "--engine deepspeed --zero-stage 0": (),
    f"--engine deepspeed --cpu-offload {STAGES}": (),
    f"--deepspeed --cpu-offload {STAGES}": (),
    "--cpu-offload": (),
    "generate --num-layers 3": (),
    "generate --num-layers 4 --num-layers 3": (),
    "generate --model-family bert": (),
    "generate --prompts a b": (),
    "run --nnodes 2": (),
    "run --max-restarts 3": (),
}
"""Lines with errors, each with lines that follow its hints by hand."""


def ds(**content: Any) -> str:
    """Return the flags of a run with a file of DeepSpeed."""
    return f"--engine deepspeed --deepspeed-config {shlex.quote(json.dumps(content))}"


def native(**content: Any) -> str:
    """Return the same for the native engine."""
    return ds(**content).removeprefix("--engine deepspeed ")


ON = {"enabled": True}

LINES |= {
    "--deepspeed-config missing": (native(),),
    "--deepspeed-config '{'": (native(),),
    "--deepspeed-config '[]'": (native(),),
    ds(zero_optimization=1): (),
    f"--lr 1 {ds(optimizer={'params': {'lr': 2}})}": (
        ds(optimizer={"params": {"lr": 2}}),
        f"--lr 1 {ds(optimizer={'params': {'lr': 'auto'}})}",
    ),
    ds(amp=ON): (),
    ds(scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 1}}): (),
    ds(fp16=ON, bf16=ON): (ds(bf16=ON),),
    ds(fp16=ON | {"initial_scale_power": 999}): (),
    ds(gradient_accumulation_steps="two"): (),
    ds(zero_optimization={"offload_optimizer": {"device": "nvme"}}): (
        ds(zero_optimization={"offload_optimizer": {"device": "cpu"}}),
    ),
    ds(zero_optimization={"compute_grad_norm": False}): (),
    ds(optimizer={"type": "Lamb"}): (),
    ds(optimizer={"params": {"adam_w_mode": False}}): (),
    ds(optimizer={"params": {"betas": 1}}): (),
    native(zero_optimization={"stage": 3, "mics_shard_size": 2}): (),
    native(zero_optimization={"offload_param": {"device": "cpu"}}): (
        native(zero_optimization={"offload_param": {"device": "none"}}),
    ),
    f"--global-batch-size 16 --micro-batch-size 4 {native(gradient_accumulation_steps=3)}": (),
    native(train_batch_size=16, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=3): (
        native(
            train_batch_size=24, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=3
        ),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Datasets and other files in the working directory; DeepSpeed counts as installed."""
    folder = tmp_path_factory.mktemp("hints")
    (folder / "folder").mkdir()
    (folder / "runs").mkdir()
    for prefix in ("web", "books", "raw", "part_text_document", "folder/inner"):
        for ending in (".bin", ".idx", *([] if prefix == "raw" else [".meta.json"])):
            (folder / f"{prefix}{ending}").touch()
    for name in ("vocab.json", "merges.txt", "list.txt"):
        (folder / name).touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("importlib.util.find_spec", lambda _name: object())
        stand_in_for_deepspeed(patch)
        patch.setattr(LmcoreError, "__init__", noting(LmcoreError.__init__))
        yield


SITES: dict[str, tuple[str, int]] = {}
"""Expression that made each error, by the error's first line."""
REACHED: set[tuple[str, int]] = set()
"""Expressions that made an error."""


def noting(original: Any) -> Any:
    """Return the method that makes an error and notes which rule made it."""

    def make(error: LmcoreError, what: str, **others: Any) -> None:
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename not in RULE_NAMES:
            frame = frame.f_back
        if frame is not None:
            place = frame.f_code.co_filename, frame.f_lineno
            for (file, first), lines in expressions().items():
                if place[0] == file and place[1] in lines:
                    SITES[what] = file, first
                    REACHED.add((file, first))
        original(error, what, **others)

    return make


@functools.cache
def expressions() -> dict[tuple[str, int], range]:
    """Return the lines of every expression that makes an error, by file and first line."""
    found = {}
    for file in RULES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ERRORS:
                found[str(file), node.lineno] = range(node.lineno, (node.end_lineno or 0) + 1)
    return found


def site(problem: LmcoreError) -> tuple[str, int] | str:
    """Return where an error was made; its first line if that is no rule."""
    return SITES.get(problem.what, problem.what)


@functools.cache
def problems(words: tuple[str, ...]) -> list[LmcoreError]:
    """Return every problem of a command line with as many processes as its layout has."""
    if words[:1] == ("generate",):
        return generate_problems(words[1:])
    if words[:1] == ("run",):
        return [*parse_flags(words[1:], {}, foreign=torchrun_flags()).problems]
    if words[:1] == ("prepare",):
        options = {option.name: option for option in options_of(PrepareSection)}
        return [*parse_flags(words[1:], options, foreign=prepare_flags()).problems]
    if words[:1] in {("bare",), ("off",)}:
        there = None if words[0] == "bare" else object()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("importlib.util.find_spec", lambda _name: there)
            patch.delitem(engines(), "deepspeed")
            return problems.__wrapped__(words[1:])
    try:
        loaded = load_config(list(map(in_file, words)))
    except ConfigError as error:
        return [error, *error.others]
    parallel = loaded.config.parallel
    size = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    number = parallel.nproc_per_node or 2 * size * parallel.context_parallel_size
    return problems_of(loaded, world_size=number)


def generate_problems(words: Sequence[str]) -> list[LmcoreError]:
    """Return the problems of the flags of a model with four layers."""
    model = GivenModel()
    found = [*parse_flags(words, {}, foreign=generate_flags((), model)).problems]
    try:
        model.require({"num_layers": 4, "model_family": ""})
    except ConfigError as error:
        found += [error, *error.others]
    return found


def in_file(word: str) -> str:
    """Return the path of a file with a text in JSON; any other word as it is."""
    if word[:1] not in {"{", "["}:
        return word
    Path("ds.json").write_text(word)
    return "ds.json"


def needy(option: Option) -> str:
    """Return the flag of an option with a value that is not its default."""
    if option.type is bool:
        return option.flags[int(option.default is True)]
    for value in [*(option.choices or ["a"]), "2", "0.5", "3"]:
        with contextlib.suppress(ConfigError):
            if option.convert(value, where="") not in (option.default, (option.default,)):
                return f"{option.flag} {value}"
    raise AssertionError(option.flag)


UNMET = {
    "early_stop": "--eval-interval 0",
    "save_best": "--eval-interval 0",
    "loss_scale": "--precision bf16",
    **dict.fromkeys(("log_params_norm", "log_num_zeros_in_grad"), "--engine deepspeed"),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_eps"), "--optimizer sgd"),
    **dict.fromkeys(
        ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        "--precision fp16 --loss-scale 2",
    ),
}
"""Flags without which an option's condition is met by default."""

LINES |= {
    f"{needy(option)} {UNMET.get(option.name, '')}": ()
    for option in run_options().values()
    if any(need.refused for need in option.needs)
}
LINES |= {"bare --engine deepspeed": ()}  # its plugin is not installed
LINES |= {"off --engine deepspeed": ()}  # or turned off

TABLES: dict[str, str] = {}
"""A line for each hint of the tables of flags, by the hint."""
TABLES |= {hint: f"prepare {flag} 1" for flag, hint in PREPARE_UNSUPPORTED.items()}
TABLES |= {
    one.hint: f"{flag} other" for flag, one in [*FIXED.items(), *RENAMED.items()] if one.only
}
TABLES |= {hint: f"{flag} 1" for flag, hint in UNSUPPORTED.items()}


@pytest.mark.parametrize("line", [*LINES, *TABLES.values()])
def test_a_hint_leads_further(line: str) -> None:
    """Every hint ends its problem, and so does every hint of the problems that follow."""
    by_hand = LINES.get(line, ())
    first = tuple(shlex.split(line))
    open_lines, seen = [first], set()
    assert problems(first)
    while open_lines:
        words = open_lines.pop()
        if words in seen:
            continue
        seen.add(words)
        found = problems(words)
        count = Counter(map(site, found))
        for problem in found:
            lines = [
                after
                for piece in instructions(problem.hint or "")
                for after in followed(words, problem, piece)
            ]
            assert lines or by_hand or not problem.hint or words != first, problem.hint
            for after in lines:
                left = Counter(map(site, problems(after)))[site(problem)]
                assert left < count[site(problem)], f"{shlex.join(words)} -> {shlex.join(after)}"
            open_lines += lines
    for after in by_hand:
        left = {site(problem) for problem in problems(tuple(shlex.split(after)))}
        assert not left & {site(problem) for problem in problems(first)}, after
    assert len(seen) < 150, "the hints lead on and on"


def test_every_error_has_a_line() -> None:
    """Each expression of the rules that makes an error is reached by a line."""
    for line in LINES:
        problems(tuple(shlex.split(line)))
    assert {*expressions()} - REACHED == set()
