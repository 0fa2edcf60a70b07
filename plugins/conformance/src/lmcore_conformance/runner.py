"""Runs checks in separate processes, and continues if a process crashes or hangs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lmcore.base.errors import LmcoreError
from lmcore.plugin.isolation.subprocess_call import HUNG, Call, Outcome, call_together
from lmcore.runtime.launch.rank import RankInfo
from lmcore.runtime.store import local_run_env
from lmcore_conformance.contributions import NOTHING, touched, usable_offers
from lmcore_conformance.declaration import Declaration
from lmcore_conformance.op.run_shapes import RunShapes
from lmcore_conformance.process.child import SETUP_SECONDS
from lmcore_conformance.process.fork_server import ForkServer
from lmcore_conformance.registry import Check
from lmcore_conformance.result import Result, Status
from lmcore_conformance.target import Target, shares_device

__all__ = ["CREATE", "DISTRIBUTED", "Runner"]

CREATE = "device.create"
"""The check that must pass before others of the device are made."""

DISTRIBUTED = "distributed"
"""Groups of this name, or beginning with it, run in several processes at once."""

_BACKEND = "distributed"
"""The requirement of checks that need a communication backend."""

_RANKS = 2

_RAISED = "it raised "
"""First words of the detail of a check that ended with an error."""

_MOST_HANGS = 3
"""Number of checks that hang after which those behind them in a group are not made."""


class Runner:
    """Checks of one plugin, and their results so far."""

    def __init__(
        self,
        target: Target,
        declaration: Declaration,
        checks: Sequence[Check],
        *,
        patience: float = 1.0,
        shapes: RunShapes | None = None,
    ) -> None:
        """Create a runner without results.

        Args:
            target: The plugin.
            declaration: abilities that it is declared to lack.
            checks: All of the suite; only chosen groups run.
            patience: Factor on the time limits, for a slow device.
            shapes: Shapes of the configuration of `--shapes-of`.
        """
        self.target = target
        self.declaration = declaration
        self.patience = patience
        self.shapes = shapes
        self.checks = {check.id: check for check in checks}
        self.results: dict[str, Result] = {}
        self.logs: dict[str, str] = {}
        self._no_backend: str | None = None
        self._server: ForkServer | None = None
        self._on_last_index: dict[str, Result] = {}
        self.contributions: Sequence[Mapping[str, Any]] = ()
        self._wanted = set(self.checks)

    @property
    def touched(self) -> list[str]:
        """Ids of the checks that apply: all, or of a plugin without a device the touched ones."""
        if not self.target.alone:
            return list(self.checks)
        if self.target.selection is not None and CREATE not in self.results:
            wanted, self._wanted = self._wanted, set()
            self.result(CREATE)
            self._wanted = wanted
        own = [one for one in self.contributions if one["name"] == self.target.name]
        return touched(own[0] if own else NOTHING, self.checks)

    @property
    def offers_something(self) -> bool:
        """True if an offer of the plugin without a device can be tried here, or if that is unknown.

        It is unknown if the device cannot be created, which fails the session.
        """
        if self.result(CREATE).status is not Status.PASSED:
            return True
        own = [one for one in self.contributions if one["name"] == self.target.name]
        return bool(own and usable_offers(own[0]))

    def choose(self, ids: Iterable[str]) -> None:
        """Make only these checks when their group is run."""
        self._wanted = set(ids)

    def result(self, name: str) -> Result:
        """Return the result of a check; the first call for a check of a group runs the group."""
        if name not in self.results:
            group = self.checks[name].group
            members = [
                check
                for check in self.checks.values()
                if check.group == group
                and check.id not in self.results
                and (check.id in self._wanted or check.id == name)
            ]
            self._run(group, members)
        return self.results[name]

    def _run(self, group: str, checks: Sequence[Check]) -> None:
        closed = {check.id: self.declaration.why_closed(check) for check in checks}
        for name, reason in closed.items():
            if reason is not None:
                self.results[name] = Result(name, Status.GAP, reason)
        pending = [check for check in checks if closed[check.id] is None]
        obstacle = self._obstacle(group) if pending else ""
        if obstacle:
            for check in pending:
                self.results[check.id] = Result(check.id, Status.NOT_RUN, obstacle)
            return
        if self._no_backend:
            without = [check for check in pending if _BACKEND in check.requires]
            self._judge_without_backend(without, self._no_backend)
            pending = [check for check in pending if check not in without]
        found = self._made(group, pending)
        if self._last_index:
            found = self._with_last_index(found)
        self.results |= found

    def _made(
        self, group: str, checks: Sequence[Check], place: RankInfo | None = None
    ) -> dict[str, Result]:
        """Make checks in one process, and those after a crash in another; return their results."""
        found: dict[str, Result] = {}
        pending = list(checks)
        while pending:
            try:
                outcomes = self._call(group, pending, place)
            except LmcoreError as error:
                detail = f"no process for it: {error.what}"
                return found | {check.id: _failure(check.id, detail) for check in pending}
            found |= self._take(pending, outcomes)
            pending = [check for check in pending if check.id not in found]
            hung = [name for name, result in found.items() if HUNG in result.detail]
            if len(hung) >= _MOST_HANGS:
                detail = f"not reached: `{'`, `'.join(hung)}` hung"
                more = {check.id: Result(check.id, Status.NOT_RUN, detail) for check in pending}
                return found | more
        return found

    @property
    def _last_index(self) -> int:
        """The index of the host's last device; 0 if the host itself is the device."""
        selection = self.target.selection
        if selection is None or selection.probe.device_type == "cpu":
            return 0
        return max(0, selection.probe.count - 1)

    def _with_last_index(self, first: Mapping[str, Result]) -> dict[str, Result]:
        """Return results that have failures on the last device as well, with the index of each."""
        last, count = self._last_index, self.target.device_count
        failed = {name for name, result in first.items() if result.status is Status.FAILED}
        names = {name for name in first.keys() - failed if self.checks[name].every_index}
        if names - self._on_last_index.keys():
            # One process for the checks of all groups.
            checks = [
                check
                for check in self.checks.values()
                if check.every_index
                and (check.id in names or check.id in self._wanted)
                and self.declaration.why_closed(check) is None
            ]
            place = RankInfo(last, last, count, count)
            self._on_last_index |= self._made("device", checks, place)
        found = dict(first)
        for name in names | failed:
            by_index = {0: first[name], last: self._on_last_index.get(name, first[name])}
            if self.checks[name].every_index:
                found[name] = _of_indices(by_index)
        return found

    def _judge_without_backend(self, checks: Sequence[Check], reason: str) -> None:
        """Keep one failure for a missing backend that is not declared; no process is started."""
        for check in checks:
            result = self._permitted(check, Result(check.id, Status.GAP, reason))
            failed = [
                name
                for name, known in self.results.items()
                if known.status is Status.FAILED and reason in known.detail
            ]
            if result.status is Status.FAILED and failed:
                result = Result(check.id, Status.NOT_RUN, f"not reached: `{failed[0]}` failed")
            self.results[check.id] = result

    def _obstacle(self, group: str) -> str:
        """Return why the checks of a group cannot be made; empty where they can."""
        if group == "contract":
            return ""
        if self.target.selection is None:
            return f"nothing can be done with the device: {self.target.obstacle}"
        if group != "create" and self.result(CREATE).status is not Status.PASSED:
            return f"not reached: `{CREATE}` {self.result(CREATE).status}"
        if group.startswith(DISTRIBUTED) and self._ranks() < _RANKS:
            return f"needs {_RANKS} devices, and there is {self.target.device_count}"
        return ""

    def _ranks(self) -> int:
        selection = self.target.selection
        if selection is not None and shares_device(selection):
            return _RANKS
        return min(_RANKS, self.target.device_count)

    def _call(
        self, group: str, checks: Sequence[Check], place: RankInfo | None
    ) -> Sequence[Outcome]:
        ids = [check.id for check in checks]
        timeout = SETUP_SECONDS + sum(check.seconds for check in checks) * self.patience + 10.0
        subject = self.target.name if self.target.alone else ""
        points = [one.entry_point for one in self.target.under_test]
        closed = list(self.declaration.closed)
        shapes = self.shapes.to_dict() if self.shapes else None
        arguments = (group, ids, closed, self.patience, subject, points, shapes)
        if not group.startswith(DISTRIBUTED):
            target = "lmcore_conformance.process.child:run_group"
            calls = [Call(target, arguments, self.target.environment(place))]
            return self._call_together(calls, timeout)
        address = local_run_env()
        places = [RankInfo(rank, rank, _RANKS, _RANKS) for rank in range(_RANKS)]
        calls = [
            Call(
                "lmcore_conformance.process.ranks:run_group",
                arguments,
                self.target.environment(place) | address,
            )
            for place in places
        ]
        return self._call_together(calls, timeout)

    def _call_together(self, calls: Sequence[Call], timeout: float) -> Sequence[Outcome]:
        if self._server is None:
            self._server = ForkServer(calls[0].env or {})
        return call_together(calls, timeout=timeout, start=self._server.start)

    def _take(self, pending: Sequence[Check], outcomes: Sequence[Outcome]) -> dict[str, Result]:
        """Return the results of one round; the check at which it broke off has failed."""
        messages = [_messages_of(outcome) for outcome in outcomes]
        for value in (value for outcome in outcomes for value in outcome.values):
            self._no_backend = value.get("backend", self._no_backend)
            self.contributions = value.get("contributions", self.contributions)
        many = len(outcomes) > 1
        results: dict[str, Result] = {}
        for check in pending:
            found = [message["ends"].get(check.id) for message in messages]
            known = [end for end in found if end is not None]
            if len(known) == len(outcomes) or any(end.status is Status.FAILED for end in known):
                results[check.id] = self._permitted(check, _joined(known, many=many))
                if many and results[check.id].status is Status.FAILED:
                    return results  # later results of these processes are not reliable
            elif any(message["at"] == check.id for message in messages):
                detail = "; ".join(_faults(outcomes, messages, check.id, many=many))
                self._keep(check.id, outcomes)
                return results | {check.id: _failure(check.id, detail)}
        if not results:
            faults = _faults(outcomes, messages, None, many=many) or ["the process ended"]
            for check in pending:
                self._keep(check.id, outcomes)
                detail = f"its process could not be set up: {'; '.join(faults)}"
                results[check.id] = _failure(check.id, detail)
        return results

    def _permitted(self, check: Check, result: Result) -> Result:
        """Return the result; an undeclared gap of the device is a failure."""
        if result.status is not Status.GAP:
            return result
        if self.target.alone:  # the plugin does not claim what the device or its record lacks
            return replace(result, status=Status.NOT_APPLICABLE)
        reason = self.declaration.why_it_may_lack(check)
        if reason:
            return replace(result, detail=f"{result.detail}; it depends: {reason}")
        findings = [f"undeclared gap: {result.detail}"]
        if check.requires:  # else the failure says how to declare the check itself
            names = " or ".join(f"`{name}`" for name in check.requires)
            findings.append(f"offer it, or close {names} in conformance.toml with the reason")
        return replace(
            result,
            status=Status.FAILED,
            findings=tuple(findings),
            detail=f"undeclared gap: {result.detail}",
        )

    def _keep(self, name: str, outcomes: Sequence[Outcome]) -> None:
        self.logs[name] = "\n".join(outcome.log.strip() for outcome in outcomes if outcome.fault)


def _messages_of(outcome: Outcome) -> dict[str, Any]:
    """Return the results of a process by id, and the check at which it ended."""
    ends: dict[str, Result] = {}
    at = None
    for value in outcome.values:
        if "begins" in value:
            at = value["begins"]
        if "ends" in value:
            result = Result.from_dict(value["ends"])
            ends[result.id] = result
            at = None
    return {"ends": ends, "at": at}


def _joined(results: Sequence[Result], *, many: bool) -> Result:
    """Return one result of a check that several processes made: the worst."""
    order = [
        *(Status.FAILED, Status.GAP, Status.NOT_RUN, Status.NOT_APPLICABLE),
        Status.PASSED,
    ]
    # An error of one process is often the effect of another one that ended with a finding.
    worst = min(results, key=lambda one: (order.index(one.status), one.detail.startswith(_RAISED)))
    if not many or worst.status is not Status.FAILED:
        return worst
    findings = list(dict.fromkeys(line for one in (worst, *results) for line in one.findings))
    return Result(worst.id, worst.status, worst.detail, tuple(findings), worst.seconds)


def _of_indices(results: Mapping[int, Result]) -> Result:
    """Return the result of a check on the first and on the last device; failures with the index."""
    first, last = results.values()
    if Status.FAILED not in {first.status, last.status}:
        return first
    failed = {i: found for i, found in results.items() if found.status is Status.FAILED}
    if first is last:  # not made on the last one
        failed.pop(max(failed))
    findings = tuple(f"index {i}: {line}" for i, found in failed.items() for line in found.findings)
    detail = "; ".join(f"index {i}: {found.detail}" for i, found in failed.items())
    return Result(first.id, Status.FAILED, detail, findings, first.seconds)


def _faults(
    outcomes: Sequence[Outcome],
    messages: Sequence[Mapping[str, Any]],
    at: str | None,
    *,
    many: bool,
) -> list[str]:
    """Return the faults of processes that did not end in order."""
    found = []
    for rank, (outcome, message) in enumerate(zip(outcomes, messages, strict=True)):
        if outcome.fault and (at is None or message["at"] == at):
            found.append((f"rank {rank}: " if many else "") + outcome.fault)
    return found


def _failure(name: str, detail: str) -> Result:
    return Result(name, Status.FAILED, detail, (detail,))
