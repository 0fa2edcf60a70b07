"""Records of a plugin and its hardware, made before any device is initialized.

Torch-free: these records travel through the launcher.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

__all__ = ["API_VERSION", "Check", "CheckStatus", "PluginInfo", "Probe", "ProbeState", "Problem"]

API_VERSION = "1.3"
"""Version of the plugin contract.  A removed or changed hook raises the first number, an added
hook or argument the second."""


@dataclass(frozen=True)
class PluginInfo:
    """Identity and requirements of a plugin.

    Attributes:
        name: Short name, unique among the installed plugins: "cpu".
        api: Versions of the contract it works with, as a version specifier: ">=1,<2".
        torch: Versions of torch it works with, as a version specifier.
        provides: Device types it may bring, for `--device` messages.
        summary: One line for `lmcore plugins`.
        device_resources: Name of its devices as a cluster's scheduler knows them, by the kind of
            job of `lmcore launch`: {"k8s": "example.com/chip", "slurm": "gpu"}.  A profile with
            `devices_per_node` and without `device_resource` gets it.
    """

    name: str
    api: str
    torch: str = ">=2.8"
    provides: tuple[str, ...] = ()
    summary: str = ""
    device_resources: Mapping[str, str] = field(default_factory=dict)


class ProbeState(StrEnum):
    """State of a plugin's device on this machine."""

    PRESENT = "present"
    ABSENT = "absent"
    BROKEN = "broken"


@dataclass(frozen=True)
class Probe:
    """Result of looking for a device without initializing it.

    Attributes:
        device_type: torch's device type, "cpu".
        state: PRESENT: usable; ABSENT: no such hardware; BROKEN: the hardware exists and its
            software does not work.
        count: number of devices of this type that this process may use; a run starts as many
            processes by default.
        priority: of the present accelerators the one of the highest priority is used, and the CPU
            only if there is none; 100 unless there is a reason.
        evidence: findings, one line each, such as the files looked for.
        fix: the command or step that fixes BROKEN (or installs an ABSENT device's software).
        facts: Machine-readable details (names, sizes), JSON values only; `driver`, `runtime` and
            `torch_build` are versions, which `lmcore plugins` and `lmcore doctor` show; `on_host`
            is True for a device that computes on the host, which several processes can share.
    """

    device_type: str
    state: ProbeState
    count: int = 0
    priority: int = 100
    evidence: tuple[str, ...] = ()
    fix: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Probe:
        """Return the record from the JSON values of `to_dict`."""
        read = {"state": ProbeState(values["state"]), "evidence": tuple(values["evidence"])}
        return cls(**(dict(values) | read))


class CheckStatus(StrEnum):
    """Result of one line of `lmcore doctor`."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Check:
    """One line of `lmcore doctor`: name of the check, its status, detail and fix."""

    name: str
    status: CheckStatus
    detail: str
    fix: str | None = None


@dataclass(frozen=True)
class Problem:
    """A reason why a device cannot run a configuration; the parts of an `LmcoreError`."""

    what: str
    why: str | None = None
    hint: str | None = None
