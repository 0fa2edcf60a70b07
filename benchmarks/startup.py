"""Start-up: `--help` beside the peers' commands, and where a cold `lmcore train` spends its time.

Whole processes, in turns, medians of wall seconds.  A command that is not installed beside this
interpreter is left out and named.

    python benchmarks/startup.py
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from installed import check, parse

_HELPS = {
    "lmcore --help": ["lmcore", "--help"],
    "lmcore train --help": ["lmcore", "train", "--help"],
    "torchrun --help": ["torchrun", "--help"],
    "accelerate --help": ["accelerate", "--help"],
}
_OURS = "outside torch, data, steps"
_NOT_OURS = ("import_torch", "data", "first_step")


def command(words: list[str]) -> list[str] | None:
    """Return the command with its program beside this interpreter, or None."""
    program = shutil.which(words[0], path=str(Path(sys.executable).parent))
    return [program, *words[1:]] if program else None


def helps(turns: int) -> None:
    """Print the time of each `--help`."""
    commands = {}
    for name, words in _HELPS.items():
        found = command(words)
        if found is None:
            print(f"{name}: left out, not installed", file=sys.stderr)
        else:
            commands[name] = found
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(turns + 1):
        for name, words in commands.items():
            began = time.perf_counter()
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if turn:  # the first one warms the page cache
                seconds[name].append(time.perf_counter() - began)
    for name, values in seconds.items():
        print(f"{name:<24}{statistics.median(values):>8.3f} s")


def cold_train(turns: int, steps: int) -> float:
    """Print the phases of a run's start, and of its whole life, for a run of so many steps.

    Returns:
        Time outside torch, data and steps, as a multiple of the time of `import torch`.
    """
    program = command(["lmcore"])
    if program is None:
        raise SystemExit("lmcore is not installed beside this interpreter")
    rows: list[dict[str, float]] = []
    for _ in range(turns):
        with tempfile.TemporaryDirectory() as folder:
            save = Path(folder) / "run"
            flags = ["--train-iters", str(steps), "--eval-iters", "0", "--sample-tokens", "0"]
            began = time.perf_counter()
            subprocess.run(
                [*program, "train", "--save", str(save), *flags],
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            whole = time.perf_counter() - began
            summary = json.loads((save / "summary.json").read_text())
            later = (steps - 1) * summary["median_step_ms"] / 1e3
            start = summary["startup_seconds"]
            ours = whole - later - sum(start[name] for name in _NOT_OURS)
            rows.append({**start, "whole": whole, _OURS: ours})
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    for name, seconds in medians.items():
        print(f"{name:<28}{seconds:>8.3f} s")
    ratio = medians[_OURS] / medians["import_torch"]
    print(f"{'to import torch':<28}{ratio:>8.2f}")
    return ratio


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=3, help="cold runs")
    parser.add_argument("--help-turns", type=int, default=5, help="of every `--help`")
    parser.add_argument("--train-iters", type=int, default=20)
    parser.add_argument(
        "--most",
        type=float,
        help="fail if the time outside torch, data and steps is more than so many times that of "
        "`import torch`",
    )
    asked = parse(parser, turns=1, help_turns=1, train_iters=2)
    check(asked)
    helps(asked.help_turns)
    print(f"\nlmcore train --train-iters {asked.train_iters}, a cold process", flush=True)
    ratio = cold_train(asked.turns, asked.train_iters)
    if asked.most is not None and ratio > asked.most:
        raise SystemExit(f"{_OURS}: {ratio:.2f} times `import torch`, over {asked.most:g}")


if __name__ == "__main__":
    main()
