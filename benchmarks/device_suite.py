"""Evaluation of an accelerator in one call: conformance, kernels, speed, loss curves.

`gpu.py` and `xpu.py` say which device and what is expected of it; started alone this file tries
everything at small scale on the CPU, as `--device cpu` does.  Every part runs in separate
processes, and one that fails or is out of time is named; the rest continues.  Results are written
after each part to OUT/results.json; a table comes last, and OUT/report.json and OUT/report.md have
what may be shown to others (`device_report.py`).

Where the time of one call is short, `--parts`, `--models` and `--contenders` choose.  What the
processes printed is in OUT/logs.tar.gz.  The speed table is `device_speed.py`'s.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from device_report import write_report
from device_run import Case, Runner, Suite, failure
from device_speed import CONTENDERS, LMCORE, command_of, speed, train
from installed import TOY, check, parse, shared_flags

__all__ = ["Case", "Suite", "main"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PACKAGES = (
    *("torch", "triton", "numpy", "transformers", "accelerate", "lightning", "pytorch-lightning"),
    *("flash-attn", "flash-attn-3", "flash-attn-4", "apex", "liger-kernel", "transformer-engine"),
)
PYTEST = (
    *(sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider"),
    # What else is installed for pytest there is not asked for, and may warn, which is an error.
    *("--disable-plugin-autoload", "-p", "pytest_timeout"),
)
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
TRACE_BYTES = 15 << 20
"""Largest trace that is kept."""

GRAPH_SAMPLES, GRAPH_FLAGS = (1, 4), ((), ("--step-graph",))
"""Micro-batches of the first model with which steps are played from a record, and not."""

CURVE_LIMIT = 0.02
"""Largest difference between means of ten losses of both curves, in nats."""

CURVE_FLAGS = ("--lr", "5e-4", "--lr-warmup-iters", "10")
"""A calm run: bf16 and float32 on the CPU are 0.0003 apart.  The default one has steps that throw
it far off, and no two precisions continue alike from there."""


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
from lmcore.plugin import create_device, discover, select
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
    command = [*PYTEST, "-p", "lmcore_conformance.pytest_plugin", "--pyargs", "lmcore_conformance"]
    command += ["--accelerator", runner.suite.device, "--conformance-json", str(report)]
    if runner.suite.patience > 1:
        command += ["--patience", f"{runner.suite.patience:g}"]
    status, text = runner.process(command, "conformance", seconds=420)
    found: dict[str, Any] = {"status": status, "tail": text[-600:]}
    if report.exists():
        read = json.loads(report.read_text(encoding="utf-8"))
        failed = [one["id"] for one in read["checks"] if one["status"] == "failed"]
        found |= {"reached": read["reached"], "claimed": read["claimed"], "failed": failed}
    runner.note("conformance", found)


def tests(runner: Runner) -> None:
    """Run the tests that the device makes possible."""
    # How long a test may take is a matter of the machine that lmcore is developed on.
    command = [*PYTEST, "--no-time-limits", *(str(ROOT / one) for one in runner.suite.tests)]
    status, text = runner.process(command, "tests", seconds=400)
    runner.note("tests", {"status": status, "tail": text[-600:]})


def kernels(runner: Runner) -> None:
    """Time every kernel beside its op's reference."""
    command = [sys.executable, str(HERE / "kernels.py"), "--device", runner.suite.device]
    command += ["--dtype", DTYPES[runner.suite.precision]]
    command += runner.suite.flags
    if not runner.suite.toy:
        trial = ["--sizes", "small", "--turns", "3"]
        command += trial if runner.suite.device == "cpu" else ["--sizes", "124m", "1.7b"]
    status, text = runner.process(command, "kernels", seconds=150)
    runner.note("kernels", {"status": status, "tail": text[-6000:]})
    if runner.suite.triton:
        command = [sys.executable, str(HERE / "gpu_kernels.py"), *runner.suite.flags]
        status, text = runner.process(command, "triton-kernels", seconds=280)
        runner.note("triton kernels", {"status": status, "tail": text[-6000:]})


def graph(runner: Runner) -> None:
    """Compare steps played from a record with others, where the host may be the limit."""
    why = runner.results.get("what", {}).get("missing", {}).get("new_graph")
    if why:
        runner.note("graph", {"left_out": why})
        return
    found: dict[str, Any] = {}
    for size in GRAPH_SAMPLES:
        case = replace(runner.suite.cases[0], micro_batch_size=size)
        rows = [train(runner, replace(case, flags=(*case.flags, *flags))) for flags in GRAPH_FLAGS]
        failed = next((row["failed"] for row in rows if "failed" in row), None)
        rates = [row.get("tokens_per_second", 0.0) for row in rows]
        same = [row.get("last_loss") for row in rows]
        found[str(size)] = {"failed": failed} if failed else {
            "tokens_per_second": rates, "ratio": rates[1] / rates[0], "last_loss": same
        }  # fmt: skip
    runner.note("graph", {"model": runner.suite.cases[0].model, "samples": found})


def profile(runner: Runner) -> None:
    """Record a few steps of the first model: what takes the time, op by op."""
    case = runner.suite.cases[0]
    save = runner.folder / "profiled"
    short = replace(case, steps=14)
    command = [*command_of(runner, short, save, progress="auto"), "--profile"]
    status, text = runner.process(command, "profile", seconds=150)
    runner.note("profile", {"status": status, "tail": text[-6000:]})
    for trace in save.glob("profile/*"):
        if trace.stat().st_size < TRACE_BYTES:
            shutil.copy(trace, runner.out)
    shutil.rmtree(save, ignore_errors=True)


def curves(runner: Runner) -> None:
    """Compare steps of lmcore's default model on the device with the CPU's in float32."""
    steps = runner.suite.curve_steps
    losses: list[list[float]] = []
    both = ((runner.suite.device, runner.suite.precision), ("cpu", "fp32"))
    for number, (device, precision) in enumerate(both):
        save = runner.folder / f"curve-{number}"
        command = [*LMCORE, "train", "--device", device, *CURVE_FLAGS]
        command += ["--precision", precision, "--train-iters", str(steps), "--eval-iters"]
        command += ["0", "--sample-tokens", "0", "--progress", "none", "--no-tensorboard"]
        command += ["--no-save-optim", "--save", str(save)]
        status, text = runner.process(command, f"curve-{number}-{device}", seconds=240)
        if status != 0:
            runner.note("curves", {"failed": f"{device}: {failure(status, text)}"})
            return
        lines = (save / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    here, cpu = losses
    apart = [abs(statistics.mean(here[i : i + 10]) - statistics.mean(cpu[i : i + 10]))
             for i in range(0, steps, 10)]  # fmt: skip
    found = {"first": abs(here[0] - cpu[0]), "furthest_of_ten": max(apart), "last": cpu[-1]}
    within = {"limit": CURVE_LIMIT, "within": max(apart) <= CURVE_LIMIT}
    runner.note("curves", found | within | {"losses": {"device": here, "cpu": cpu}})


PARTS: dict[str, Callable[[Runner], None]] = {
    "facts": facts,
    "curves": curves,
    "speed": speed,
    "tests": tests,
    "conformance": conformance,
    "graph": graph,
    "kernels": kernels,
    "profile": profile,
}


def main(suite: Suite) -> int:
    """Run the parts that are asked for; return 1 if anything failed or could not be run."""
    parser = argparse.ArgumentParser(description=f"lmcore on `{suite.device}`, in one call")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="*", help="rows of the speed table; default: all")
    parser.add_argument(
        "--contenders", nargs="*", choices=CONTENDERS, default=[], help="of that; default: all"
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "device-results")))
    parser.add_argument("--seconds", type=float, default=2400.0, help="for everything")
    parser.add_argument(
        "--device",
        default=suite.device,
        help="another one than the script's own: everything there, at small scale",
    )
    asked = parse(parser, device="cpu")
    check(asked)
    if asked.device != suite.device or asked.toy:
        suite = replace(TRIAL, device=asked.device, precision=suite.precision)
    if asked.toy:
        suite = replace(suite, tests=TOY_TESTS, curve_steps=10)
    suite = replace(suite, flags=shared_flags(asked))
    if asked.models:
        chosen = tuple(case for case in suite.cases if case.model in asked.models)
        suite = replace(suite, cases=chosen)
    with Runner(suite, asked.out, asked.seconds, asked.contenders) as runner:
        runner.results |= {"note": TOY} if asked.toy else {}
        for name in asked.parts:
            try:
                PARTS[name](runner)
            except Exception:  # noqa: BLE001  # the table says so, and the other parts go on
                runner.note(name, {"failed": traceback.format_exc()[-600:]})
            runner.keep_logs()
        print(f"\n{write_report(suite, runner.results, asked.out)}")
        return int(any(has_failed(value) for value in runner.results.values()))


def has_failed(result: Any) -> bool:
    """Say whether a result, or a part of it, is that something failed."""
    if not isinstance(result, dict):
        return False
    if result.get("failed") or result.get("status", 0) != 0 or result.get("within") is False:
        return True
    return any(has_failed(one) for one in result.values())


TRIAL = Suite(
    "cpu",
    "fp32",
    None,
    tuple(Case(name, 2, steps=6, flags=("--num-threads", "1")) for name in ("tiny", "tiny-llama")),
    ("tests/backend",),
    compiled=False,
)
"""Everything at small scale, where there is no accelerator."""

TOY_TESTS = ("tests/backend/test_linear_cross_entropy.py",)
"""Tests that run in place of all of them at toy size."""

if __name__ == "__main__":
    raise SystemExit(main(TRIAL))
