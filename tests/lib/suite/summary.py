"""Prints what the tests of all environments took: python -m suite.summary FOLDER-OF-RECORDS.

Each environment's pytest has written a record there (`--record`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from suite.durations import TOLERANCE, Limits, Taken

SLOWEST = 30
BUDGET = Path(__file__).resolve().parents[2] / "budget.toml"


def environments(records: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table of environments."""
    head = f"{'environment':<22}{'set':>9}{'passed':>8}{'failed':>8}{'skipped':>9}"
    lines = [f"{head}{'wall s':>8}{'test s':>8}{'slowness':>10}"]
    for record in records:
        counts = record["outcomes"]
        busy = sum(test["seconds"] for test in record["tests"].values())
        lines.append(
            f"{record['name']:<22}{record['set']:>9}{counts.get('passed', 0):>8}"
            f"{counts.get('failed', 0):>8}{counts.get('skipped', 0):>9}"
            f"{record['seconds']:>8.0f}{busy:>8.0f}{record['slowness']:>10.2f}"
        )
    return lines


def folders(records: list[dict[str, Any]], limits: Limits) -> list[str]:
    """Return the lines of the table of folders: seconds of the reference machine, and budgets."""
    lines = [f"{'folder':<34}{'test s':>8}{'budget':>8}"]
    used: dict[str, float] = {}
    for record in records:  # an environment's tests have the whole budget
        taken = {nodeid: Taken(**test) for nodeid, test in record["tests"].items()}
        for folder, seconds in limits.used(taken).items():
            used[folder] = max(used.get(folder, 0.0), seconds)
    for folder, seconds in sorted(used.items()):
        over = " *" if seconds > limits.folders[folder] else ""
        lines.append(f"{folder:<34}{seconds:>8.1f}{limits.folders[folder]:>8g}{over}")
    if any(line.endswith("*") for line in lines):
        lines.append(f"* over its budget; at {TOLERANCE:g} times a run fails")
    return lines


def slowest(records: list[dict[str, Any]], count: int = SLOWEST) -> list[str]:
    """Return a line for each of the slowest tests, with wall-clock seconds."""
    tests = [
        (test["seconds"], record["name"], nodeid)
        for record in records
        for nodeid, test in record["tests"].items()
    ]
    return [f"{seconds:>8.2f} s  {name}: {nodeid}" for seconds, name, nodeid in
            sorted(tests, reverse=True)[:count]]  # fmt: skip


def main(folder: str) -> int:
    """Print the tables and return the exit status."""
    files = sorted(Path(folder).glob("*.json"), key=lambda path: path.stat().st_mtime)
    if not files:
        print(f"error: no record in {folder}: no environment has run tests", file=sys.stderr)
        return 1
    records = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    for lines in (
        environments(records),
        folders(records, Limits.read(BUDGET)),
        [f"The {SLOWEST} slowest tests, fixtures included:", *slowest(records)],
    ):
        print(*lines, "", sep="\n")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m suite.summary FOLDER")
    sys.exit(main(sys.argv[1]))
