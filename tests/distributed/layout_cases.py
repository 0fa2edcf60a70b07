"""The layouts whose steps are compared with those of one process, by the number of processes.

A name may begin with the kind of run, as in "fp64/tp" (see `layout_results.KINDS`).  Each value is
flags of `lmcore train`.
"""

from __future__ import annotations

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


MORE = ("-accumulating", "-selective")
"""Ends of the names that only processes on the CPU are taken through."""


def crossed(layouts: dict[str, str]) -> dict[str, str]:
    """Return each layout by itself, accumulating, and with either recompute while it does."""
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
    "uneven/pp4": "--pipeline-model-parallel-size 4",
}

OF_EIGHT = {
    **crossed({"tp-pp-dp": f"{TP} {PP}"}),
    "tp-sp-pp-zero3": f"{TP} {SP} {PP} --zero-stage 3",
    "tp-sp-cp-interleaved": f"{TP} {SP} {CP} {INTERLEAVED}",
    "tp-sp-hsdp3": f"{TP} {SP} --zero-stage 3 --data-parallel-replicas 2 {ACCUMULATE}",
}
