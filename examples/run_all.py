"""Run every example at small scale, as `tox -e examples` does, and check what it leaves behind.

    python examples/run_all.py [--device D] [--processes N] [NAME ...]

A NAME is a script or the folder `library`.  Scripts of `library/` run in one process and in two, or
in N alone; scripts of other libraries (`*_before.py`) and shell scripts run in one.  A script that
was moved from another library (`*_after.py`) must print the same losses.

The examples use the `lmcore` beside the running Python, on the device that it selects, or on device
D.  Two run at a time, as most of an example's time at this scale goes into starting programs, which
takes one core.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ITERS = 6
AT_A_TIME = 2
PROCESSES = (1, 2)
LOSSES = re.compile(r"loss ([\d.]+) -> ([\d.]+)")
STEPS = re.compile(r"^epoch \d+, batch \d+: loss .*", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """Result of one run of an example.

    Attributes:
        name: Name of the example, with its number of processes.
        wrong: Description of what is wrong; None: it ran.
        output: Its standard output.
    """

    name: str
    wrong: str | None
    output: str


def environment() -> dict[str, str]:
    """Return an environment whose `lmcore` and `python` belong to this interpreter."""
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


def run_example(command: list[str], folder: Path) -> tuple[int, str, str]:
    """Run one example in *folder*; return its exit status, output and standard error."""
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def commands(counts: Sequence[int]) -> dict[str, list[str]]:
    """Return the commands on these numbers of processes by name; `RUN` is the run directory."""
    found = {}
    if 1 in counts:
        found = {script.name: ["bash", str(script), "RUN"] for script in sorted(HERE.glob("*.sh"))}
    for script in sorted(HERE.glob("library/**/*.py")):
        name = script.relative_to(HERE).as_posix()
        for count in counts:
            if count == 1:
                found[name] = ["python", str(script)]
            elif not script.stem.endswith("_before"):  # a script of another library
                launch = ["lmcore", "run", "--nproc-per-node", str(count), str(script)]
                found[f"{name} x {count}"] = launch
    return found


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


def wrong_losses(text: str) -> str | None:
    """Return what is wrong with the losses that a script of `library/` printed, if anything."""
    printed = LOSSES.findall(text)
    if len(printed) == 1 and float(printed[0][1]) < float(printed[0][0]):
        return None
    return f"one line `loss X -> Y` expected, with a falling loss: {printed}"


def run_and_report(name: str, command: list[str]) -> Outcome:
    """Run one example and print what it printed, at once."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        words = [str(run) if word == "RUN" else word for word in command]
        status, output, errors = run_example(words, Path(folder))
        if status != 0:
            wrong: str | None = f"exit status {status}"
        else:
            wrong = (
                wrong_losses(output) if name.startswith("library") else what_is_wrong(run, output)
            )
    print(f"== {name}: {time.monotonic() - start:.0f} s\n{errors}\n{output}", flush=True)
    return Outcome(name, wrong, output)


def differences(outcomes: list[Outcome]) -> Iterator[str]:
    """Yield a sentence for each moved script that printed other losses than its original."""
    steps = {each.name: STEPS.findall(each.output) for each in outcomes if not each.wrong}
    for name, found in steps.items():
        before = name.replace("_after", "_before")
        if before != name and before in steps and (not found or found != steps[before]):
            yield f"{name} and {before} printed {found} and {steps[before]}"


def main() -> int:
    """Run the examples that the command line names, or all of them; return 1 if one fails."""
    parser = argparse.ArgumentParser(description="Run every example at small scale.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="script, or the folder `library`")
    parser.add_argument("--device", help="device of all runs; default: as lmcore selects it")
    parser.add_argument("--processes", type=int, help="processes of a run; default: 1 and 2")
    arguments = parser.parse_args()
    if arguments.device is not None:
        os.environ["LMCORE_DEVICE"] = arguments.device
    counts = PROCESSES if arguments.processes is None else (arguments.processes,)
    chosen = {
        name: command
        for name, command in commands(counts).items()
        if not arguments.names
        or {name.partition(" ")[0], name.partition("/")[0]} & set(arguments.names)
    }
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        outcomes = list(pool.map(run_and_report, chosen, chosen.values()))
    failed = [f"{outcome.name}: {outcome.wrong}" for outcome in outcomes if outcome.wrong]
    failed += differences(outcomes)
    for failure in failed:
        print(f"failed: {failure}")
    print(f"{len(outcomes)} runs of examples, {len(failed)} failures")
    return 1 if failed or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
