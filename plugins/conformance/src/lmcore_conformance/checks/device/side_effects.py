"""Level 1: what the device's functions and the plugin's policies change besides their results."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from lmcore.contract.transfer.staging import begin_staging, stage_tensors
from lmcore_conformance.plugin_check.traces import TorchState
from lmcore_conformance.registry import check, conclude

if TYPE_CHECKING:
    from lmcore.contract import CheckpointStager, PrecisionPolicy
    from lmcore_conformance.bench import Bench

_check = partial(check, level="L1", group="device")


@_check(
    "device.seed-alone",
    "Seeding, reading and restoring the device's generator change no other random numbers: those "
    "of Python and of numpy.",
    reason="The order of data and a user's own code draw from them.",
)
def seed_alone(bench: Bench) -> str:
    """Compare the states of other generators before and after each function."""
    import numpy as np

    def states() -> dict[str, object]:
        return {
            "Python's `random`": random.getstate(),
            "`numpy.random`": str(np.random.get_state()),  # noqa: NPY002 - the global generator
        }

    state = bench.device.get_rng_state().clone()
    functions: dict[str, Callable[[], object]] = {
        "seed": lambda: bench.device.seed(11),
        "get_rng_state": bench.device.get_rng_state,
        "set_rng_state": lambda: bench.device.set_rng_state(state),
        "rng_tracker": lambda: bench.device.rng_tracker().add("alone", 3),
    }
    faults = []
    for name, call in functions.items():
        before = states()
        call()
        faults += [
            f"`Device.{name}` changes the state of {generator}"
            for generator, kept in states().items()
            if kept != before[generator]
        ]
    return conclude(faults, ", ".join(functions))


@_check(
    "device.settings",
    "Torch's settings are the same after a precision's `context()` is left, in order or by an "
    "exception, after a step with a recompute policy, and after a copy by a checkpoint stager.",
    reason="A setting that stays changes the numbers of what runs next: evaluation, another model, "
    "a user's loop.",
)
def settings(bench: Bench) -> str:
    """Compare torch's settings around each use of each policy."""
    faults: list[str] = []
    names = []
    for name, use in _uses(bench):
        state = TorchState.now(bench.device.type)
        with contextlib.suppress(Exception):  # other checks say why it cannot be used
            use()
        names.append(name)
        faults += [f"{name}: {change}" for change in state.changes(bench.device.type)]
    return conclude(faults, f"{len(names)} uses of policies")


def _uses(bench: Bench) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield each use of an offer that can be used here, with its name."""
    for precision in bench.precision_policies:
        if precision.available() is not None:
            continue
        for how, enter in _ENTERED.items():
            yield f"precision `{precision.name}`, {how}", partial(enter, precision, bench)
    for recompute in bench.recompute_policies:
        if recompute.available() is None:
            yield f"recompute `{recompute.name}`", partial(recompute.verify, bench.device)
    for stager in bench.stagers:
        if stager.available() is None:
            yield f"checkpoint stager `{stager.name}`", partial(_copy, stager, bench)


def _product(bench: Bench) -> None:
    x = torch.ones(16, 16, device=bench.torch_device, requires_grad=True)
    torch.nn.functional.linear(x, x).float().sum().backward()


def _left(precision: PrecisionPolicy, bench: Bench) -> None:
    with precision.context():
        _product(bench)


def _entered_twice(precision: PrecisionPolicy, bench: Bench) -> None:
    with precision.context():
        _left(precision, bench)


def _left_by_exception(precision: PrecisionPolicy, bench: Bench) -> None:
    del bench
    with contextlib.suppress(_Ended), precision.context():
        raise _Ended


def _prepared(precision: PrecisionPolicy, bench: Bench) -> None:
    precision.verify(bench.device)


class _Ended(Exception):  # noqa: N818 - ends a block, is no error
    """End of a block."""


_ENTERED: dict[str, Callable[[PrecisionPolicy, Bench], None]] = {
    "after its `context()` is left": _left,
    "after its `context()` is entered twice, as for recomputation, and left": _entered_twice,
    "after an exception leaves its `context()`": _left_by_exception,
    "after `prepare` and a step of small layers": _prepared,
}


def _copy(stager: CheckpointStager, bench: Bench) -> None:
    live = {"weight": torch.ones(40, 30, device=bench.torch_device)}
    stage_tensors(stager, live)
    if stager.begin is not None:
        pending = begin_staging(stager, live, live.keys())
        pending.end_reads()
        pending.finish()
