"""The simulated device passes every check, the CPU the checks before kernels.

The full set has the CPU's other checks, and the command that makes all (`test_command.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

pytest.importorskip("lmcore_conformance", reason="lmcore-conformance is not installed")

from lmcore.contract import Probe, ProbeState
from lmcore.plugin import Selection, discover
from lmcore_conformance.declaration import find_declaration, read_declaration
from lmcore_conformance.registry import all_checks
from lmcore_conformance.result import Result, Status
from lmcore_conformance.runner import Runner
from lmcore_conformance.target import find_target, shares_device

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WITHOUT_TRAINING = ("contract", "create", "device", "memory", "streams", "ops", "deterministic")
TRAINING = (
    "training",
    "train.command",
    "train.processes",
    "compile",
    "library",
    "loop.processes",
    "loop.sharded",
)
PROCESSES = ("distributed", "distributed-timeout", "distributed-parallel")
PARTS = {"sim": (*WITHOUT_TRAINING, *TRAINING, *PROCESSES), "cpu": WITHOUT_TRAINING}
"""Groups of checks, and single checks, by plugin."""

FULL = {("cpu", "ops")}
"""Parts that only the full set has: the kernels of the CPU have separate tests."""

PATIENCE = 4.0
"""Factor of time limits, because the machine has other work."""


def members(part: str) -> list[str]:
    """Return the ids of the checks that a part has."""
    return [check.id for check in all_checks() if part in {check.group, check.id}]


@pytest.fixture(scope="module")
def results() -> Callable[[str, str], Mapping[str, Result]]:
    """Function that makes the checks of a part; a plugin's device is created once for all."""
    runners: dict[str, Runner] = {}

    def made(name: str, part: str) -> dict[str, Result]:
        if name not in {plugin.name for plugin in discover(probe=False)}:
            pytest.skip(f"the plugin `{name}` is not installed")
        if name not in runners:
            checks = all_checks()
            target = find_target(name)
            declaration = read_declaration(find_declaration(target.module), checks)
            runners[name] = Runner(target, declaration, checks, patience=PATIENCE)
        runners[name].choose(members(part))
        return {member: runners[name].result(member) for member in members(part)}

    return made


@pytest.mark.parametrize(
    "name, part",
    [
        pytest.param(name, part, marks=[pytest.mark.full] if (name, part) in FULL else [])
        for name, parts in PARTS.items()
        for part in parts
    ],
)
def test_a_part_holds(results: Any, name: str, part: str) -> None:
    """Each check passes, or is about something that the plugin has declared not to have."""
    found = results(name, part)
    assert found
    wrong = [
        result for result in found.values() if result.status not in {Status.PASSED, Status.GAP}
    ]
    assert wrong == []


def test_the_parts_are_the_whole() -> None:
    """The parts together make every check on the simulated device."""
    parts = [member for part in PARTS["sim"] for member in members(part)]
    assert sorted(parts) == sorted(check.id for check in all_checks())


@pytest.mark.parametrize("name", PARTS)
def test_little_is_declared_absent(name: str) -> None:
    """Nine tenths of all checks are claimed."""
    if name not in {plugin.name for plugin in discover(probe=False)}:
        pytest.skip(f"the plugin `{name}` is not installed")
    checks = all_checks()
    declaration = read_declaration(find_declaration(find_target(name).module), checks)
    closed = [check.id for check in checks if declaration.why_closed(check) is not None]
    assert len(closed) < 0.1 * len(checks), closed


@pytest.mark.parametrize(
    "device, facts, shared",
    [("cpu", {}, True), ("chip", {"on_host": True}, True), ("chip", {"cores": 2}, False)],
)
def test_processes_share_one_device_on_the_host_alone(
    device: str, facts: dict[str, Any], shared: bool
) -> None:
    """Else level 4 needs a device for each of its processes."""
    probe = Probe(device, ProbeState.PRESENT, 1, facts=facts)
    selection = Selection("chip", "lmcore-chip", "1", probe, "it is named")
    assert shares_device(selection) is shared
