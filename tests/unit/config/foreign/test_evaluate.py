"""Command lines of Megatron's tasks: each flag acts, or is answered with a reason."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError
from lmcore.cli.evaluate.section import EvaluateSection
from lmcore.config.foreign.evaluate import evaluate_flags, upstream_arguments
from lmcore.config.foreign.generate import GivenModel
from lmcore.config.option import options_of

COMMON = (
    "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--max-position-embeddings 1024 --fp16 --vocab-file v.json"
)
TOKENIZER = "--tokenizer-type GPT2BPETokenizer"
REST = (
    "--merge-file m.txt --micro-batch-size 8 "
    "--activations-checkpoint-method uniform --log-interval 10 --no-load-optim --no-load-rng"
)
RACE = (
    "--task RACE --num-layers 24 --seq-length 512 --fp16 --vocab-file v.txt "
    "--train-data race/train --valid-data race/dev/middle race/dev/high "
    "--pretrained-checkpoint bert --activations-checkpoint-method uniform --save-interval 10000 "
    "--save out --log-interval 100 --eval-interval 1000 --eval-iters 10 --weight-decay 1.0e-1 "
    "--tokenizer-type BertWordPieceLowerCase --epochs 3 --micro-batch-size 4 --lr 1.0e-5 "
    "--lr-warmup-fraction 0.06"
)


def test_wikitext() -> None:
    command = f"--task WIKITEXT103 {COMMON} --valid-data w.txt {TOKENIZER} --load gpt {REST}"
    found = upstream_arguments(command.split())
    begin = "gpt --task wikitext103_stream --task-data wikitext103_stream=w.txt --num-layers 24"
    assert " ".join(found).startswith(begin)
    assert "--micro-batch-size" not in found
    assert "--load" not in found


@pytest.mark.parametrize("flag,task", [("", "lambada"), ("--strict-lambada", "lambada_strict")])
def test_lambada(flag: str, task: str) -> None:
    command = f"--task LAMBADA {COMMON} --valid-data l.json {flag} --load gpt {REST}"
    found = " ".join(upstream_arguments(command.split()))
    assert found.startswith(f"gpt --task {task} --task-data {task}=l.json ")
    assert "strict-lambada" not in found


def test_a_task_that_is_fine_tuned(caplog: pytest.LogCaptureFixture) -> None:
    """The flags of the command come first, the flags of training after `--`."""
    caplog.set_level("INFO")
    found = " ".join(upstream_arguments(RACE.split()))
    assert found == (
        "bert --task race --finetune --seq-length 512 --vocab-file v.txt --train-data race/train "
        "--valid-data race/dev/middle race/dev/high --save out --eval-interval 1000 "
        "--tokenizer-type BertWordPieceLowerCase --epochs 3 --micro-batch-size 4 --lr 1.0e-5 "
        "--lr-warmup-fraction 0.06 -- --num-layers 24 --fp16 --activations-checkpoint-method "
        "uniform --log-interval 100 --weight-decay 1.0e-1"
    )
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        (
            "`--save-interval 10000` changes nothing here: checkpoints are saved at each "
            "validation, and the best one is kept"
        ),
        "`--eval-iters 10` changes nothing here: each validation is of all rows",
    ]
    assert upstream_arguments(RACE.replace("RACE", "QQP").split())[2] == "qqp"


@pytest.mark.parametrize("last", ["--weight-decay 0.1 --log-interval 100", "--eval-iters 10", ""])
def test_flags_of_training_after_two_dashes(last: str) -> None:
    """They are translated as those before it are."""
    command = "--task RACE --train-data t --valid-data v --pretrained-checkpoint b --save s --fp16"
    found = upstream_arguments(f"{command} -- {last}".split())
    assert found == upstream_arguments(f"{command} {last}".split())
    assert found.count("--") == 1


def test_other_commands_stay() -> None:
    for command in ("run --task lambada --task-data x", "run --text a.txt -- b", "--help"):
        assert upstream_arguments(command.split()) == command.split()


@pytest.mark.parametrize("files", ["", "--valid-data", "--valid-data a b"])
def test_one_file(files: str) -> None:
    with pytest.raises(ConfigError, match="needs `--valid-data FILE`"):
        upstream_arguments(f"--task WIKITEXT103 --load gpt {files}".split())


@pytest.mark.parametrize("fork", ["argonne", "bigscience"])
def test_each_flag_has_an_answer(fork: str, shared_data: Path) -> None:
    """A flag is an option, is translated with its task, or says why it is not used."""
    own = {flag for one in options_of(EvaluateSection) for flag in one.flags}
    flags = evaluate_flags(own, GivenModel())
    with_task = {"--pretrained-checkpoint", "--strict-lambada"}
    with (shared_data / f"flags/{fork}_tasks.tsv").open() as stream:
        names = [row["flag"] for row in csv.DictReader(stream, delimiter="\t")]
    assert len(names) > 10
    for name in names:
        if name in own:
            continue
        answer = flags[name].translate(("1",))
        assert answer.flags or answer.no_effect or answer.problem is not None, name
        assert (
            name in with_task or answer.problem is None or "--task nq" in str(answer.problem.hint)
        )
