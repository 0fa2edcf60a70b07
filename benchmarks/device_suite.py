"""What an accelerator does with lmcore, in one call: conformance, kernels, speed, loss curves.

`gpu.py` and `xpu.py` say which device and what is expected of it; started by itself this file tries
everything at small scale on the CPU, as `--device cpu` does.  Every part runs in processes of its
own, and one that fails or is out of time is named; the rest goes on.  Results are written after
each part to OUT/results.json; a table comes last, and OUT/report.json and OUT/report.md have what
may be shown to others (`device_report.py`).

Contenders of the speed table are `lmcore` (`lmcore train` itself, a cold process, at the median of
its later steps), and those of `device_loops.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from device_loops import SHAPES, shape_of
from device_report import write_report

HERE = Path(__file__).parent
LMCORE = (sys.executable, "-m", "lmcore.cli.main")
PACKAGES = ("torch", "triton", "transformers", "flash-attn", "liger-kernel", "transformer-engine")
_VOCABULARY = 50257
CURVE_STEPS, CURVE_LIMIT = 100, 0.05
"""Steps of both curves, and how far means of ten of their losses may lie apart, in nats."""


@dataclass(frozen=True)
class Case:
    """A row of the speed table.

    Attributes:
        model: A preset, or "tiny" for a trial.
        micro_batch_size: Samples of a step.
        goals: Lower bounds: "tokens_per_second", "mfu", "ratio_of_peer".
        flags: More flags for `lmcore train`.
        steps: Steps of `lmcore train`; the first third is not counted.
        peer: Whether the peer's loop runs too.
        memory: Bytes of device memory that it needs; a device with less leaves it out.
    """

    model: str
    micro_batch_size: int
    goals: Mapping[str, float] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    steps: int = 30
    peer: bool = True
    memory: float = 0.0


@dataclass(frozen=True)
class Suite:
    """What is run: on which device, in which precision, and what it is held to.

    Attributes:
        device: lmcore's device type.
        precision: `--precision` of all cases.
        peak: FLOP/s that the goals' MFU is of; None: what the plugin knows of the device.
        cases: Rows of the speed table.
        tests: Test files and folders that need the device.
        triton: Whether kernels in Triton are measured beside what the compiler makes, too.
        compiled: Whether the loops beside lmcore are compiled.
        patience: What all limits of time are multiplied by.
    """

    device: str
    precision: str
    peak: float | None
    cases: tuple[Case, ...]
    tests: tuple[str, ...] = ()
    triton: bool = False
    compiled: bool = True
    patience: float = 1.0


class Runner:
    """Runs parts in processes, each within what is left of the time."""

    def __init__(self, suite: Suite, out: Path, seconds: float) -> None:
        self.suite, self.out = suite, out
        self.end = time.monotonic() + seconds
        self.results: dict[str, Any] = {"device": suite.device}
        out.mkdir(parents=True, exist_ok=True)

    def note(self, name: str, value: Any) -> None:
        """Keep a result, and write all of them."""
        self.results[name] = value
        text = json.dumps(self.results, indent=1) + "\n"
        (self.out / "results.json").write_text(text, encoding="utf-8")
        print(f"{name}: {json.dumps(value)[:400]}", flush=True)

    def process(
        self, command: Sequence[str], name: str, *, seconds: float = 600.0, **env: str
    ) -> tuple[int | None, str]:
        """Return how a process ended, None for no time, and what it printed; keep it in OUT."""
        left = min(seconds * self.suite.patience, self.end - time.monotonic())
        if left < 5:
            return None, "no time left"
        log = self.out / f"{name}.log"
        with log.open("w", encoding="utf-8") as written:
            try:
                done = subprocess.run(
                    command,
                    stdout=written,
                    stderr=subprocess.STDOUT,
                    timeout=left,
                    env={**os.environ, **env},
                    check=False,
                )
                status: int | None = done.returncode
            except subprocess.TimeoutExpired:
                status = None
        return status, log.read_text(encoding="utf-8", errors="replace")

    def answer(self, command: Sequence[str], name: str, **more: Any) -> dict[str, Any]:
        """Return the last line of JSON that a process printed, or how it failed."""
        status, text = self.process(command, name, **more)
        lines = [line for line in text.splitlines() if line.startswith("{")]
        if status == 0 and lines:
            return dict(json.loads(lines[-1]))
        ended = "out of time" if status is None else f"status {status}"
        return {"failed": f"{ended}: {' '.join(text.split())[-300:]}"}


def versions() -> dict[str, str]:
    """Return what is installed here."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


_WHAT = """
import json, sys
from lmcore.config.section import Config
from lmcore.plugins import create_device, discover, select
plugins = discover()
device = create_device(plugins, select(plugins, requested=sys.argv[1]), Config())
memory = device.memory_stats().total if device.memory_stats else None
print(json.dumps(device.describe() | {"memory": memory}))
"""


def facts(runner: Runner) -> None:
    """Note device and versions, what the doctor says, and which plugins there are."""
    runner.note("versions", versions())
    runner.note("date", time.strftime("%Y-%m-%d"))
    runner.note("what", runner.answer([sys.executable, "-c", _WHAT, runner.suite.device], "what"))
    for name in ("doctor", "plugins"):
        status, text = runner.process([*LMCORE, name, "--json"], name, seconds=120)
        runner.note(name, {"status": status, "tail": text[-3000:]})


def conformance(runner: Runner) -> None:
    """Run the conformance suite, all levels."""
    report = runner.out / "conformance.json"
    command = [sys.executable, "-m", "pytest", "--pyargs", "lmcore_conformance", "-q", "-rfE"]
    command += ["--accelerator", runner.suite.device, "--conformance-json", str(report)]
    if runner.suite.patience > 1:
        command += ["--patience", f"{runner.suite.patience:g}"]
    status, text = runner.process([*command, "-p", "no:cacheprovider"], "conformance", seconds=420)
    found: dict[str, Any] = {"status": status, "tail": text[-600:]}
    if report.exists():
        read = json.loads(report.read_text(encoding="utf-8"))
        failed = [one["id"] for one in read["checks"] if one["status"] == "failed"]
        found |= {"reached": read["reached"], "claimed": read["claimed"], "failed": failed}
    runner.note("conformance", found)


def tests(runner: Runner) -> None:
    """Run the tests that the device makes possible."""
    command = [sys.executable, "-m", "pytest", "-q", "-rf", *runner.suite.tests]
    status, text = runner.process(command, "tests", seconds=300)
    runner.note("tests", {"status": status, "tail": text[-600:]})


def kernels(runner: Runner) -> None:
    """Time every kernel beside its op's reference."""
    command = [sys.executable, str(HERE / "kernels.py"), "--device", runner.suite.device]
    status, text = runner.process(command, "kernels", seconds=200)
    runner.note("kernels", {"status": status, "tail": text[-3000:]})
    if runner.suite.triton:
        command = [sys.executable, str(HERE / "gpu_kernels.py")]
        status, text = runner.process(command, "triton-kernels", seconds=200)
        runner.note("triton kernels", {"status": status, "tail": text[-4000:]})


def write_ids(prefix: Path, seq_length: int) -> None:
    """Write random token ids as a data set."""
    import numpy as np

    from lmcore.data.indexed_writer import IndexedDatasetWriter

    random = np.random.default_rng(0)
    with IndexedDatasetWriter(str(prefix), np.dtype(np.uint16)) as writer:
        for _ in range(2000):
            writer.add_document(random.integers(0, _VOCABULARY - 1, size=2 * seq_length).tolist())


def train(runner: Runner, case: Case, folder: Path) -> dict[str, Any]:
    """Return what `lmcore train` did: tokens a second, MFU, first step, memory."""
    shape = shape_of(case.model, case.micro_batch_size)
    write_ids(folder / "ids", shape.seq_length)
    save = folder / "run"
    layers, width, heads, length = SHAPES[case.model]
    sizes = ["--num-layers", layers, "--hidden-size", width, "--num-attention-heads", heads]
    sizes += ["--seq-length", length, "--vocab-size", _VOCABULARY - 1]
    preset = ["--preset", case.model] if case.model != "tiny" else []
    command = [*LMCORE, "train", *preset, *map(str, sizes), *case.flags]
    command += ["--device", runner.suite.device, "--precision", runner.suite.precision]
    command += ["--tokenizer-type", "NullTokenizer", "--data-path", str(folder / "ids")]
    command += ["--split", "1,0,0", "--eval-iters", "0", "--sample-tokens", "0"]
    command += ["--micro-batch-size", str(case.micro_batch_size), "--train-iters", str(case.steps)]
    command += ["--no-save-optim", "--progress", "none", "--no-tensorboard", "--save", str(save)]
    began = time.time()
    status, text = runner.process(command, f"train-{case.model}", seconds=300)
    if status != 0:
        return {"failed": f"status {status}: {' '.join(text.split())[-300:]}"}
    lines = (save / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    later = rows[len(rows) // 3 :]
    summary = json.loads((save / "summary.json").read_text(encoding="utf-8"))
    mfu = [row["mfu"] for row in later if row.get("mfu") is not None]
    return {
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in later),
        "mfu": statistics.median(mfu) if mfu else None,
        "data_wait": sum(row["data_wait_ms"] for row in later)
        / sum(row["step_time_ms"] for row in later),
        "first_step_seconds": sum(summary["startup_seconds"].values()),  # of a cold start
        "peak_memory_bytes": summary["peak_memory_bytes"],
        "seconds": time.time() - began,
        "first_loss": rows[0]["loss"],
        "last_loss": rows[-1]["loss"],
    }


def speed(runner: Runner) -> None:
    """Measure every case: lmcore, the bare loop, the peer."""
    suite = runner.suite
    loops = [sys.executable, str(HERE / "device_loops.py")]
    common = ["--device", suite.device, "--precision", suite.precision]
    size = ["--matmul-size", "1024"] if suite.device == "cpu" else []
    found = runner.answer([*loops, "matmul", *common, *size], "matmul", seconds=120)
    runner.note("matmul", found)
    memory = runner.results.get("what", {}).get("memory")
    for case in suite.cases:
        if memory is not None and memory < case.memory:
            why = f"it needs {case.memory / 2**30:.0f} GiB, there are {memory / 2**30:.0f}"
            runner.note(f"speed.{case.model}", {"lmcore": {"left_out": why}})
            continue
        folder = Path(tempfile.mkdtemp(prefix="suite-"))
        try:
            found: dict[str, Any] = {"lmcore": train(runner, case, folder)}
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        own = ["--model", case.model, "--micro-batch-size", str(case.micro_batch_size)]
        own += [] if suite.compiled else ["--no-compile"]
        for name in ("bare", "transformers") if case.peer else ("bare",):
            command = [*loops, name, *common, *own]
            found[name] = runner.answer(command, f"{name}-{case.model}", seconds=240)
        runner.note(f"speed.{case.model}", found)


def curves(runner: Runner) -> None:
    """Compare 100 steps of lmcore's default run on the device with those of the CPU in float32."""
    losses: list[list[float]] = []
    for device, precision in ((runner.suite.device, runner.suite.precision), ("cpu", "fp32")):
        save = runner.out / f"curve-{device}-{precision}"
        shutil.rmtree(save, ignore_errors=True)
        command = [*LMCORE, "train", "--device", device]
        command += ["--precision", precision, "--train-iters", str(CURVE_STEPS), "--eval-iters"]
        command += ["0", "--sample-tokens", "0", "--progress", "none", "--no-tensorboard"]
        command += ["--no-save-optim", "--save", str(save)]
        status, text = runner.process(command, f"curve-{device}", seconds=240)
        if status != 0:
            runner.note("curves", {"failed": f"{device}: status {status}: {text[-300:]}"})
            return
        lines = (save / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
        shutil.rmtree(save / "checkpoints", ignore_errors=True)
    here, cpu = losses
    apart = [abs(statistics.mean(here[i : i + 10]) - statistics.mean(cpu[i : i + 10]))
             for i in range(0, CURVE_STEPS, 10)]  # fmt: skip
    found = {"first": abs(here[0] - cpu[0]), "furthest_of_ten": max(apart), "last": cpu[-1]}
    runner.note("curves", found | {"within": max(apart) <= CURVE_LIMIT})


PARTS: dict[str, Callable[[Runner], None]] = {
    "facts": facts,
    "conformance": conformance,
    "tests": tests,
    "kernels": kernels,
    "curves": curves,
    "speed": speed,
}


def main(suite: Suite) -> int:
    """Run the parts that are asked for; return 1 if one of them could not."""
    parser = argparse.ArgumentParser(description=f"lmcore on `{suite.device}`, in one call")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="*", help="rows of the speed table; default: all")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "device-results")))
    seconds = 580.0 * suite.patience
    parser.add_argument("--seconds", type=float, default=seconds, help="for everything")
    parser.add_argument(
        "--device",
        default=suite.device,
        help="another one than the script's own: everything there, at small scale",
    )
    asked = parser.parse_args()
    if asked.device != suite.device:
        suite = replace(TRIAL, device=asked.device, precision=suite.precision)
    if asked.models:
        chosen = tuple(case for case in suite.cases if case.model in asked.models)
        suite = replace(suite, cases=chosen)
    runner = Runner(suite, asked.out, asked.seconds)
    for name in asked.parts:
        PARTS[name](runner)
    print(f"\n{write_report(suite, runner.results, asked.out)}")
    return int(any("failed" in str(value)[:20] for value in runner.results.values()))


TRIAL = Suite(
    "cpu",
    "fp32",
    None,
    (Case("tiny", 2, steps=6, flags=("--num-threads", "1")),),
    ("tests/backend",),
    compiled=False,
)
"""Everything at small scale, where there is no accelerator."""

if __name__ == "__main__":
    raise SystemExit(main(TRIAL))
