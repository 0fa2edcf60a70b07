"""Run every example at small scale, as `tox -e examples` does, and check what it leaves behind.

    python examples/run_all.py [NAME ...]

The examples use the `lmcore` beside the running Python.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ITERS = 12


def environment() -> dict[str, str]:
    """Return an environment in which `lmcore` and `python` are those of this interpreter."""
    scripts = str(Path(sys.executable).parent)
    path = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])
    return os.environ | {"PATH": path, "ITERS": str(ITERS), "PYTHONSAFEPATH": "1"}


def run_example(script: Path, run: Path) -> None:
    """Run one example into the run directory *run* and check its losses and its text.

    Raises:
        RuntimeError: It failed, or did not do what it shows.
    """
    command = ["bash", str(script), str(run)]
    done = subprocess.run(
        command, cwd=run.parent, env=environment(), stdout=subprocess.PIPE, text=True, check=False
    )
    print(done.stdout)
    if done.returncode != 0:
        raise RuntimeError(f"exit status {done.returncode}")
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [step["loss"] for step in map(json.loads, lines) if "loss" in step]
    if len(losses) != ITERS or not all(map(math.isfinite, losses)) or losses[-1] >= losses[0]:
        raise RuntimeError(f"{ITERS} finite, falling losses expected: {losses}")
    if not done.stdout.strip():
        raise RuntimeError("no text was generated")


def main(names: list[str]) -> int:
    """Run the named examples, or all of them; return 1 if one fails."""
    scripts = [HERE / name for name in names] or sorted(HERE.glob("*.sh"))
    failed = []
    for script in scripts:
        print(f"== {script.name}", flush=True)
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                run_example(script, Path(folder) / "run")
            except (OSError, RuntimeError) as problem:
                failed.append(f"{script.name}: {problem}")
        print(f"== {script.name}: {time.monotonic() - start:.0f} s", flush=True)
    print(*failed, f"{len(scripts) - len(failed)} of {len(scripts)} examples ran", sep="\n")
    return 1 if failed or not scripts else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
