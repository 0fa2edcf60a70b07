"""Print steps, tokens and model TFLOP in a second of a run, from its `metrics.jsonl`.

    python throughput.py RUN [SKIPPED_STEPS]

The first steps (default 2) compile kernels and fill caches, and are left out.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path


def derived(run: Path, name: str) -> float:
    """Return a number that lmcore derived, from a comment of the run's `config.yaml`."""
    text = (run / "config.yaml").read_text(encoding="utf-8")
    found = re.search(rf"^#   {name}: (\d+)$", text, re.MULTILINE)
    if found is None:
        sys.exit(f"{run}/config.yaml has no `{name}`")
    return float(found[1])


def main(run: Path, skipped: int) -> None:
    """Print the figures of a run."""
    if not (run / "metrics.jsonl").is_file():
        sys.exit(f"{run} has no metrics.jsonl: no run has begun there")
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "step_time_ms" in row][skipped:]
    if not rows:
        sys.exit(f"{run} has no more than {skipped} steps")
    seconds = statistics.median(row["step_time_ms"] for row in rows) / 1000
    tokens = statistics.median(row["tokens_per_second"] for row in rows)
    flops, processes = derived(run, "flops_per_step"), derived(run, "world_size")
    print(f"median of {len(rows)} steps on {processes:.0f} processes:")
    print(f"  {1 / seconds:.4g} steps/s, {tokens:.6g} tokens/s")
    print(f"  {flops / seconds / 1e12:.4g} TFLOP/s, {flops / seconds / 1e12 / processes:.4g} each")


if __name__ == "__main__":
    if len(sys.argv) not in {2, 3}:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) == 3 else 2)
