"""One Intel GPU, everything in one call: conformance, kernels, the speed table, loss curves.

    python benchmarks/xpu.py                 # half an hour; results in $OUT or ./device-results
    python benchmarks/xpu.py --parts facts conformance tests
    python benchmarks/xpu.py --device cpu    # all parts at small scale, where there is none

lmcore, lmcore-xpu and lmcore-conformance are installed.  `report.json` and `report.md`, which come
last, are what to send: nobody who wrote the plugin has had such a GPU.  Peak rates, and with them
MFU, are the plugin's.  On a node with several GPUs level 4 of the conformance suite takes two.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from device_suite import Case, Suite, main

GIB = float(1 << 30)

CASES = (
    Case("gpt2-124m", 8, {"ratio_of_peer": 1.0}, memory=7 * GIB),
    Case("gpt2-345m", 4, {"ratio_of_peer": 1.0}, memory=11 * GIB),
    Case("llama-1b", 1, {"ratio_of_peer": 1.0}, memory=40 * GIB),
    Case("gpt-1.7b", 4, peer=False, memory=40 * GIB),
)
"""An Arc B580 takes the first two, a tile of a Max 1550 all."""

if __name__ == "__main__":
    # torch's compiler writes Triton for these GPUs; where that is missing, nothing is compiled.
    triton = importlib.util.find_spec("triton") is not None
    tests = ("tests/backend", "plugins/triton/tests")
    suite = Suite("xpu", "bf16", None, CASES, tests, triton=triton, compiled=triton, patience=3.0)
    raise SystemExit(main(suite))
