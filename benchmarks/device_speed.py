"""The speed table of `device_suite.py`: contender after contender, each through all models.

So that, where the time ends, the last contenders are missing, and no model.  They are

- `lmcore`: `lmcore train` itself, a cold process with empty caches of compilers, at the median of
  its later steps;
- `restart`: the same started again; the seconds from the command to the first step's loss;
- the loops of `device_loops.py`: `bare`, and the peers that are installed.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from device_loops import PEERS, SHAPES, shape_of
from device_run import Case, Runner, failure

__all__ = ["CONTENDERS", "LMCORE", "command_of", "speed"]

HERE = Path(__file__).parent
LMCORE = (sys.executable, "-m", "lmcore.cli.main")
CONTENDERS = ("lmcore", "restart", "bare", *PEERS)
_VOCABULARY = 50257


def speed(runner: Runner) -> None:
    """Measure every case by every contender, and what products of the device reach."""
    small = runner.suite.device == "cpu" and not runner.suite.toy
    size = ["--matmul-size", "1024"] if small else []
    runner.note("matmul", runner.answer([*_loop(runner, "matmul"), *size], "matmul", seconds=120))
    memory = runner.results.get("what", {}).get("memory")
    rows: dict[Case, dict[str, Any]] = {}
    for case in runner.suite.cases:
        rows[case] = {}
        if memory is not None and memory < case.memory:
            why = f"it needs {case.memory / 2**30:.0f} GiB, there are {memory / 2**30:.0f}"
            rows[case] = {"lmcore": {"left_out": why}}
            runner.note(f"speed.{case.model}", rows[case])
    for contender in runner.contenders or CONTENDERS:
        for case, row in rows.items():
            if "left_out" in row.get("lmcore", {}) or (contender in PEERS and not case.peer):
                continue
            row[contender] = _measured(runner, case, contender)
            runner.note(f"speed.{case.model}", row, shown=contender)


def _measured(runner: Runner, case: Case, contender: str) -> Mapping[str, Any]:
    if contender == "lmcore":
        return train(runner, case)
    if contender == "restart":
        return restart(runner, case)
    command = _loop(runner, contender)
    command += ["--model", case.model, "--micro-batch-size", str(case.micro_batch_size)]
    command += [] if runner.suite.compiled else ["--no-compile"]
    return runner.answer(command, f"{contender}-{case.model}", seconds=240)


def _loop(runner: Runner, name: str) -> list[str]:
    suite = runner.suite
    command = [sys.executable, str(HERE / "device_loops.py"), name, *suite.flags]
    return [*command, "--device", suite.device, "--precision", suite.precision]


def write_ids(prefix: Path, seq_length: int, vocabulary: int) -> None:
    """Write random token ids as a dataset."""
    import numpy as np

    from lmcore.data.indexed.writer import IndexedDatasetWriter

    random = np.random.default_rng(0)
    with IndexedDatasetWriter(str(prefix), np.dtype(np.uint16)) as writer:
        for _ in range(2000):
            writer.add_document(random.integers(0, vocabulary - 1, size=2 * seq_length).tolist())


def command_of(runner: Runner, case: Case, save: Path, *, progress: str = "none") -> list[str]:
    """Return the command that trains a case's model; its data are made at the first call."""
    layers, width, heads, length = SHAPES[case.model]
    shape = shape_of(case.model, case.micro_batch_size)
    vocabulary = min(_VOCABULARY, shape.vocab_size)
    prefix = runner.folder / f"ids-{length}-{vocabulary}"
    if not prefix.with_suffix(".idx").exists():
        write_ids(prefix, length, vocabulary)
    sizes = ["--num-layers", layers, "--hidden-size", width, "--num-attention-heads", heads]
    sizes += ["--seq-length", length, "--vocab-size", vocabulary - 1, *shape.flags]
    preset = ["--preset", case.model] if not case.model.startswith("tiny") else []
    command = [*LMCORE, "train", *preset, *map(str, sizes), *case.flags]
    command += ["--device", runner.suite.device, "--precision", runner.suite.precision]
    command += ["--tokenizer-type", "NullTokenizer", "--data-path", str(prefix)]
    command += ["--split", "1,0,0", "--eval-iters", "0", "--sample-tokens", "0"]
    command += ["--no-save-optim", "--progress", progress, "--no-tensorboard"]
    command += ["--micro-batch-size", str(case.micro_batch_size), "--train-iters", str(case.steps)]
    return [*command, "--save", str(save)]


def train(runner: Runner, case: Case) -> dict[str, Any]:
    """Return what `lmcore train` did: tokens a second, MFU, first step, memory."""
    save = runner.folder / "run"
    began = time.time()
    try:
        status, text = runner.process(
            command_of(runner, case, save), f"train-{case.model}", seconds=300
        )
        if status != 0:
            return {"failed": failure(status, text)}
        lines = (save / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        summary = json.loads((save / "summary.json").read_text(encoding="utf-8"))
        for kept in ("metrics.jsonl", "summary.json", "kernels.json", "environment.json"):
            shutil.copy(save / kept, runner.logs / f"train-{case.model}-{kept}")
    finally:
        shutil.rmtree(save, ignore_errors=True)
    rows = [json.loads(line) for line in lines]
    later = rows[len(rows) // 3 :]
    mfu = [row["mfu"] for row in later if row.get("mfu") is not None]
    return {
        "tokens_per_second": statistics.median(
            row["tokens_per_second"] for row in later if "tokens_per_second" in row
        ),
        "mfu": statistics.median(mfu) if mfu else None,
        "data_wait": sum(row["data_wait_ms"] for row in later)
        / sum(row["step_time_ms"] for row in later),
        "first_step_seconds": sum(summary["startup_seconds"].values()),  # of a cold start
        "startup_seconds": summary["startup_seconds"],
        "peak_memory_bytes": summary["peak_memory_bytes"],
        "seconds": time.time() - began,
        "first_loss": rows[0]["loss"],
        "last_loss": rows[-1]["loss"],
    }


def restart(runner: Runner, case: Case) -> dict[str, Any]:
    """Return the seconds to the end of the first step of a run that finds compilers' caches."""
    save = runner.folder / "again"
    rows = save / "metrics.jsonl"
    command, name = command_of(runner, case, save), f"restart-{case.model}"

    def done() -> bool:
        return rows.exists() and rows.stat().st_size > 0

    try:
        seconds = runner.until(command, name, done, seconds=180)
    finally:
        shutil.rmtree(save, ignore_errors=True)
    return {"failed": "no first step"} if seconds is None else {"seconds": seconds}
