"""The hooks of a plugin that need a device, or answer for one: called, and their results checked.

Part of `lmcore plugin check`.  Where the plugin's device is not present, each of them is skipped
with that reason.  A plugin that brings no device is tried on the CPU.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.metadata
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from lmcore.base.errors import LmcoreError, PluginError, counted
from lmcore.contract.communication import CommBackend
from lmcore.contract.op.records import OpImpl
from lmcore.contract.precision.policy import PrecisionPolicy
from lmcore.contract.probe import Check, CheckStatus, Probe, ProbeState, Problem
from lmcore.contract.recompute import RecomputePolicy
from lmcore.contract.transfer.staging import CheckpointStager
from lmcore.plugin.discovery import GROUP, discover
from lmcore.plugin.hook_calls import DEFAULT_OFFERS, create_device, within_dtypes
from lmcore.plugin.record import CPU, PluginRecord, PluginSet, located
from lmcore.plugin.registrations import plugin_sections
from lmcore.plugin.selection import Selection
from lmcore_conformance.plugin_check.configurations import check_answers, plan_of
from lmcore_conformance.plugin_check.hooks import place_of
from lmcore_conformance.plugin_check.kernels import check_kernels
from lmcore_conformance.plugin_check.records import (
    call_hook,
    check_backends,
    check_device,
    check_named,
    check_precisions,
    check_recompute,
    field_problems,
    listed,
    offer,
)
from lmcore_conformance.plugin_check.results import check_results

if TYPE_CHECKING:
    from lmcore.config.section import Config
    from lmcore.config.settings import LoadedConfig
    from lmcore.contract.device import Device

__all__ = ["DEVICE_CHECKS", "Bench"]

T = TypeVar("T")

_CREATE = "lmcore_create_device"
_PLACES = tuple(
    {"rank": rank, "local_rank": rank % 2, "world_size": 4, "local_world_size": 2}
    for rank in range(4)
)
"""Ranks of a run on two hosts of two devices each."""

_WORKERS = (1, 2, 64, 1024)
"""Numbers of workers on a host; few hosts have cores for as many."""

_ZERO_IS_ALL = frozenset({"RAYON_NUM_THREADS"})
"""Variables in which 0 means as many as there are cores."""

_COUNTS = ("_NUM_THREADS", "_MAX_THREADS", "_MAX_CONNECTIONS")
"""Ends of the names of variables that are numbers of at least 1, as of OMP, MKL, OpenBLAS, CUDA."""


class Bench:
    """A plugin on the bench, and the device that it is tried on, which is created when needed.

    Attributes:
        record: The plugin; with its probe, once that is known.
        plugins: It and the CPU's plugin, not probed.
        contract: The version of the contract that it is held against.
    """

    def __init__(
        self, record: PluginRecord, plugins: PluginSet, contract: Mapping[str, Any]
    ) -> None:
        self.record = record
        self.plugins = plugins
        self.contract = contract

    @property
    def brings_device(self) -> bool:
        """True if the plugin brings a device."""
        return self.record.implements("lmcore_probe")

    @cached_property
    def owner(self) -> PluginRecord:
        """The plugin whose device is used: this one, or the CPU's where it brings none."""
        if self.brings_device:
            return self.record
        (cpu,) = discover(
            env={}, entry_points=importlib.metadata.entry_points(group=GROUP, name=CPU)
        )
        return cpu

    @property
    def probe(self) -> Probe | None:
        """The probe of the plugin whose device is used."""
        return self.owner.probe

    @property
    def why_no_device(self) -> str:
        """The reason why nothing can be tried on the device; empty if it is present."""
        if self.probe is None:
            return "its `lmcore_probe` gave no answer"
        if self.probe.state is ProbeState.PRESENT:
            return ""
        found = f": {self.probe.evidence[0]}" if self.probe.evidence else ""
        return f"its device is {self.probe.state} here{found}"

    @cached_property
    def loaded(self) -> LoadedConfig:
        """The settings of a run without arguments."""
        from lmcore.config.load import load_config

        return load_config([], plugins=plugin_sections(self.plugins))

    @property
    def config(self) -> Config:
        """The same, as hooks get them."""
        return self.loaded.config

    @cached_property
    def plan(self) -> dict[str, Any]:
        """The same, resolved, as the hooks of a run get it."""
        return plan_of("", 1, plugin_sections(self.plugins)).to_dict()

    @cached_property
    def creation(self) -> Device | Check:
        """The device, created once, or the failed check."""
        owner = self.owner
        assert owner.probe is not None
        chosen = Selection(owner.name, owner.distribution, owner.version, owner.probe, "on trial")
        try:
            return create_device(PluginSet((owner,)), chosen, self.config)
        except LmcoreError as error:
            return Check(_CREATE, CheckStatus.FAILED, error.what_and_why, error.hint)
        except SystemExit as error:
            return Check(_CREATE, CheckStatus.FAILED, f"it raised {located(error)}")

    @property
    def device(self) -> Device:
        """The device, where it could be created."""
        assert not isinstance(self.creation, Check)
        return self.creation

    def offered(self, hook: str, kind: type[T], **arguments: Any) -> list[T]:
        """Return the list of a hook; if the plugin does not implement it, the core's default.

        Raises:
            PluginError: It raised or returned something else.
        """
        if self.record.implements(hook):
            return listed(self.record, hook, kind, **arguments)
        return DEFAULT_OFFERS[hook](self.device)


def _on_device(
    hook: str, check: Callable[[Bench], Iterator[Check]]
) -> Callable[[Bench], Iterator[Check]]:
    """Return *check* for a device that is present and can be created; else the reason."""

    def checked(bench: Bench) -> Iterator[Check]:
        if bench.why_no_device:
            yield Check(hook, CheckStatus.SKIPPED, f"not called: {bench.why_no_device}")
            return
        if isinstance(bench.creation, Check):
            yield Check(hook, CheckStatus.SKIPPED, "not called: the device cannot be created")
            return
        try:
            for found in check(bench):
                wrong_field = found.status is CheckStatus.FAILED and found.detail.endswith(_WANTED)
                own = wrong_field and bench.record.implements(hook)
                place = f" ({place_of(bench.record, hook)})" if own else ""
                yield dataclasses.replace(found, detail=f"{found.detail}{place}")
        except PluginError as error:
            yield Check(hook, CheckStatus.FAILED, error.what)

    return checked


_WANTED = "` is wanted"
"""End of the detail of a field of a wrong type (`records.field_problems`)."""


def _create(bench: Bench) -> Iterator[Check]:
    """Create the device and use it a little."""
    if not bench.brings_device:
        yield Check(_CREATE, CheckStatus.SKIPPED, "not called: the plugin has no `lmcore_probe`")
        return
    if bench.why_no_device:
        yield Check(_CREATE, CheckStatus.SKIPPED, f"not called: {bench.why_no_device}")
        return
    if isinstance(bench.creation, Check):
        yield bench.creation
    else:
        yield from check_device(bench.creation, bench.contract)


def _launch(bench: Bench) -> Iterator[Check]:
    """Check the environment of a worker."""
    hook = "lmcore_launch_env"
    if bench.why_no_device:
        yield Check(hook, CheckStatus.SKIPPED, f"not called: {bench.why_no_device}")
        return
    shown = ""
    for place in (*_PLACES, *map(_last_of, _WORKERS)):
        at = f"for rank {place['rank']} of {place['world_size']}"
        given = dict(place)
        try:
            found = call_hook(bench.record, hook, probe=bench.probe, rank_info=given)
        except PluginError as error:
            if _are_too_many(bench, place):  # which a plugin may refuse
                continue
            yield Check(hook, CheckStatus.FAILED, f"{at} {error.what}")
            return
        if given != place:
            yield Check(hook, CheckStatus.FAILED, f"{at} it changes its argument `rank_info`")
            return
        if not isinstance(found, Mapping) or not all(
            isinstance(part, str) for pair in found.items() for part in pair
        ):
            detail = f"{at} it returned `{type(found).__name__}`, not a mapping of text to text"
            yield Check(hook, CheckStatus.FAILED, f"{detail}: {found!r:.200}")
            return
        if few := [f"{name}={value}" for name, value in found.items() if _is_too_few(name, value)]:
            detail = f"{at}, with {place['local_world_size']} on the host, it returned {few[0]}"
            fix = "return at least 1, also if there are more workers than cores"
            yield Check(hook, CheckStatus.FAILED, f"{detail}; at least 1 is needed", fix)
            return
        shown = shown or ", ".join(f"{name}={value}" for name, value in found.items())
    yield Check(hook, CheckStatus.OK, shown or "it sets nothing")


def _last_of(count: int) -> dict[str, int]:
    """Return the last rank of so many workers on one host."""
    return {
        "rank": count - 1,
        "local_rank": count - 1,
        "world_size": count,
        "local_world_size": count,
    }


def _are_too_many(bench: Bench, place: Mapping[str, int]) -> bool:
    """Return True if more workers are on a host than the trials before had, and than devices."""
    assert bench.probe is not None
    is_host = bench.probe.device_type == CPU
    return not is_host and place["local_world_size"] > max(2, bench.probe.count)


def _is_too_few(name: str, value: str) -> bool:
    """Return True if a variable that counts threads or connections has no positive number."""
    if not name.endswith(_COUNTS) or name in _ZERO_IS_ALL:
        return False
    numbers = value.split(",")  # OMP_NUM_THREADS takes one for each level
    return not all(number.strip().isdecimal() and int(number) >= 1 for number in numbers)


def _problems(bench: Bench) -> Iterator[Check]:
    """Ask about real configurations, and about each policy that the plugin offers."""
    hook = "lmcore_validate_config"

    def ask(config: Config) -> list[Problem]:
        return bench.offered(hook, Problem, device=bench.device, config=config)

    def wrong(problem: Problem) -> list[str]:
        return list(field_problems(problem, bench.contract))

    sections = plugin_sections(bench.plugins)
    yield from check_answers(hook, ask, wrong, sections, list(_offered_flags(bench)))


def _offered_flags(bench: Bench) -> Iterator[str]:
    """Yield the flags of the policies that can be used; faults of these hooks have lines."""
    kinds: dict[str, tuple[str, type[Any]]] = {
        "--precision": ("lmcore_precision_policies", PrecisionPolicy),
        "--recompute": ("lmcore_recompute_policies", RecomputePolicy),
    }
    for flag, (hook, kind) in kinds.items():
        if not bench.record.implements(hook):
            continue
        with contextlib.suppress(Exception):
            for policy in bench.offered(hook, kind, device=bench.device):
                own = getattr(policy, "compute", None)
                if (own is None or own in bench.device.dtypes) and policy.available() is None:
                    yield f"{flag} {policy.name}"


def _backends(bench: Bench) -> Iterator[Check]:
    found = bench.offered("lmcore_comm_backends", CommBackend, device=bench.device)
    yield from check_backends(found, bench.device, bench.contract)


def _kernels(bench: Bench) -> Iterator[Check]:
    found = bench.offered("lmcore_op_impls", OpImpl, device=bench.device)
    checks = list(check_kernels(found, bench.device.type, bench.contract))
    yield from checks
    if not bench.brings_device:  # a device's kernels are the conformance suite's matter
        wrong = {check.name for check in checks if check.status is CheckStatus.FAILED}
        usable = [one for one in found if f"{one.op}={one.id}" not in wrong]
        yield from check_results(usable, bench.device, bench.record.name)


def _precisions(bench: Bench) -> Iterator[Check]:
    found = bench.offered("lmcore_precision_policies", PrecisionPolicy, device=bench.device)
    usable = [within_dtypes(policy, bench.device) for policy in found]
    yield from check_precisions(usable, bench.device, bench.contract)


def _recompute(bench: Bench) -> Iterator[Check]:
    found = bench.offered("lmcore_recompute_policies", RecomputePolicy, device=bench.device)
    yield from check_recompute(found, bench.contract, brings_device=bench.brings_device)


def _stagers(bench: Bench) -> Iterator[Check]:
    hook = "lmcore_checkpoint_stagers"
    found = bench.offered(hook, CheckpointStager, device=bench.device)
    problems = list(check_named(hook, found, bench.contract))
    yield from problems or [offer(hook, found)]


def _run(hook: str) -> Callable[[Bench], Iterator[Check]]:
    """Return the check of a hook of a run, which is called for runs that ended in several ways."""

    def check(bench: Bench) -> Iterator[Check]:
        ends = _ENDS if hook == "lmcore_run_end" else ({},)
        for ended in ends:
            case = f"for a run with status `{ended['status']}` " if ended else ""
            with tempfile.TemporaryDirectory(prefix="lmcore-run-") as folder:
                plan = copy.deepcopy(bench.plan)
                facts = {"directory": folder, "rank": 0, "world_size": 1, "plan": plan, **ended}
                try:
                    found = call_hook(bench.record, hook, run=facts)
                except PluginError as error:
                    yield Check(hook, CheckStatus.FAILED, f"{case}{error.what}")
                    return
            if plan != bench.plan:
                yield Check(hook, CheckStatus.FAILED, f"{case}it changes the plan of the run")
                return
            if found is not None:
                detail = f"it returned {found!r:.80}, which is not used"
                yield Check(hook, CheckStatus.WARNING, detail)
                return
        many = f", with each of {len(ends)} statuses" if len(ends) > 1 else ""
        yield Check(hook, CheckStatus.OK, f"it was called for a run without steps{many}")

    return check


_ENDS: tuple[dict[str, Any], ...] = (
    {"status": "completed", "iteration": 0},
    {"status": "received SIGTERM", "iteration": 7},
    {"status": "failed: out of memory", "iteration": 3},
)
"""Ends of runs, as `lmcore_run_end` learns of them."""


def _doctor(bench: Bench) -> Iterator[Check]:
    """Check the plugin's own checks; `lmcore doctor` shows their findings."""
    hook = "lmcore_doctor"
    found: list[Check] = []
    for words, probe in _doctor_probes(bench.record.probe).items():
        try:
            answered = bench.offered(hook, Check, probe=probe)
        except PluginError as error:
            yield Check(hook, CheckStatus.FAILED, f"{words}{error.what}")
            return
        found = found or answered
    wrong = [text for one in found for text in field_problems(one, bench.contract)]
    wrong += [
        f"`{one.name}` has the status {one.status!r:.80}, no `CheckStatus`"
        for one in found
        if type(one.status) is not CheckStatus
    ]
    yield from (Check(hook, CheckStatus.FAILED, text) for text in wrong)
    if not wrong:
        count = counted(len(found), "check")
        yield Check(hook, CheckStatus.OK, f"{count}; `lmcore doctor` shows what they find")


def _doctor_probes(probe: Probe | None) -> dict[str, Probe | None]:
    """Return the probes to call the hook with, the plugin's first, and the words of a finding."""
    probes = {"": probe}
    for state in (ProbeState.ABSENT, ProbeState.BROKEN) if probe else ():
        if probe and probe.state is not state:
            probes[f"for a device that is {state} "] = Probe(
                probe.device_type, state, evidence=(f"tried as {state}",)
            )
    return probes


_ON_DEVICE: Mapping[str, Callable[[Bench], Iterator[Check]]] = {
    "lmcore_validate_config": _problems,
    "lmcore_comm_backends": _backends,
    "lmcore_op_impls": _kernels,
    "lmcore_precision_policies": _precisions,
    "lmcore_recompute_policies": _recompute,
    "lmcore_checkpoint_stagers": _stagers,
    "lmcore_run_start": _run("lmcore_run_start"),
    "lmcore_run_end": _run("lmcore_run_end"),
}

DEVICE_CHECKS: Mapping[str, Callable[[Bench], Iterator[Check]]] = {
    "lmcore_launch_env": _launch,
    _CREATE: _create,
    **{hook: _on_device(hook, check) for hook, check in _ON_DEVICE.items()},
    "lmcore_doctor": _doctor,
}
"""Check of each hook that is about a device."""
