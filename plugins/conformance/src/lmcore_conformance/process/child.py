"""The process in which the checks of a group are made, one after the other.

Each check is announced before it begins, so that a crash is the crash of that check, and a watchdog
ends the process if a check hangs.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from lmcore.plugin.isolation.location import exception_location
from lmcore.plugin.isolation.subprocess_call import in_one_line
from lmcore_conformance.bench import Bench
from lmcore_conformance.contributions import contributions
from lmcore_conformance.process.watchdog import SILENCE, watched
from lmcore_conformance.registry import Check, Failure, Gap, NotApplicable, NotRun, all_checks
from lmcore_conformance.requirements import REQUIREMENTS
from lmcore_conformance.result import Result, Status

__all__ = ["FLAGS", "SETUP_SECONDS", "Message", "make_check", "run_group"]

SETUP_SECONDS = 120.0
"""Until importing torch and creating the device counts as hung."""

FLAGS: Mapping[str, Sequence[str]] = MappingProxyType({"deterministic": ("--deterministic",)})
"""By group, the flags of the run whose device it is to have."""

Message = dict[str, Any]
"""{"ready": True}, {"begins": id}, {"ends": result}, {"backend": reason why there is none} or
{"contributions": of each plugin}."""


def run_group(
    group: str,
    ids: Sequence[str],
    closed: Sequence[str],
    patience: float,
    subject: str = "",
    entry_points: Sequence[str] = (),
    shapes: Mapping[str, Any] | None = None,
) -> Iterator[Message]:
    """Make checks of a group and yield their results.

    Args:
        group: Decides the set-up of the process.
        ids: The checks, in order.
        closed: requirements that the author declares as missing.
        patience: Factor on the time limits of checks.
        subject: Name of the plugin without a device whose offers alone are tried.
        entry_points: Plugins that level 0 is about.
        shapes: Shapes of `--shapes-of`, from `RunShapes.to_dict`.
    """
    limits = (patience * SILENCE, SETUP_SECONDS)
    with watched(*limits):
        wanted = [check for check in all_checks("--shapes-of") if check.id in ids]
        if group == "contract":
            from lmcore_conformance.checks.contract import ContractBench

            bench: Any = ContractBench(entry_points, patience)
        else:
            bench = Bench(closed, FLAGS.get(group, ()), subject, shapes, patience)
            if group != "create":
                _ = bench.device
    yield {"ready": True}
    for check in wanted:
        yield {"begins": check.id}
        with watched(patience * check.silence, patience * check.seconds):
            result = make_check(check, bench)
        yield {"ends": result.to_dict()}
    if group == "create":
        with watched(*limits):
            yield {"backend": REQUIREMENTS["distributed"].why_missing(bench)}
            yield {"contributions": contributions(bench)}


def make_check(check: Check, bench: Any) -> Result:
    """Make a check in this process and return its result; its time limit is the caller's."""
    begin = time.perf_counter()
    lacking = [] if check.group == "contract" else _lacking(check, bench)
    try:
        result = Result(check.id, Status.PASSED, "" if lacking else check.run(bench) or "")
    except Exception as error:  # noqa: BLE001 - a device may raise anything
        result = _ended(check, error)
    if lacking:
        result = Result(check.id, Status.GAP, "; ".join(lacking))
    seconds = round(time.perf_counter() - begin, 3)
    return Result(result.id, result.status, result.detail, result.findings, seconds)


def _lacking(check: Check, bench: Bench) -> list[str]:
    """Return why the device lacks the abilities that *check* requires; empty if it has them."""
    found = [REQUIREMENTS[name].why_missing(bench) for name in check.requires]
    return [reason for reason in found if reason is not None]


def _ended(check: Check, error: Exception) -> Result:
    """Return the result of a check that raised."""
    if isinstance(error, Gap):
        return Result(check.id, Status.GAP, str(error))
    if isinstance(error, NotRun):
        return Result(check.id, Status.NOT_RUN, str(error))
    if isinstance(error, NotApplicable):
        return Result(check.id, Status.NOT_APPLICABLE, str(error))
    if isinstance(error, Failure):
        return Result(check.id, Status.FAILED, error.findings[0], tuple(error.findings))
    text = in_one_line(error)
    frames = traceback.extract_tb(error.__traceback__)
    innermost = f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    place = exception_location(error) or innermost
    return Result(check.id, Status.FAILED, f"it raised {text}", (f"it raised {text}", place))
