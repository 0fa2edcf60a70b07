"""Rules for the layout, one by one."""

from __future__ import annotations

import pytest

from lmcore.config.load import load_config
from lmcore.config.validate import problems_of

SMALL = {
    "--num-layers": "8",
    "--hidden-size": "64",
    "--num-attention-heads": "8",
    "--seq-length": "64",
}
PP = "--pipeline-model-parallel-size"
TP = "--tensor-model-parallel-size"
CP = "--context-parallel-size"
PER_STAGE = "--num-layers-per-virtual-pipeline-stage"
UNTIED = "--untie-embeddings-and-output-weights"
BATCH = "--micro-batch-size 1 --global-batch-size"


def problems(line: str, world_size: int) -> list[tuple[str, str]]:
    given = line.split()
    small = [word for name, value in SMALL.items() if name not in given for word in (name, value)]
    found = problems_of(load_config([*small, *given]), world_size=world_size)
    return [(one.what, one.hint or "") for one in found]


@pytest.mark.parametrize(
    "world_size,line",
    [
        (1, ""),
        (1, "--sequence-parallel --zero-stage 3"),
        (3, "--micro-batch-size 2 --global-batch-size 6"),
        (8, f"{TP} 8 --sequence-parallel"),
        (8, f"{TP} 2 {CP} 2 --sequence-parallel --zero-stage 3"),
        (4, f"{PP} 4 {BATCH} 4"),
        (4, f"{PP} 4 --num-layers 5 {BATCH} 7"),
        (8, f"{PP} 2 {PER_STAGE} 2 {BATCH} 8"),
        (2, f"{PP} 2 {PER_STAGE} 4 {BATCH} 2"),
        (4, f"{PP} 2 --pipeline-schedule zero-bubble {PER_STAGE} 1 --zero-stage 2 {BATCH} 8"),
        (4, f"{PP} 4 --pipeline-schedule zero-bubble-v {BATCH} 8"),
        (4, f"{PP} 2 --pipeline-schedule zero-bubble-v --zero-stage 2 {UNTIED} {BATCH} 8"),
        (2, f"{TP} 2 --group-query-attention --num-query-groups 2"),
        (8, "--zero-stage 1 --data-parallel-replicas 4"),
        (8, "--use-distributed-optimizer --data-parallel-replicas 2"),
        (2, f"{CP} 2 --zero-stage 3"),
    ],
)
def test_accepted(world_size: int, line: str) -> None:
    """Layouts that can be trained raise nothing."""
    assert problems(line, world_size) == []


REFUSED = [
    (
        6,
        f"{TP} 4",
        f"`{TP} 4` needs a multiple of 4 processes; this run has 6",
        "`--nproc-per-node 4` or `--nproc-per-node 8`",
    ),
    (
        2,
        f"{TP} 2 {PP} 2 {BATCH} 8",
        f"`{TP} 2` times `{PP} 2` needs a multiple of 4 processes; this run has 2",
        "use `--nproc-per-node 4` on",
    ),
    (
        3,
        f"{TP} 3 --num-attention-heads 6 --kv-channels 16 --hidden-size 64",
        f"`ffn_hidden_size: 256` (derived) is not divisible by 3, which `{TP} 3` asks for",
        "use `--ffn-hidden-size 255` or `--ffn-hidden-size 258`",
    ),
    (
        3,
        f"{TP} 3 --ffn-hidden-size 96",
        f"`--num-attention-heads 8` is not divisible by 3, which `{TP} 3` asks for",
        f"use `--num-attention-heads 6` or `--num-attention-heads 9`, or `{TP} 2`",
    ),
    (
        8,
        f"{TP} 8 --ffn-hidden-size 100",
        f"`--ffn-hidden-size 100` is not divisible by 8, which `{TP} 8` asks for",
        f"use `--ffn-hidden-size 96` or `--ffn-hidden-size 104`, or `{TP} 4`",
    ),
    (
        2,
        f"{CP} 2 --seq-length 62",
        f"`--seq-length 62` is not divisible by 4, which `{CP} 2` asks for",
        f"use `--seq-length 60` or `--seq-length 64`, or `{CP} 1`",
    ),
    (
        4,
        f"{TP} 4 --sequence-parallel --seq-length 62",
        f"`--seq-length 62` is not divisible by 4, which `{TP} 4` asks for",
        f"use `--seq-length 60` or `--seq-length 64`, or `{TP} 2`",
    ),
    (
        4,
        f"{TP} 2 {CP} 2 --sequence-parallel --seq-length 62",
        f"`--seq-length 62` is not divisible by 4, which `{CP} 2` asks for",
        "use `--seq-length 60` or",
    ),
    (
        1,
        f"{PER_STAGE} 2",
        f"`{PER_STAGE} 2` needs `--pipeline-model-parallel-size` above 1",
        f"add `{PP}` above 1",
    ),
    (
        1,
        "--pipeline-schedule gpipe",
        "`--pipeline-schedule gpipe` needs `--pipeline-model-parallel-size` above 1",
        f"add `{PP}` above 1",
    ),
    (
        16,
        f"{PP} 16 {BATCH} 16",
        f"`--num-layers 8` is less than `{PP} 16`",
        f"use `{PP} 8`, or more layers",
    ),
    (
        2,
        f"{PP} 2 {PER_STAGE} 3 {BATCH} 2",
        f"`--num-layers 8` is not a multiple of `{PP} 2` times `{PER_STAGE} 3`",
        f"use `{PER_STAGE} 1` or `2` or `4`",
    ),
    (
        3,
        f"{PP} 3 {PER_STAGE} 1 {BATCH} 3",
        f"`--num-layers 8` is not a multiple of `{PP} 3` times `{PER_STAGE} 1`",
        "use `--num-layers 6` or `9`",
    ),
    (
        2,
        f"{PP} 2 --pipeline-schedule interleaved {BATCH} 2",
        "`--pipeline-schedule interleaved` needs several stages in each process",
        f"add `{PER_STAGE} 2`",
    ),
    (
        8,
        f"{PP} 8 --pipeline-schedule interleaved {BATCH} 8",
        "`--pipeline-schedule interleaved` needs several stages in each process",
        f"use `--num-layers 16 {PER_STAGE} 1`, or `--pipeline-schedule 1f1b`",
    ),
    (
        2,
        f"{PP} 2 --pipeline-schedule gpipe {PER_STAGE} 1 {BATCH} 2",
        f"`--pipeline-schedule gpipe` cannot be combined with `{PER_STAGE} 1`",
        "use `--pipeline-schedule interleaved` or `zero-bubble`",
    ),
    (
        8,
        f"{PP} 8 --pipeline-schedule zero-bubble-v {BATCH} 8",
        "`--pipeline-schedule zero-bubble-v` needs 16 layers",
        "use `--num-layers 16` or more, or another schedule",
    ),
    (
        2,
        "--use-distributed-optimizer --zero-stage 0",
        "`--use-distributed-optimizer` and `--zero-stage 0` exclude each other",
        "keep one of them",
    ),
    (
        4,
        "--data-parallel-replicas 2",
        "`--data-parallel-replicas 2` needs `--zero-stage` 1, 2 or 3",
        "add `--zero-stage`",
    ),
    (
        8,
        "--zero-stage 2 --data-parallel-replicas 3",
        "`--data-parallel-replicas 3` does not leave several equal shards of 8",
        "use " + " or ".join(f"`--data-parallel-replicas {n}`" for n in (1, 2, 4)),
    ),
    (
        2,
        "--zero-stage 2 --data-parallel-replicas 2",
        "`--data-parallel-replicas 2` does not leave several equal shards of 2",
        "use `--data-parallel-replicas 1`",
    ),
    (
        4,
        f"{PP} 2 --pipeline-schedule zero-bubble --zero-stage 3 {BATCH} 8",
        "`--pipeline-schedule zero-bubble` cannot be combined with ZeRO stage 3",
        "use `--pipeline-schedule 1f1b`, or `--zero-stage 1`",
    ),
    (
        4,
        f"{PP} 2 --pipeline-schedule zero-bubble-v --use-distributed-optimizer {BATCH} 8",
        "`--pipeline-schedule zero-bubble-v` cannot be combined with ZeRO stage 1",
        "use `--pipeline-schedule 1f1b`",
    ),
    (
        4,
        f"{PP} 2 --pipeline-schedule zero-bubble-v --zero-stage 3 {UNTIED} {BATCH} 8",
        "`--pipeline-schedule zero-bubble-v` cannot be combined with ZeRO stage 3",
        "use `--pipeline-schedule 1f1b`, or `--zero-stage 1`",
    ),
    (
        2,
        f"{TP} 2 --group-query-attention",
        (
            "`num_query_groups: 1` (derived) is not divisible by 2, which "
            "`--tensor-model-parallel-size 2` asks for"
        ),
        "use `--num-query-groups 2`, or `--tensor-model-parallel-size 1`",
    ),
    (
        8,
        f"{PP} 4 {BATCH} 4",
        "2 micro-batches are fewer than the pipeline's 4 processes",
        "use `--global-batch-size 8` or more",
    ),
    (
        2,
        f"{PP} 2 {PER_STAGE} 2 {BATCH} 3",
        "3 micro-batches are not a multiple of the pipeline's 2 processes",
        "use `--global-batch-size 2` or `--global-batch-size 4`",
    ),
    (
        2,
        f"{PP} 2 --pipeline-schedule zero-bubble {BATCH} 5",
        "5 micro-batches are not a multiple of the pipeline's 2 processes",
        "use `--global-batch-size 4` or `--global-batch-size 6`",
    ),
]


@pytest.mark.parametrize("world_size,line,what,hint", REFUSED)
def test_refused(world_size: int, line: str, what: str, hint: str) -> None:
    """The problem names the size that cannot be divided, with the nearest that can."""
    found = problems(line, world_size)
    assert len(found) == 1, found
    assert what in found[0][0]
    assert hint in found[0][1]


@pytest.mark.parametrize("schedule", [f"{PER_STAGE} 1", "--pipeline-schedule zero-bubble"])
def test_every_size_of_a_ramp_is_in_groups(schedule: str) -> None:
    """A schedule that takes micro-batches in groups refuses a ramp with any size between them."""
    line = f"{PP} 2 {schedule} {BATCH} 8 --train-samples 1000 --rampup-batch-size"
    assert problems(f"{line} 2 2 100", 2) == []
    what, hint = problems(f"{line} 2 1 100", 2)[0]
    assert what == "3 micro-batches are not a multiple of the pipeline's 2 processes"
    assert "a START and an INCREMENT that are multiples of 2" in hint
    assert problems(f"{PP} 2 {BATCH} 8 --train-samples 1000 --rampup-batch-size 2 1 100", 2) == []


def test_a_ramp_starts_with_enough_micro_batches() -> None:
    """The smallest batch of a run that grows must fill the pipeline."""
    ramp = "--rampup-batch-size 2 2 100 --train-samples 1000 --micro-batch-size 1"
    found = problems(f"{PP} 4 {ramp} --global-batch-size 8", 4)
    assert [what for what, _ in found] == [
        "2 micro-batches are fewer than the pipeline's 4 processes"
    ]


def test_all_problems_at_once() -> None:
    """One run shows the problems of heads, sequence and layers together."""
    found = problems(f"{TP} 3 {CP} 3 {PP} 16 --ffn-hidden-size 96 {BATCH} 16", 144)
    named = [what for what, _ in found]
    assert any("`--num-attention-heads 8`" in what for what in named)
    assert any("`--seq-length 64`" in what for what in named)
    assert any("`--num-layers 8`" in what for what in named)
