"""Every check of the suite: its level, its requirement, and the reason why a run needs it.

The functions are in `lmcore_conformance.checks`, each below a `check(...)` that registers it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from lmcore_conformance.process.watchdog import SILENCE

__all__ = [
    "LEVELS",
    "Check",
    "Failure",
    "Gap",
    "NotApplicable",
    "NotRun",
    "all_checks",
    "check",
    "conclude",
    "register",
]

LEVELS = MappingProxyType(
    {
        "L0": "contract",
        "L1": "device",
        "L2": "ops",
        "L3": "training",
        "L4": "distributed",
        "L5": "extras",
    }
)
"""Subject of each level."""

_MODULES = (
    "contract",
    "device.tensors",
    "device.stagers",
    "device.dtypes",
    "device.memory",
    "device.random_numbers",
    "device.side_effects",
    "device.streams",
    "device.prefetch",
    "device.lazy",
    "device.waiting",
    "device.torch_functions",
    "ops.effects",  # first: it sees what the first call of a kernel changes
    "ops.kernels",
    "ops.elements",
    "ops.shapes",
    "ops.updates",
    "ops.dropout",
    "training.run",
    "training.precision",
    "training.recompute",
    "training.loops",
    "distributed.collectives",
    "distributed.large_collectives",
    "distributed.late_ranks",
    "distributed.sharding",
    "distributed.layouts",
    "extras.features",
    "extras.constant_projection",
    "extras.next_token_attention",
)


class Failure(Exception):  # noqa: N818 - how a check ends, not what went wrong here
    """Failure of a check, with one finding or several."""

    def __init__(self, *findings: str) -> None:
        super().__init__("; ".join(findings))
        self.findings = findings


class Gap(Exception):  # noqa: N818 - how a check ends, not what went wrong here
    """The device's record declares that it lacks the capability that a check is about."""


class NotApplicable(Exception):  # noqa: N818 - how a check ends, not what went wrong here
    """The check used no offer of the plugin without a device that is tried alone."""


class NotRun(Exception):  # noqa: N818 - how a check ends, not what went wrong here
    """The check cannot be made on this machine."""


@dataclass(frozen=True)
class Check:
    """One demand of the suite.

    Attributes:
        id: name in declarations and reports, for example "device.memory-falls".
        level: "L1".
        title: the property that holds, in a sentence.
        reason: the need of a run for it.
        group: Checks of a group share a process, in the order in which they are registered.
        requires: Requirements without which there is nothing to check.
        seconds: Time limit.
        run: the check: returns a line on its findings, or raises.  Gets the group's bench.
        every_index: True if it is also run on the last device of the host.
        option: Option of the suite without which it is not made; empty: it always is.
    """

    id: str
    level: str
    title: str
    reason: str
    group: str
    requires: tuple[str, ...]
    seconds: float
    run: Callable[[Any], str | None]
    every_index: bool = False
    option: str = ""

    @property
    def silence(self) -> float:
        """Seconds without progress after which it hangs; progress of other processes is unseen."""
        if self.option or self.group in _OTHER_PROCESSES:  # real sizes may take long
            return self.seconds
        return min(SILENCE, self.seconds)


_OTHER_PROCESSES = {"contract", "command", "compile"}
"""Groups whose checks wait for processes that they start, which have separate limits."""

_REGISTERED: dict[str, Check] = {}


def register(check: Check) -> None:
    """Add a check.

    Raises:
        ValueError: Its id is taken.
    """
    if check.id in _REGISTERED:
        raise ValueError(f"two checks are called `{check.id}`")
    _REGISTERED[check.id] = check


def check(
    name: str,
    title: str,
    *,
    level: str,
    reason: str,
    group: str,
    requires: Sequence[str] = (),
    seconds: float = 60.0,
    every_index: bool | None = None,
    option: str = "",
) -> Callable[[Callable[[Any], str | None]], Callable[[Any], str | None]]:
    """Register the decorated function as a check; see `Check` for the arguments.

    Checks of the level of the device are run on every index by default.
    """
    every = level == "L1" if every_index is None else every_index

    def add(function: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
        needs = tuple(requires)
        register(Check(name, level, title, reason, group, needs, seconds, function, every, option))
        return function

    return add


def conclude(faults: Iterable[str], finding: str) -> str:
    """Return *finding*, the line of a check that passes without faults.

    Raises:
        Failure: There are faults.
    """
    found = tuple(faults)
    if found:
        raise Failure(*found)
    return finding


def all_checks(*options: str) -> tuple[Check, ...]:
    """Return every check by level and subject, in any order of imports; loads torch.

    Args:
        options: Options whose checks are made as well.
    """
    modules = [f"lmcore_conformance.checks.{module}" for module in _MODULES]
    for module in modules:
        importlib.import_module(module)
    levels = list(LEVELS)

    def place(check: Check) -> tuple[int, int]:
        own = check.run.__module__
        return levels.index(check.level), modules.index(own) if own in modules else len(modules)

    chosen = (one for one in _REGISTERED.values() if one.option in {"", *options})
    return tuple(sorted(chosen, key=place))
