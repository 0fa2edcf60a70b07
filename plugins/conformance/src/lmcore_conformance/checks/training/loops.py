"""Levels 3 and 4: training loops of a user's own on the library have the losses of plain torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional

import lmcore
from lmcore.base.errors import counted
from lmcore.plugin.isolation.subprocess_call import call_isolated
from lmcore.runtime.launch.rank import RankInfo
from lmcore_conformance.loops import LOOPS, plain_losses, train, train_epoch
from lmcore_conformance.registry import Failure, NotRun, check

if TYPE_CHECKING:
    from lmcore_conformance.bench import Bench

_check = partial(check, level="L3", group="library", seconds=60)
_CLOSE = 2e-5
"""Largest difference of a float32 loss from the host's, at losses up to 4."""

_KERNELS = 1e-4
"""Largest difference of a float32 loss with other kernels."""

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
        more: dict[str, Any] = {"initial_loss_scale": 256.0} if policy.loss_scaling else {}
        off = _one_process(bench, "transformer", policy.name, **more)
        done.append(f"{policy.name}: {off}")
    return ", ".join(done) or "there is none that computes in another dtype"


@_check(
    "loop.kernels",
    "With `rt.use_kernels` the transformer has the losses of plain torch, and `undo` restores its "
    "modules; `rt.ops` computes RMS norm and attention as torch does.",
    reason="The kernels of a plugin run under models and in code that the plugin's author has "
    "never seen.",
)
def kernels(bench: Bench) -> str:
    """Train with kernels, take them out, and call two ops."""
    loop = LOOPS["transformer"]
    with lmcore.start(device=bench.selection.plugin, precision="fp32") as rt:
        model, optimizer = rt.prepare(*loop.make())
        report = rt.use_kernels(model)
        losses = train_epoch(rt, loop, model, optimizer)
        off = _compare(losses, plain_losses(loop)[0], _KERNELS)
        report.undo()
        if any("forward" in vars(module) for module in model.modules()):
            raise Failure("after `undo` a module has another `forward` than its class")
        x, weight = bench.values(2, 3, 16).float(), bench.values(16, seed=1).float()
        q, k, v = (bench.values(2, 4, 5, 8, seed=seed).float() for seed in range(3))
        here = rt.device
        _near(
            "rms_norm",
            bench.host(rt.ops.rms_norm(x.to(here), weight.to(here), 1e-5)),
            functional.rms_norm(x, (16,), weight, 1e-5),
        )
        _near(
            "attention",
            bench.host(rt.ops.attention(q.to(here), k.to(here), v.to(here), causal=True)),
            functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        )
    count = sum(row.count for row in report.replaced)
    return f"kernels in {counted(count, 'module')}: losses off by {off:.1e} at most"


def _near(op: str, found: Tensor, expected: Tensor) -> None:
    """Raise `Failure` if a result of `rt.ops` is not torch's."""
    off = float((found - expected.double()).abs().max())
    if not off <= _KERNELS:
        raise Failure(f"`rt.ops.{op}` is off by {off:.1e}")


@_check(
    "loop.recompute",
    "With `rt.recompute` of each layer by `full` and `selective`, the transformer has the losses "
    "of plain torch.",
    reason="Policies work on layers that are not the core's.",
    requires=["recompute"],
)
def recompute(bench: Bench) -> str:
    """Train with each policy."""
    offered = {policy.name for policy in bench.recompute_policies if policy.available() is None}
    loop, done = LOOPS["transformer"], []
    for policy in sorted(offered & {"full", "selective"}):
        with lmcore.start(device=bench.selection.plugin, precision="fp32") as rt:
            model, optimizer = rt.prepare(*loop.make())
            for layer in model.get_submodule("layers").children():
                rt.recompute(layer, policy)
            off = _compare(train_epoch(rt, loop, model, optimizer), plain_losses(loop)[0])
        done.append(f"{policy}: losses off by {off:.1e} at most")
    return ", ".join(done)


def _one_process(bench: Bench, name: str, precision: str = "fp32", **options: Any) -> str:
    """Train a loop in this process, and compare."""
    with lmcore.start(device=bench.selection.plugin, precision=precision, **options) as rt:
        losses = train(rt, LOOPS[name])[0]
    limit = _CLOSE if precision == "fp32" else _LOWER
    return f"losses off by {_compare(losses, plain_losses(LOOPS[name])[0], limit):.1e} at most"


@_check(
    "loop.processes",
    "`lmcore run` on two processes: the loops, each with half of the batches, have the losses of "
    "plain torch with all of them; an evaluation's collectives; a checkpoint is continued.",
    reason="`rt.prepare` and `rt.loader` connect the processes.",
    level="L4",
    group="command",
    requires=["distributed", "convolution"],
    seconds=120,
)
def processes(bench: Bench) -> str:
    """Run all loops in one run of two processes."""
    return _two_processes(bench, "0")


@_check(
    "loop.sharded",
    "The same for the transformer with `zero_stage` 1, 2 and 3.",
    reason="Weights, gradients and the optimizer's state of any model are sharded.",
    level="L4",
    group="command",
    requires=["distributed", "reduce_scatter", "fsdp"],
    seconds=120,
)
def sharded(bench: Bench) -> str:
    """Run the loop with each stage in one run of two processes."""
    return _two_processes(bench, "1,2,3")


_EXCHANGED = {
    "sums": [3, 1.0],
    "mean": 0.75,
    "gathered": [[True, True], [True, False]],
    "sent": [1.0, 1.0],
}
"""Result of `loops._exchanged` on two ranks."""


def _two_processes(bench: Bench, stages: str) -> str:
    """Run loops by `lmcore run`, and compare."""
    count = bench.selection.probe.count
    if count < _RANKS and not bench.is_shared:
        raise NotRun(f"needs {_RANKS} devices, and there is {count}")
    places = RankInfo().to_env().keys()
    env = {key: os.environ[key] for key in os.environ.keys() - places}
    arguments = ["run", "--nproc-per-node", str(_RANKS), "--device", bench.selection.plugin]
    arguments += ["-m", "lmcore_conformance.loops"]
    with TemporaryDirectory(prefix="lmcore-conformance-") as folder:
        backend = [bench.wanted_backend] if bench.wanted_backend else []
        words = [*arguments, folder, stages, *backend]
        seconds = 100.0 * bench.patience
        outcome = call_isolated("lmcore.cli.main:main", words, timeout=seconds, env=env)
        if not outcome.complete or outcome.value != 0:
            lines = [line for line in outcome.log.splitlines() if "error:" in line]
            ended = outcome.fault or f"exit status {outcome.value}"
            raise Failure(f"`lmcore run`: {ended}: {(lines or [outcome.log[-300:]])[-1]}")
        found = [
            json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8"))
            for rank in range(_RANKS)
        ]
    names = {name for results in found[0].values() for name in results["losses"]}
    expected = {name: plain_losses(LOOPS[name], _RANKS) for name in LOOPS if name in names}
    worst = max(
        _compare_rank(results, {name: losses[rank] for name, losses in expected.items()}, stage)
        for rank in range(_RANKS)
        for stage, results in found[rank].items()
    )
    return f"{', '.join(expected)}: losses off by {worst:.1e} at most"


def _compare_rank(results: Any, expected: Mapping[str, list[float]], stage: str) -> float:
    """Return the largest difference of a rank's losses from the host's.

    Raises:
        Failure: A result of the rank is wrong.
    """
    if results["exchanged"] != _EXCHANGED:
        raise Failure(f"{stage}: collectives gave {results['exchanged']}, not {_EXCHANGED}")
    at_once, loaded = results["continued"]["at once"], results["continued"]["loaded"]
    off = max(abs(one - other) for one, other in zip(at_once, loaded, strict=True))
    if not off <= _CLOSE:
        raise Failure(f"{stage}: losses after `rt.load` are off by {off:.1e}")
    return max(_compare(losses, expected[name]) for name, losses in results["losses"].items())
