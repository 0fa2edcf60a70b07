"""Layouts whose steps are compared with one process, by the number of processes.

A name may begin with the kind of run, as in "fp64/tp" (see `KINDS`).  Each value is flags of
`lmcore train`.

A case has a level of each factor that applies to it: data, tensor, context and pipeline
parallelism, kind, recomputation, accumulation, and the number of processes.  The fast set has the
cases that `cover` chooses.  It covers

- each level of each factor: each stage of ZeRO, each pipeline schedule and so on;
- each pair in the table of two of: an axis of parallelism, at any level; a kind; a recompute
  policy; a way of accumulating.  So each kind runs with each axis that it has any case with, and
  each axis with each other one.

It leaves out pairs of levels of two axes, such as ZeRO-2 with the zero-bubble schedule.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import pytest

from lmcore.contract.torch_versions import SPLIT_BACKWARD

TP = "--tensor-model-parallel-size 2"
SP = "--sequence-parallel"
CP = "--context-parallel-size 2"
PP = "--pipeline-model-parallel-size 2"
INTERLEAVED = f"{PP} --num-layers-per-virtual-pipeline-stage 1"
ZB = f"{PP} --pipeline-schedule zero-bubble"
ZBV = f"{PP} --pipeline-schedule zero-bubble-v"
ACCUMULATE = "--micro-batch-size 1"
FULL, SELECTIVE = "--recompute full", "--recompute selective"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1 --train-iters"

DOCUMENTS = "--reset-attention-mask --reset-position-ids --eod-mask-loss"
LLAMA = (
    "--normalization RMSNorm --swiglu --ffn-hidden-size 48 --position-embedding-type rope "
    "--group-query-attention --num-query-groups 2 --no-add-bias-linear "
    "--untie-embeddings-and-output-weights"
)
BLOOM = (
    "--position-embedding-type alibi --embed-layernorm --glu-activation geglu "
    "--ffn-hidden-size 48 --num-attention-heads 6 --kv-channels 8"
)
BERT = "--model-family bert"
T5 = "--model-family t5 --decoder-num-layers 3 --decoder-seq-length 12"
T5_ORIGINAL = (
    f"{T5} --position-embedding-type relative --normalization RMSNorm --no-add-bias-linear "
    "--no-t5-head-bias --no-t5-scaled-attention --t5-scaled-head --t5-feed-forward gated-gelu"
)
RETRO = (
    "--model-family retro --retro-chunk-length 4 --retro-first-layer 1 --retro-num-neighbors 3 "
    "--retro-num-retrieved-chunks 1"
)
ICT = "--model-family ict --retriever-score-scaling"
FP64 = "--precision fp64 --clip-grad 0"
CLASSIFIER = f"--task classification --task-data {__file__}"
CHOICE = f"--task multiple-choice --task-data {__file__}"
"""Tasks, whose samples `worker.py` draws: the file is not read."""

KINDS = {
    "fp32": "",
    "fp64": "--precision fp64 --clip-grad 0",
    "bf16": "--precision bf16",
    "fp16": "--precision fp16 --initial-loss-scale 1024",
    "documents": DOCUMENTS,
    "uneven": "--num-layers 5",
    "twice": "twice",
    "lamb": "--optimizer lamb",
    "llama": LLAMA,
    "bloom": f"{BLOOM} {FP64}",
    "bloom-documents": f"{BLOOM} {FP64} {DOCUMENTS}",
    "bert": f"{BERT} --precision fp64 --clip-grad 0",
    "bert-original": f"{BERT} --bert-post-norm --bert-gelu erf --precision fp64 --clip-grad 0",
    "t5": f"{T5} {FP64}",
    "t5-original": f"{T5_ORIGINAL} {FP64}",
    "retro": f"{RETRO} {FP64}",
    "retro-llama": f"{RETRO} {LLAMA} {FP64}",
    "ict": f"{ICT} --biencoder-projection-dim 12 {FP64}",
    "ict-shared": f"{ICT} --biencoder-shared-query-context-model --bert-post-norm {FP64}",
    "classifier": f"{BERT} {CLASSIFIER} {FP64}",
    "choice": f"{LLAMA} {CHOICE} {FP64}",
    "llama-documents": f"{LLAMA} --precision fp64 --clip-grad 0 {DOCUMENTS}",
}
"""Kinds of runs, each also run by one process; `twice`: forward calls every layer twice."""

MORE = ("-accumulating", "-selective")
"""Ends of the names of cases that run on the CPU only."""


def crossed(layouts: dict[str, str]) -> dict[str, str]:
    """Return each layout as it is, with accumulation, and with accumulation and each recompute."""
    ways = {
        "": "",
        "-accumulating": ACCUMULATE,
        "-full": f"{ACCUMULATE} {FULL}",
        "-selective": f"{ACCUMULATE} {SELECTIVE}",
    }
    return {
        f"{name}{way}": f"{flags} {more}"
        for name, flags in layouts.items()
        for way, more in ways.items()
    }


OF_TWO = {
    **crossed(
        {
            "dp": "",
            "zero1": "--use-distributed-optimizer",
            "zero2": "--zero-stage 2",
            "zero3": "--zero-stage 3",
            "tp": TP,
            "tp-sp": f"{TP} {SP}",
            "cp": CP,
            "pp": PP,
            "interleaved": INTERLEAVED,
            "zero-bubble": ZB,
            "zero-bubble-v": ZBV,
        }
    ),
    "zero3-full-at-once": f"--zero-stage 3 {FULL}",
    "tp-selective-at-once": f"{TP} {SELECTIVE}",
    "cp-full-at-once": f"{CP} {FULL}",
    "gpipe": f"{PP} --pipeline-schedule gpipe",
    "zero-bubble-interleaved": f"{ZB} --num-layers-per-virtual-pipeline-stage 1",
    "fp64/zero3": "--zero-stage 3",
    "fp64/tp-sp": f"{TP} {SP}",
    "fp64/cp": CP,
    "fp64/interleaved": INTERLEAVED,
    "fp64/zero-bubble-v": ZBV,
    "documents/tp-sp": f"{TP} {SP}",
    "documents/cp": CP,
    "documents/pp": PP,
    "uneven/pp": PP,
    "uneven/zero-bubble-v": ZBV,
    "twice/dp": "",
    "twice/zero3": "--zero-stage 3",
    "twice/tp-sp": f"{TP} {SP}",
    "twice/cp": CP,
    "twice/pp": PP,
    "llama/zero3-full": f"--zero-stage 3 {FULL}",
    "llama/tp": TP,
    "llama/tp-sp-selective": f"{TP} {SP} {SELECTIVE}",
    "llama/cp": CP,
    "llama/zero-bubble-v": ZBV,
    "llama-documents/cp": CP,
    "llama-documents/pp": PP,
    "bloom/zero3-full": f"--zero-stage 3 {FULL}",
    "bloom/tp": f"{TP} {ACCUMULATE}",
    "bloom/tp-sp-selective": f"{TP} {SP} {SELECTIVE}",
    "bloom/cp": CP,
    "bloom/interleaved": INTERLEAVED,
    "bloom-documents/cp": CP,
    "bloom-documents/tp-sp": f"{TP} {SP}",
    "bloom-documents/pp": PP,
    "bert/dp": ACCUMULATE,
    "bert/zero3-full": f"--zero-stage 3 {FULL}",
    "bert/tp": f"{TP} {ACCUMULATE}",
    "bert/tp-sp": f"{TP} {SP} {SELECTIVE}",
    "bert/pp": PP,
    "bert/interleaved": INTERLEAVED,
    "bert/zero-bubble-v": ZBV,
    "bert-original/zero1": "--zero-stage 1",
    "bert-original/tp-sp": f"{TP} {SP}",
    "bert-original/pp": PP,
    "t5/dp": ACCUMULATE,
    "t5/zero3-full": f"--zero-stage 3 {FULL}",
    "t5/tp": f"{TP} {ACCUMULATE}",
    "t5/tp-sp": f"{TP} {SP} {SELECTIVE}",
    "t5/pp": PP,
    "t5/gpipe": f"{PP} --pipeline-schedule gpipe {FULL} {ACCUMULATE}",
    "t5-original/pp": f"{PP} {SELECTIVE}",
    "t5-original/zero1": "--zero-stage 1",
    "t5-original/zero3-selective": f"--zero-stage 3 {SELECTIVE}",
    "t5-original/tp": TP,
    "t5-original/tp-sp": f"{TP} {SP} {FULL}",
    "retro/dp": ACCUMULATE,
    "retro/zero3-full": f"--zero-stage 3 {FULL}",
    "retro/tp": f"{TP} {ACCUMULATE}",
    "retro/tp-selective": f"{TP} {SELECTIVE}",
    "retro-llama/zero1": f"--zero-stage 1 {ACCUMULATE}",
    "retro-llama/zero3": "--zero-stage 3",
    "retro-llama/tp-full": f"{TP} {FULL}",
    # A question is compared with the blocks of a micro-batch on all ranks, two as on one process.
    "ict/dp": ACCUMULATE,
    "ict/zero3-full": f"--zero-stage 3 {FULL} {ACCUMULATE}",
    "ict/tp": TP,
    "ict/tp-sp": f"{TP} {SP} {SELECTIVE}",
    "ict-shared/zero1": f"--zero-stage 1 {ACCUMULATE}",
    "ict-shared/tp-sp": f"{TP} {SP}",
    "classifier/dp": ACCUMULATE,
    "classifier/zero3": "--zero-stage 3",
    "classifier/tp": TP,
    "classifier/tp-sp": f"{TP} {SP}",
    "classifier/pp": PP,
    "choice/dp": ACCUMULATE,
    "choice/zero1": "--zero-stage 1",
    "choice/tp": TP,
    "choice/tp-sp": f"{TP} {SP}",
    "choice/pp": PP,
    "lamb/zero3": "--zero-stage 3",
    "lamb/tp-sp": f"{TP} {SP}",
    "lamb/pp": PP,
    **{
        f"{precision}/{name}": flags
        for precision in ("bf16", "fp16")
        for name, flags in {
            "dp": "",
            "zero3": "--zero-stage 3",
            "tp-sp": f"{TP} {SP}",
            "cp": CP,
            "pp": PP,
        }.items()
    },
}

OF_FOUR = {
    **crossed(
        {
            "hsdp3": "--zero-stage 3 --data-parallel-replicas 2",
            "tp-sp-dp": f"{TP} {SP}",
            "pp-dp": PP,
            "tp-pp": f"{TP} {PP}",
        }
    ),
    "dp": "",
    "zero3": "--zero-stage 3",
    "hsdp1": "--zero-stage 1 --data-parallel-replicas 2",
    "hsdp2-accumulating": f"--zero-stage 2 --data-parallel-replicas 2 {ACCUMULATE}",
    "tp-dp": TP,
    "tp4-sp": f"--tensor-model-parallel-size 4 {SP}",
    "cp-dp": CP,
    "cp4-zero3": "--context-parallel-size 4 --zero-stage 3",
    "cp-tp-sp": f"{CP} {TP} {SP}",
    "cp-pp": f"{CP} {PP}",
    "pp4": "--pipeline-model-parallel-size 4",
    "pp4-zero-bubble": "--pipeline-model-parallel-size 4 --pipeline-schedule zero-bubble",
    "tp-sp-interleaved-full": f"{TP} {SP} {INTERLEAVED} {FULL}",
    "tp-sp-zero-bubble-v": f"{TP} {SP} {ZBV}",
    "zero1-pp": f"--zero-stage 1 {PP}",
    "zero2-interleaved": f"--zero-stage 2 {INTERLEAVED}",
    "zero3-pp-accumulating": f"--zero-stage 3 {PP} {ACCUMULATE}",
    "zero2-zero-bubble": f"--zero-stage 2 {ZB}",
    "zero1-cp": f"--zero-stage 1 {CP}",
    "zero2-tp": f"--zero-stage 2 {TP}",
    "zero3-tp-sp-full": f"--zero-stage 3 {TP} {SP} {FULL}",
    "fp64/zero3-tp-sp": f"--zero-stage 3 {TP} {SP}",
    "fp64/tp-pp": f"{TP} {PP}",
    "lamb/zero3-tp-sp": f"--zero-stage 3 {TP} {SP}",
    "documents/cp-tp-sp": f"{CP} {TP} {SP}",
    "llama/tp-sp-interleaved": f"{TP} {SP} {INTERLEAVED}",
    "llama/zero2-zero-bubble-v": f"--zero-stage 2 {ZBV}",
    "llama-documents/cp-tp-sp": f"{CP} {TP} {SP}",
    "bloom/zero1-pp": f"--zero-stage 1 {PP}",
    "bloom/cp-tp-sp": f"{CP} {TP} {SP}",
    "bert/tp-sp-pp": f"{TP} {SP} {PP}",
    "bert/zero2-tp": f"--zero-stage 2 {TP}",
    "bert-original/zero3-tp-sp": f"--zero-stage 3 {TP} {SP}",
    "retro/zero2-tp": f"--zero-stage 2 {TP}",
    "retro/zero3-tp": f"--zero-stage 3 {TP} {FULL}",
    "t5/zero2-tp": f"--zero-stage 2 {TP}",
    "t5/tp-sp-pp": f"{TP} {SP} {PP}",
    "t5/zero1-pp": f"--zero-stage 1 {PP}",
    "t5/pp4": "--pipeline-model-parallel-size 4",
    "t5/pp4-split": "--pipeline-model-parallel-size 4 --pipeline-model-parallel-split-rank 1",
    "t5-original/pp4-full": f"--pipeline-model-parallel-size 4 {FULL}",
    "t5-original/zero3-pp": f"--zero-stage 3 {PP}",
    "t5-original/tp-pp": f"{TP} {PP}",
    "t5-original/zero3-tp-sp": f"--zero-stage 3 {TP} {SP}",
    "ict/tp-sp-dp": f"{TP} {SP} {ACCUMULATE}",
    "uneven/pp4": "--pipeline-model-parallel-size 4",
}

OF_EIGHT = {
    **crossed({"tp-pp-dp": f"{TP} {PP}"}),
    "tp-sp-pp-zero3": f"{TP} {SP} {PP} --zero-stage 3",
    "tp-sp-cp-interleaved": f"{TP} {SP} {CP} {INTERLEAVED}",
    "tp-sp-hsdp3": f"{TP} {SP} --zero-stage 3 --data-parallel-replicas 2 {ACCUMULATE}",
}

CASES = {
    size: {
        name: flags
        for name, flags in cases.items()
        if SPLIT_BACKWARD or "--pipeline-schedule zero-bubble" not in flags
    }
    for size, cases in ((2, OF_TWO), (4, OF_FOUR), (8, OF_EIGHT))
}
"""All layouts that the installed torch can train, by the number of processes."""


class Case(NamedTuple):
    """One layout of a kind of run."""

    kind: str
    name: str

    @classmethod
    def of(cls, name: str) -> Case:
        """Split a name such as "fp64/tp"; without a kind, it is float32."""
        kind, _, _ = name.rpartition("/")
        return cls(kind if kind in KINDS else "fp32", name.replace("/", "_"))


def runs(cases: Mapping[str, str]) -> dict[str, str]:
    """Return the flags of cases, including the flags of their kinds."""
    found = {Case.of(name): flags for name, flags in cases.items()}
    return {case.name: f"{KINDS[case.kind]} {flags}" for case, flags in found.items()}


AXES = ("data", "tensor", "context", "pipeline")
"""Factors that apply to a case only if the axis is larger than 1."""


def factors(name: str, flags: str, num_processes: int) -> dict[str, str]:
    """Return the level of each factor that applies to a case."""
    arguments = shlex.split(flags)

    def value(flag: str, default: str = "") -> str:
        return arguments[arguments.index(flag) + 1] if flag in arguments else default

    tensor = int(value("--tensor-model-parallel-size", "1"))
    context = int(value("--context-parallel-size", "1"))
    pipeline = int(value("--pipeline-model-parallel-size", "1"))
    zero = value("--zero-stage", "1" if "--use-distributed-optimizer" in arguments else "")
    found = {
        "processes": str(num_processes),
        "kind": Case.of(name).kind,
        "recompute": value("--recompute", "none"),
        "accumulation": "more" if "--micro-batch-size" in arguments else "usual",
    }
    if zero or num_processes > tensor * context * pipeline:
        replicas = "hybrid " if "--data-parallel-replicas" in arguments else ""
        found["data"] = f"{replicas}zero{zero}" if zero else "replicas"
    if tensor > 1:
        found["tensor"] = "sequence parallel" if SP in arguments else "tensor parallel"
    if context > 1:
        found["context"] = "context parallel"
    if pipeline > 1:
        interleaved = "--num-layers-per-virtual-pipeline-stage" in arguments
        found["pipeline"] = value("--pipeline-schedule", "1f1b") + " interleaved" * interleaved
    return found


def levels(levels_of: Mapping[str, str]) -> set[Any]:
    """Return the levels of a case: (factor, level)."""
    return set(levels_of.items())


def levels_and_pairs(levels_of: Mapping[str, str]) -> set[Any]:
    """Return the levels of a case, and the pairs of its factors that the fast set must cover."""
    coarse = [
        (factor, "" if factor in AXES else level)
        for factor, level in sorted(levels_of.items())
        if factor != "processes"
    ]
    return levels(levels_of) | set(itertools.combinations(coarse, 2))


Key = TypeVar("Key")
Tables = Mapping[int, Mapping[str, str]]


def covered(
    tables: Tables, chosen: Iterable[tuple[int, str]], aims: Callable[[Mapping[str, str]], set[Any]]
) -> set[Any]:
    """Return the aims that the chosen cases cover; a case is a number of processes and a name."""
    sets = (aims(factors(name, tables[size][name], size)) for size, name in chosen)
    return set().union(*sets)


def cover(
    tables: Tables, aims: Callable[[Mapping[str, str]], set[Any]]
) -> dict[int, frozenset[str]]:
    """Return the names of few and small cases that together cover the aims of all cases."""
    every = {
        (size, name): aims(factors(name, flags, size))
        for size, cases in tables.items()
        for name, flags in cases.items()
    }
    chosen = least(every, price=lambda case: case[0])
    return {size: frozenset(name for at, name in chosen if at == size) for size in tables}


def least(
    aims_of: Mapping[Key, set[Any]],
    price: Callable[[Key], float],
    chosen: Iterable[Key] = (),
) -> list[Key]:
    """Return few and cheap keys that together cover the aims of all keys.

    Greedy: the next key has the most new aims for its price; the first such key on a tie.

    Args:
        aims_of: Aims of each key.
        price: Function that returns the price of a key.
        chosen: Keys to begin with.
    """
    found = list(chosen)
    missing = set().union(*aims_of.values()).difference(*(aims_of[key] for key in found))
    while missing:
        best = max(aims_of, key=lambda key: len(aims_of[key] & missing) / price(key))
        found.append(best)
        missing -= aims_of[best]
    return found


def marked(cases: Iterable[Any], fast: Iterable[Any]) -> list[Any]:
    """Return names as parameters of a test; slow ones run in the full set only."""
    few = set(fast)
    return [case if case in few else pytest.param(case, marks=pytest.mark.full) for case in cases]


FAST = cover(CASES, levels_and_pairs)
"""Names of the cases of the fast set, by the number of processes."""
