"""One NVIDIA GPU, everything in one call: conformance, kernels, the speed table, loss curves.

    python benchmarks/gpu.py    # half an hour; results in $OUT or ./device-results
    python benchmarks/gpu.py --parts speed --models gpt-3.6b --contenders lmcore bare

lmcore, lmcore-cuda and lmcore-conformance are installed; `carry.py` takes them to a machine without
internet, and README.md has the calls where the time of one is short.
The goals are for an H100 SXM: 475,000 tokens/s is llm.c's for GPT-2 124M on one of eight GPUs,
49% Megatron-LM's best published MFU on this GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from device_suite import Case, Suite, main

H100 = 989.4e12
"""Dense bfloat16 FLOP/s of an H100 SXM and of an H200, by NVIDIA's data sheets."""

CASES = (
    Case("gpt2-124m", 32, {"tokens_per_second": 475e3, "mfu": 0.45, "ratio_of_peer": 1.10}),
    Case("gpt2-345m", 16, {"mfu": 0.50, "ratio_of_peer": 1.10}),
    Case("llama-1b", 4, {"mfu": 0.50, "ratio_of_peer": 1.10}),
    Case("gpt-1.7b", 8, {"mfu": 0.52}, peer=False),
    Case("gpt-3.6b", 2, {"mfu": 0.48}, peer=False),
)

if __name__ == "__main__":
    tests = ("tests/backend", "plugins_cuda/tests", "plugins/triton/tests")
    suite = Suite(
        "cuda",
        "bf16",
        H100,
        CASES,
        tests,
        triton=True,
        least={"ratio_of_bare": 0.99},
        most={"warm_start_seconds": 60.0},
    )
    raise SystemExit(main(suite))
