"""Rules for a run's settings, one by one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lmcore.config.load import load_config
from lmcore.config.validate import problems_of


def found(line: str, *, world_size: int = 1) -> list[str]:
    return [one.what for one in problems_of(load_config(line.split()), world_size=world_size)]


def hints(line: str) -> list[str | None]:
    return [one.hint for one in problems_of(load_config(line.split()), world_size=1)]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--preset gpt2-124m",
        "--preset gpt-310.1b",
        "--train-iters 10",
        "--train-samples 146484375 --lr-decay-samples 126953125 --lr-warmup-samples 183105",
        "--train-iters 50 --lr-decay-iters 45 --lr-warmup-iters 2",
        "--train-samples 100 --lr-warmup-fraction 0.1",
        "--global-batch-size 16",
        "--eval-iters 0 --split 100,0,0",
        "--eval-interval 0 --split 100,0,0",
        "--split 98,2,0",
        "--finetune --load runs/a",
        "--tokenizer-type NullTokenizer --vocab-size 100",
        "--lr 1e-3 --min-lr 1e-3",
        "--lr-warmup-iters 500",
        "--hidden-size 60 --num-attention-heads 8 --kv-channels 16",
        "--num-attention-heads 8 --group-query-attention",
        "--num-attention-heads 8 --group-query-attention --num-query-groups 8 --swiglu",
        "--position-embedding-type rope --rotary-percent 0.5 --rotary-base 500000",
        "--position-embedding-type rope --use-rope-scaling --rope-scaling-factor 4",
        "--position-embedding-type none --normalization rmsnorm --no-add-bias-linear",
    ],
)
def test_accepted(line: str) -> None:
    """Settings that make sense together raise nothing."""
    assert problems_of(load_config(line.split()), world_size=1) == []


HEADS = "`--hidden-size 8192` is not divisible by `--num-attention-heads 48`"
SCHEDULERS = "`--use-checkpoint-opt-param-scheduler` and `--override-opt-param-scheduler`"
BATCH = "is not divisible by micro batch size (4) times data parallel size (2)"


@pytest.mark.parametrize(
    "line,what,hint",
    [
        (
            "--num-layers 64 --hidden-size 8192 --num-attention-heads 48",
            HEADS,
            (
                "use `--num-attention-heads 16`, `32` or `64`, or `--hidden-size 8160` or "
                "`--hidden-size 8208`"
            ),
        ),
        (
            "--num-query-groups 2",
            "`--num-query-groups 2` needs `--group-query-attention`",
            "add `--group-query-attention`, or remove `--num-query-groups`",
        ),
        (
            (
                "--hidden-size 96 --num-attention-heads 12 --group-query-attention "
                "--num-query-groups 5"
            ),
            "`--num-attention-heads 12` is not divisible by `--num-query-groups 5`",
            "use `--num-query-groups 3`, `4` or `6`",
        ),
        (
            "--swiglu --hidden-size 16",
            "`--hidden-size 16` gives `--swiglu` a feed-forward layer without channels",
            "use `--ffn-hidden-size N` to set it",
        ),
        (
            "--rotary-base 500000",
            "`--rotary-base 500000` needs `--position-embedding-type rope`",
            "add `--position-embedding-type rope`, or remove `--rotary-base`",
        ),
        (
            "--position-embedding-type rope --rope-scaling-factor 4",
            "`--rope-scaling-factor 4` needs `--use-rope-scaling`",
            "add `--use-rope-scaling`, or remove `--rope-scaling-factor`",
        ),
        (
            "--position-embedding-type rope --kv-channels 6 --rotary-percent 0.5",
            "3 of a head's 6 channels cannot be rotated",
            (
                "use another `--rotary-percent`, `--kv-channels` or number of heads, so that the "
                "number is even"
            ),
        ),
        (
            "--seq-length 2048 --max-position-embeddings 1024",
            "`--seq-length 2048` exceeds `--max-position-embeddings 1024`",
            "use `--max-position-embeddings 2048` or `--seq-length 1024`",
        ),
        (
            "--train-iters 5 --train-samples 50",
            "`--train-iters 5` and `--train-samples 50` exclude each other",
            "keep one of them",
        ),
        (
            "--train-samples 5",
            "`--train-samples 5` is less than one step",
            "use `--train-samples 8` or more, or a smaller batch",
        ),
        (
            "--train-samples 50 --lr-decay-iters 3",
            "`--lr-decay-iters 3` cannot be combined with `train_samples`",
            "use `--lr-decay-samples N` in place of `--lr-decay-iters`",
        ),
        (
            "--train-iters 50 --lr-warmup-samples 3",
            "`--lr-warmup-samples 3` cannot be combined with `train_iters`",
            "use `--lr-warmup-iters N` in place of `--lr-warmup-samples`",
        ),
        (
            "--lr-decay-samples 3",
            "`--lr-decay-samples 3` cannot be combined with `train_iters`",
            "use `--lr-decay-iters N` in place of `--lr-decay-samples`",
        ),
        (
            "--lr-warmup-fraction 0.1 --lr-warmup-iters 3",
            "`--lr-warmup-fraction 0.1` and `--lr-warmup-iters 3` exclude each other",
            "keep one of them",
        ),
        (
            "--train-iters 50 --lr-warmup-iters 60",
            "`--lr-warmup-iters 60` is longer than the decay of 50",
            "use `--lr-warmup-iters 0`, or a larger `--lr-decay-iters`",
        ),
        (
            "--lr-warmup-iters 1501",
            "`--lr-warmup-iters 1501` is longer than the decay of 1500",
            "use `--lr-warmup-iters 15`, or a larger `--lr-decay-iters`",
        ),
        (
            "--lr 1e-4 --min-lr 1e-3",
            "`--min-lr 1e-3` exceeds `--lr 1e-4`",
            "use `--min-lr 1e-05`, a tenth of `--lr`, or less",
        ),
        (
            "--split 1,x",
            "`--split 1,x` is not a split",
            "use `--split 969,30,1`, or other shares of training, validation and test",
        ),
        (
            "--split 100,0,0",
            "`--split 100,0,0` leaves no validation documents",
            "use `--eval-iters 0`, or give validation a share: `--split 969,30,1`",
        ),
        (
            "--tokenizer-type NullTokenizer",
            "`--tokenizer-type NullTokenizer` needs `--vocab-size`",
            "add `--vocab-size N`",
        ),
        ("--finetune", "`--finetune` needs `--load`", "add `--load DIR`, or remove `--finetune`"),
        (
            "--use-checkpoint-opt_param-scheduler --override-opt_param-scheduler",
            SCHEDULERS + " exclude each other",
            "keep one of them",
        ),
    ],
)
def test_refused(line: str, what: str, hint: str) -> None:
    """Each rule names what was written and what to write instead."""
    assert found(line) == [what]
    assert hints(line) == [hint]


@pytest.mark.parametrize(
    "line,world_size,hint",
    [
        (
            "--micro-batch-size 4 --global-batch-size 12",
            2,
            "`--micro-batch-size 3`, `--global-batch-size 8` or `--global-batch-size 16`",
        ),
        (
            "--micro-batch-size 4 --global-batch-size 11",
            2,
            "`--global-batch-size 8` or `--global-batch-size 16`",
        ),
        (
            "--micro-batch-size 4 --global-batch-size 2",
            2,
            "`--micro-batch-size 1` or `--global-batch-size 8`",
        ),
        ("--micro-batch-size 4 --global-batch-size 3", 2, "`--global-batch-size 8`"),
    ],
)
def test_batch_sizes(line: str, world_size: int, hint: str) -> None:
    """The global batch is whole micro-batches on every process; the hint has sizes that fit."""
    (problem,) = problems_of(load_config(line.split()), world_size=world_size)
    assert problem.what.startswith("global batch size")
    assert problem.what.endswith(BATCH)
    assert problem.hint == hint


def test_head_hints_divide() -> None:
    """Every number of heads and every width that the hint names is valid."""
    for hidden, heads in [(100, 8), (7, 3), (64, 63), (8192, 48), (13, 12)]:
        (hint,) = hints(f"--hidden-size {hidden} --num-attention-heads {heads}")
        assert hint is not None
        left, _, right = hint.partition(", or ")
        for word in re.findall(r"\d+", left):
            assert hidden % int(word) == 0
        for word in right.split("--hidden-size ")[1:]:
            assert int(word.split("`")[0]) % heads == 0


def test_tokenizer_files_go_together(tmp_path: Path) -> None:
    """A byte-pair vocabulary needs its merges, and other tokenizers read no file."""
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    vocab.touch()
    merges.touch()
    assert found(f"--vocab-file {vocab}") == [f"`--vocab-file {vocab}` needs `--merge-file`"]
    both = f"--vocab-file {vocab} --merge-file {merges}"
    assert found(both) == []
    assert found(f"--tokenizer-type GPT2BPETokenizer {both}") == []
    assert found("--tokenizer-type GPT2BPETokenizer") == [
        "`--tokenizer-type GPT2BPETokenizer` needs `--vocab-file` and `--merge-file`",
    ]
    assert found(f"--tokenizer-type ByteTokenizer {both}") == [
        f"`--vocab-file {vocab}` cannot be combined with `--tokenizer-type ByteTokenizer`",
        f"`--merge-file {merges}` cannot be combined with `--tokenizer-type ByteTokenizer`",
    ]


def test_missing_files(tmp_path: Path) -> None:
    """Files that are not there are named before anything is built, with a guess where one is."""
    prefix = tmp_path / "web"
    for suffix in (".bin", ".idx"):
        Path(f"{prefix}_text_document{suffix}").touch()
    (what,) = found(f"--data-path {prefix}_text_document")
    assert what.endswith("_text_document` has no record of its tokenizer")
    assert found(f"--data-path {prefix}_text_document --tokenizer-type ByteTokenizer") == []
    Path(f"{prefix}_text_document.meta.json").touch()
    assert found(f"--data-path {prefix}_text_document") == []
    (hint,) = hints(f"--data-path {prefix}")
    assert hint == f"did you mean `--data-path {prefix}_text_document`?"
    assert found(f"--data-path {prefix}_text_document.bin") == []
    (hint,) = hints(f"--data-path 1 {prefix}")
    assert hint == f"did you mean `{prefix}_text_document`?"
    (hint,) = hints(f"--data-path {prefix}_text_sentence")
    assert hint == f"did you mean `--data-path {prefix}_text_document`?"
    text = tmp_path / "web.jsonl.xz"
    text.touch()
    for flag, reader in (("--data-path", "--train-data"), ("--valid-data-path", "--valid-data")):
        hint = hints(f"--train-data shakespeare {flag} {text}" if "v" in flag else f"{flag} {text}")
        assert f"it is text: `{reader} {text}` reads it" in hint[0]
        assert f"`lmcore data prepare --input {text} --output-prefix PREFIX`" in hint[0]
    (hint,) = hints(f"--data-path {tmp_path}/other")
    assert hint == "`lmcore data prepare` writes a dataset"
    missing = f"--vocab-file {tmp_path}/v --merge-file {tmp_path}/m"
    assert found(missing) == [
        f"`--vocab-file {tmp_path}/v`: no such file",
        f"`--merge-file {tmp_path}/m`: no such file",
    ]


def test_all_problems_at_once() -> None:
    """Independent problems are reported together."""
    line = (
        "--hidden-size 100 --num-attention-heads 8 --seq-length 20 --max-position-embeddings 10 "
        "--global-batch-size 9 --min-lr 1 --finetune"
    )
    assert len(found(line)) == 5


def test_a_text_and_a_data_set() -> None:
    """`--corpus` and `--data-path` cannot both be meant; the dataset is looked for still."""
    assert found("--corpus shakespeare --data-path web --tokenizer-type ByteTokenizer") == [
        "`--corpus shakespeare` and `--data-path web` exclude each other",
        "`--data-path web`: no such dataset",
    ]


@pytest.mark.parametrize(
    "line,whats",
    [
        ("--tokenizer-type Llama2Tokenizer", ["needs `--tokenizer-model`"]),
        ("--tokenizer-type BertWordPieceCase", ["needs `--vocab-file`"]),
        (
            "--tokenizer-type HFTokenizer",
            ["needs `--tokenizer-name-or-path` or `--tokenizer-model`"],
        ),
        ("--tokenizer-type Own --vocab-extra-ids 3", []),
        ("--vocab-extra-ids 3", ["`--vocab-extra-ids 3` needs `--tokenizer-type`"]),
        (
            "--tokenizer-type ByteTokenizer --no-add-special-tokens",
            ["cannot be combined with `--tokenizer-type ByteTokenizer`"],
        ),
        (
            "--tokenizer-type HFTokenizer --tokenizer-name-or-path gpt2",
            ["`--tokenizer-name-or-path gpt2`: no such file or directory"],
        ),
    ],
)
def test_options_of_tokenizer_types(line: str, whats: list[str]) -> None:
    """Each built-in type says which options it needs and which it does not take."""
    problems = found(line)
    assert len(problems) == len(whats)
    for problem, what in zip(problems, whats, strict=True):
        assert what in problem
