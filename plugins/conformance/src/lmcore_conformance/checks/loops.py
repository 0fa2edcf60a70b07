"""Levels 3 and 4: training loops of a user's own on the library have the losses of plain torch."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import lmcore
from lmcore.plugin.isolation.subprocess_call import call_isolated
from lmcore.runtime.launch.rank import RankInfo
from lmcore_conformance.loops import LOOPS, plain_losses, train
from lmcore_conformance.registry import Failure, NotRun, check

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

_check = partial(check, level="L3", group="library", seconds=60)
_CLOSE = 2e-5
"""Largest difference of a float32 loss from the host's, at losses up to 4."""

_LOWER = 0.1
"""Largest difference of a loss in lower precision from float32's, at losses up to 4."""

_RANKS = 2


def _compare(found: list[float], right: list[float], limit: float = _CLOSE) -> float:
    """Return the largest difference of two series of losses.

    Raises:
        Failure: It is larger than *limit*, or the losses do not fall.
    """
    pairs = list(zip(found, right, strict=True))
    for index, (loss, expected) in enumerate(pairs, start=1):
        if not abs(loss - expected) <= limit:
            raise Failure(
                f"the loss of micro-batch {index} is {loss:.7f}, the host's {expected:.7f}"
            )
    if not found[-1] < found[0]:
        raise Failure(f"the loss goes from {found[0]:.3f} to {found[-1]:.3f}")
    return max(abs(loss - expected) for loss, expected in pairs)


@_check(
    "loop.bare",
    "A bare loop with `lmcore.start` has the losses of plain torch; what `rt.save` writes, "
    "`rt.load` restores bit for bit.",
    reason="Users bring their own loops and models.",
)
def bare(bench: Bench) -> str:
    """Train, save, overwrite the weights, and load them."""
    loop = LOOPS["bare"]
    with (
        TemporaryDirectory(prefix="lmcore-conformance-") as folder,
        lmcore.start(device=bench.selection.plugin, precision="fp32") as rt,
    ):
        losses, model, optimizer = train(rt, loop)
        off = _compare(losses, plain_losses(loop)[0])
        rt.save(folder, model=model, optimizer=optimizer)
        saved = {name: bench.host(tensor) for name, tensor in model.state_dict().items()}
        for tensor in model.state_dict().values():
            tensor.zero_()
        rt.load(folder, model=model, optimizer=optimizer)
        wrong = [
            name
            for name, tensor in model.state_dict().items()
            if not bench.host(tensor).equal(saved[name])
        ]
    if wrong:
        raise Failure(f"loaded weights differ from the saved ones: {', '.join(wrong)}")
    return f"losses off by {off:.1e} at most"


@_check(
    "loop.transformer",
    "A transformer that the core has never seen, with a head that shares the embedding's weight, "
    "trained with accumulated gradients, has the losses of plain torch.",
    reason="Its layers, its loss and its loop are not the core's; torch's `Module.to` separates "
    "shared weights for some device types.",
)
def transformer(bench: Bench) -> str:
    """Train and compare."""
    return _one_process(bench, "transformer")


@_check(
    "loop.convolution",
    "A convolution network with batch normalization has the losses of plain torch.",
    reason="A device is not for language models alone.",
    requires=["convolution"],
)
def convolution(bench: Bench) -> str:
    """Train and compare."""
    return _one_process(bench, "convolution")


@_check(
    "loop.mixed-precision",
    "The transformer trains in every other precision with losses close to float32's.",
    reason="`rt.autocast`, and the loss scale of `rt.backward` and `rt.step`.",
    requires=["mixed_precision"],
)
def mixed_precision(bench: Bench) -> str:
    """Train in each, with a loss scale that is low enough to skip no update."""
    done = []
    for policy in bench.precision_policies:
        if policy.available() is not None or policy.compute == policy.keep:
            continue
        more = {"initial_loss_scale": 256.0} if policy.loss_scaling else {}
        off = _one_process(bench, "transformer", policy.name, **more)
        done.append(f"{policy.name}: {off}")
    return ", ".join(done) or "there is none that computes in another dtype"


def _one_process(bench: Bench, name: str, precision: str = "fp32", **options: Any) -> str:
    """Train a loop in this process, and compare."""
    with lmcore.start(device=bench.selection.plugin, precision=precision, **options) as rt:
        losses = train(rt, LOOPS[name])[0]
    limit = _CLOSE if precision == "fp32" else _LOWER
    return f"losses off by {_compare(losses, plain_losses(LOOPS[name])[0], limit):.1e} at most"


@_check(
    "loop.processes",
    "`lmcore run` on two processes: the loops, each with half of the batches, have the losses of "
    "plain torch with all of them.",
    reason="`rt.prepare` and `rt.loader` connect the processes.",
    level="L4",
    group="command",
    requires=["distributed", "convolution"],
    seconds=120,
)
def processes(bench: Bench) -> str:
    """Run all loops in one run of two processes."""
    count = bench.selection.probe.count
    if count < _RANKS and not bench.is_host:
        raise NotRun(f"needs {_RANKS} devices, and there is {count}")
    places = RankInfo().to_env().keys()
    env = {key: os.environ[key] for key in os.environ.keys() - places}
    arguments = ["run", "--nproc-per-node", str(_RANKS), "--device", bench.selection.plugin]
    arguments += ["-m", "lmcore_conformance.loops"]
    with TemporaryDirectory(prefix="lmcore-conformance-") as folder:
        words = [*arguments, folder, *([bench.wanted_backend] if bench.wanted_backend else [])]
        outcome = call_isolated("lmcore.cli.main:main", words, timeout=100.0, env=env)
        if not outcome.complete or outcome.value != 0:
            lines = [line for line in outcome.log.splitlines() if "error:" in line]
            ended = outcome.fault or f"exit status {outcome.value}"
            raise Failure(f"`lmcore run`: {ended}: {(lines or [outcome.log[-300:]])[-1]}")
        found = [
            json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8"))
            for rank in range(_RANKS)
        ]
    worst = 0.0
    for name, loop in LOOPS.items():
        for rank, right in enumerate(plain_losses(loop, _RANKS)):
            worst = max(worst, _compare(found[rank][name], right))
    return f"{', '.join(LOOPS)}: losses off by {worst:.1e} at most"
