"""Level 3: a tiny GPT trains on the device as on the host, and resumes from its checkpoint."""

from __future__ import annotations

import json
import math
import os
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from lmcore.plugin.isolation.subprocess_call import call_isolated
from lmcore.runtime.launch.rank import RankInfo
from lmcore_conformance.registry import Failure, NotApplicable, NotRun, check, conclude
from lmcore_conformance.tiny_run import (
    DROPOUT,
    REFERENCES,
    Trained,
    shape_flags,
    tiny_runs,
)

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

_check = partial(check, level="L3", group="training", seconds=120)
_STEPS = 20
_CURVE = 2e-5
"""Largest difference of a float32 loss from the host's in float64, at losses of about 5."""

_SAME_CURVE = 2e-5
"""Largest relative difference of losses and gradient norms between layouts in float32."""

_PLACE = RankInfo().to_env().keys()
"""The variables that make a process one of several."""

_LOWER = 0.05
"""Largest relative difference of the loss in another precision."""


def _distance(found: Trained, wanted: Trained) -> float:
    return max(abs(a - b) for a, b in zip(found.losses, wanted.losses, strict=True))


@_check(
    "train.curve",
    f"{_STEPS} steps in float32 have the losses of the host in float64, and they fall.",
    reason="It depends on all parts: kernels, optimizer, data, initial weights.",
)
def curve(bench: Bench) -> str:
    """Train on both; the host uses the references."""
    with tiny_runs(bench) as runs:
        right = runs.train(f"--precision fp64 {REFERENCES}", steps=_STEPS, host=True)
        found = runs.train("--precision fp32", steps=_STEPS)
    off = _distance(found, right)
    first = next(
        (at for at, (a, b) in enumerate(zip(found.losses, right.losses, strict=True), start=1)
         if not abs(a - b) <= _CURVE),
        None,
    )  # fmt: skip
    if first is not None:
        raise Failure(
            f"the loss of step {first} is {found.losses[first - 1]:.7f}, the host's "
            f"{right.losses[first - 1]:.7f}; the largest difference is {off:.1e}"
        )
    norms = max(abs(a / b - 1) for a, b in zip(found.norms, right.norms, strict=True))
    if not norms < 1e-3:
        raise Failure(f"gradient norms are off by {norms:.1e} of them")
    if not found.losses[-1] < found.losses[0] - 0.5:
        raise Failure(f"the loss goes from {found.losses[0]:.3f} to {found.losses[-1]:.3f}")
    own = sum(not name.startswith("lmcore:") for name in found.kernels.values())
    return f"off by {off:.1e} at most; {own} of {len(found.kernels)} ops by the plugin's kernels"


@_check(
    "train.references",
    "The losses are the same with the references on the device instead of the plugin's kernels.",
    reason="`--ops X=reference` lets a user replace a faulty kernel.",
)
def references(bench: Bench) -> str:
    """Train with every op by its reference."""
    with tiny_runs(bench) as runs:
        right = runs.train(f"--precision fp64 {REFERENCES}", host=True)
        found = runs.train(f"--precision fp32 {REFERENCES}")
    off = _distance(found, right)
    if not off <= _CURVE:
        raise Failure(f"losses are off by {off:.1e}")
    return f"off by {off:.1e} at most"


@_check(
    "train.micro-batches",
    "A batch of four micro-batches gives the losses and weights of the batch in one.",
    reason="Gradients of micro-batches are accumulated on the device.",
)
def micro_batches(bench: Bench) -> str:
    """Compare one micro-batch of four with four of one."""
    with tiny_runs(bench) as runs:
        reference = runs.train("--precision fp32")
        parts = runs.train("--precision fp32 --micro-batch-size 1")
    off = _distance(parts, reference)
    if not off <= _CURVE:
        raise Failure(f"losses are off by {off:.1e}")
    return f"off by {off:.1e} at most"


@_check(
    "train.repeat",
    "Under `--deterministic`, equal runs with dropout are equal bit for bit; another seed is not.",
    reason="A run that cannot be repeated cannot be examined.",
    requires=["deterministic"],
)
def repeat(bench: Bench) -> str:
    """Train twice alike, and once otherwise."""
    with tiny_runs(bench) as runs:
        first, second = (runs.train(f"--deterministic {DROPOUT}") for _ in range(2))
        other = runs.train(f"--deterministic {DROPOUT} --seed 7")
    differing = first.differing(second)
    if differing:
        raise Failure(f"{len(differing)} differ: {', '.join(differing[:4])}")
    if other.losses == first.losses:
        raise Failure("another seed gives the same run")
    return f"{len(first.tensors)} tensors"


@_check(
    "train.resume",
    "A resumed run equals an uninterrupted run, bit for bit: weights, moments, random states, "
    "losses.",
    reason="Long runs are resumed many times.",
    requires=["deterministic"],
)
def resume(bench: Bench) -> str:
    """Train eight steps; and four, a checkpoint, and four more."""
    return _resumed(bench, "")


@_check(
    "train.async-save",
    "A run resumed from an asynchronously saved checkpoint equals an uninterrupted run, bit for "
    "bit.",
    reason="`--async-save`: the copy must have the state of one step.",
    requires=["deterministic"],
)
def async_save(bench: Bench) -> str:
    """Check the same with steps between the start of the copy and its end."""
    return _resumed(bench, "--async-save")


def _resumed(bench: Bench, more: str) -> str:
    with tiny_runs(bench) as runs:
        flags = f"--deterministic {DROPOUT} {more}"
        save = f"{flags} --save {runs.folder / 'run'} --save-interval 4"
        uninterrupted = runs.train(flags, steps=8)
        first = runs.train(save, steps=7)
        resumed = runs.train(f"{flags} --load {runs.folder / 'run'}", steps=8)
    if first.losses != uninterrupted.losses[:7]:
        raise Failure("saving changes the run")
    if resumed.losses != uninterrupted.losses[4:]:
        raise Failure(
            f"losses after it: {resumed.losses}, of the whole run: {uninterrupted.losses[4:]}"
        )
    differing = [
        name for name in uninterrupted.differing(resumed) if name not in {"losses", "norms"}
    ]
    if differing:
        raise Failure(f"{len(differing)} differ: {', '.join(differing[:4])}")
    return f"{len(uninterrupted.tensors)} tensors"


@_check(
    "train.mixed-precision",
    "Training in every other precision has losses close to those of float32, but not equal.",
    reason="Half precision must not diverge.",
    requires=["mixed_precision"],
)
def mixed_precision(bench: Bench) -> str:
    """Compare six steps of each with float32's; a loss scale begins low enough to skip none."""
    faults, done = [], []
    names = {
        policy.name: " --initial-loss-scale 256" if policy.loss_scaling else ""
        for policy in bench.precision_policies
        if policy.available() is None and policy.name != "fp32"
    }
    with tiny_runs(bench) as runs:
        plain = runs.train("--precision fp32")
        for name, more in names.items():
            found = runs.train(f"--precision {name}{more}")
            if any(map(math.isnan, found.norms)):
                faults.append(f"`{name}`: gradients overflow at a loss scale of 256")
                continue
            off = max(abs(a / b - 1) for a, b in zip(found.losses, plain.losses, strict=True))
            done.append(f"{name} {off:.1e}")
            if not off < _LOWER:
                faults.append(f"`{name}`: losses are off by {off:.1%}")
            if found.losses == plain.losses:
                faults.append(f"`{name}`: the losses are those of fp32, bit for bit")
    return conclude(faults, ", ".join(done))


@_check(
    "train.command",
    "`lmcore train` on the device succeeds and writes its run directory, and `lmcore generate` "
    "reads it.",
    reason="Users run these commands.",
    group="command",
    seconds=150,
)
def command(bench: Bench) -> str:
    """Run both commands, each in a separate process."""
    device = bench.selection.plugin
    with TemporaryDirectory(prefix="lmcore-conformance-") as folder:
        run = Path(folder) / "run"
        arguments = ["train", "--device", device, "--save", str(run), "--train-iters", "4"]
        arguments += ["--progress", "plain", "--sample-tokens", "0", "--log-interval", "1"]
        _succeed(bench, [*arguments, "--nproc-per-node", "1", *shape_flags().split()])
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        environment = json.loads((run / "environment.json").read_text(encoding="utf-8"))
        used = environment["selection"]["plugin"]
        (own,) = (one for one in environment["plugins"] if one["name"] == (bench.subject or device))
        if not own["brings"]:
            raise NotApplicable("a run without options uses nothing of the plugin")
        if summary["status"] != "completed" or used != device:
            raise Failure(f"the run is {summary['status']}, on plugin `{used}`")
        arguments = ["generate", "--load", str(run), "--prompt", "To be", "--device", device]
        _succeed(bench, [*arguments, "--tokens", "4"])
    return f"loss {summary['loss']:.3f} after {summary['iteration']} steps"


@_check(
    "train.processes",
    "`lmcore train` on two processes takes the steps that one process takes, with the same losses "
    "and gradient norms, micro-batches accumulated or not.",
    reason="The number of processes must not change a run.",
    group="command",
    requires=["distributed"],
    seconds=240,
    level="L4",
)
def processes(bench: Bench) -> str:
    """Train alone, and on two with one and with two micro-batches each; compare the curves."""
    count = bench.selection.probe.count
    if count < 2 and not bench.is_shared:
        raise NotRun(f"needs 2 devices, and there is {count}")
    layouts = {"1 process": (1, 4), "2 processes": (2, 4), "2, accumulating": (2, 2)}
    curves: dict[str, list[tuple[float, float]]] = {}
    with TemporaryDirectory(prefix="lmcore-conformance-") as folder:
        for number, (name, (size, micro)) in enumerate(layouts.items()):
            run = Path(folder) / str(number)
            arguments = ["train", "--device", bench.selection.plugin, "--save", str(run)]
            arguments += ["--train-iters", "5", "--progress", "plain", "--sample-tokens", "0"]
            arguments += ["--nproc-per-node", str(size), *shape_flags(micro=micro, batch=8).split()]
            if bench.wanted_backend:
                arguments += ["--distributed-backend", bench.wanted_backend]
            arguments += ["--precision", "fp32"]  # products of half precision depend on the batch
            # This process is one by itself; the command starts the number of processes of its flag.
            env = {key: os.environ[key] for key in os.environ.keys() - _PLACE}
            _succeed(bench, arguments, env)
            rows = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            steps = [json.loads(row) for row in rows]
            curves[name] = [(step["loss"], step["grad_norm"]) for step in steps]
    alone = curves.pop("1 process")
    worst = 0.0
    for name, found in curves.items():
        for step, wanted in zip(found, alone, strict=True):
            errors = [abs(a - b) / b for a, b in zip(step, wanted, strict=True)]
            worst = max([worst, *errors])
        if not worst <= _SAME_CURVE:
            raise Failure(f"{name}: losses or gradient norms differ by {worst:.1e} of their size")
    return f"largest relative difference {worst:.1e}"


def _succeed(bench: Bench, arguments: list[str], env: dict[str, str] | None = None) -> None:
    seconds = 70.0 * bench.patience
    outcome = call_isolated("lmcore.cli.main:main", arguments, timeout=seconds, env=env)
    if outcome.complete and outcome.value == 0:
        return
    lines = [line for line in outcome.log.splitlines() if "error:" in line] or [outcome.log[-300:]]
    ended = outcome.fault or f"exit status {outcome.value}"
    raise Failure(f"`lmcore {arguments[0]}`: {ended}: {lines[-1]}")
