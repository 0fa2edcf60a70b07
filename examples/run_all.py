"""Run every example at small scale, as `tox -e examples` does, and check what it leaves behind.

    python examples/run_all.py [NAME ...]

The examples use the `lmcore` beside the running Python.  Two run at a time, as most of an example's
time at this scale goes into starting programs, which takes one core.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ITERS = 6
AT_A_TIME = 2


def environment() -> dict[str, str]:
    """Return an environment in which `lmcore` and `python` are those of this interpreter."""
    scripts = str(Path(sys.executable).parent)
    path = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])
    threads = str(max((os.cpu_count() or 1) // AT_A_TIME, 1))
    return {
        "OMP_NUM_THREADS": threads,
        **os.environ,
        "PATH": path,
        "ITERS": str(ITERS),
        "PYTHONSAFEPATH": "1",
    }


def run_example(script: Path, run: Path) -> tuple[str, str | None]:
    """Run one example into the run directory *run*.

    Returns:
        All that it printed, and what is wrong, if anything.
    """
    with (run.parent / "errors.txt").open("w+", encoding="utf-8") as errors:
        done = subprocess.run(
            ["bash", str(script), str(run)],
            cwd=run.parent,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            check=False,
        )
        errors.seek(0)
        printed = f"{errors.read()}\n{done.stdout}"
    if done.returncode != 0:
        return printed, f"exit status {done.returncode}"
    return printed, what_is_wrong(run, done.stdout)


def what_is_wrong(run: Path, text: str) -> str | None:
    """Return what is wrong with a run's losses or with the generated text, if anything."""
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        return str(error)
    losses = [step["loss"] for step in map(json.loads, lines) if "loss" in step]
    if len(losses) != ITERS or not all(map(math.isfinite, losses)) or losses[-1] >= losses[0]:
        return f"{ITERS} finite, falling losses expected: {losses}"
    return None if text.strip() else "no text was generated"


def run_and_report(script: Path) -> str | None:
    """Run one example and print what it printed, at once; return what is wrong, if anything."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        printed, wrong = run_example(script, Path(folder) / "run")
    print(f"== {script.name}: {time.monotonic() - start:.0f} s\n{printed}", flush=True)
    return None if wrong is None else f"{script.name}: {wrong}"


def main(names: list[str]) -> int:
    """Run the named examples, or all of them; return 1 if one fails."""
    scripts = [HERE / name for name in names] or sorted(HERE.glob("*.sh"))
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        failed = [one for one in pool.map(run_and_report, scripts) if one is not None]
    print(*failed, f"{len(scripts) - len(failed)} of {len(scripts)} examples ran", sep="\n")
    return 1 if failed or not scripts else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
