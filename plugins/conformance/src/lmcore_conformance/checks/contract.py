"""Level 0: the plugin keeps the contract, and costs nothing where its device is not used.

The checks sort the lines of `lmcore plugin check`, which tries the plugin in separate processes.
Nothing here loads torch into the process of a check.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Iterator, Sequence
from functools import cached_property, partial

from lmcore.base.errors import counted
from lmcore.contract.probe import Check as Line
from lmcore.contract.probe import CheckStatus
from lmcore.plugin.discovery import GROUP
from lmcore_conformance.plugin_check.launcher_cost import DISCOVERY, LAUNCHER
from lmcore_conformance.plugin_check.lines import plugin_lines
from lmcore_conformance.plugin_check.trial import EFFECTS
from lmcore_conformance.registry import Failure, NotRun, check

__all__ = ["ContractBench"]

_check = partial(check, level="L0", group="contract")
_OTHERS = (
    *("import", "source", "hooks", "lmcore_plugin_info", "lmcore_probe"),
    *(*LAUNCHER, *DISCOVERY, EFFECTS),
)
"""Lines that have a check each; the remaining ones are about hooks."""


class ContractBench:
    """The plugins by their entry points, and the lines of `lmcore plugin check`."""

    def __init__(self, entry_points: Sequence[str], patience: float = 1.0) -> None:
        """Take the names of the plugins' entry points, and the factor on time limits."""
        self.entry_points = tuple(entry_points)
        self.patience = patience

    @cached_property
    def lines(self) -> list[Line]:
        """Lines of the check of the contract, with the steps that it did not reach."""
        return [line for name in self.entry_points for line in self._lines_of(name)]

    def _lines_of(self, name: str) -> Iterator[Line]:
        point = next(iter(importlib.metadata.entry_points(group=GROUP, name=name)))
        assert point.dist is not None
        prefix = f"plugin `{name}`: " if len(self.entry_points) > 1 else ""
        for line in plugin_lines(name, point.dist.name, patience=self.patience):
            yield dataclasses.replace(line, detail=f"{prefix}{line.detail}")

    def judge(self, names: tuple[str, ...] | None, *, prefix: str = "") -> str:
        """Return the summary of the lines with these names.

        Args:
            names: names of steps; None: all that no other check judges.
            prefix: prefix of further names.

        Raises:
            Failure: Some of them say that something is wrong.
            NotRun: All were skipped.
        """
        matching = [line for line in self.lines if self._belongs(line.name, names, prefix)]
        if not matching and names == ("lmcore_probe",):
            raise NotRun("the plugin has no such hook")
        wrong = [line for line in matching if line.status is CheckStatus.FAILED]
        if wrong:
            raise Failure(*(f"{line.name}: {line.detail}" for line in wrong))
        if matching and all(line.status is CheckStatus.SKIPPED for line in matching):
            raise NotRun(matching[0].detail)
        warned = [
            f"{line.name}: {line.detail}" for line in matching if line.status is CheckStatus.WARNING
        ]
        if len(matching) == len(self.entry_points) and not warned and names is not None:
            return "; ".join(line.detail for line in matching)
        return "; ".join(warned) or f"{counted(len(matching), 'line')} of `lmcore plugin check`"

    def _belongs(self, name: str, names: tuple[str, ...] | None, prefix: str) -> bool:
        if names is not None:
            return name in names or (bool(prefix) and name.startswith(prefix))
        return name not in _OTHERS and not name.startswith("lmcore_add_")


@_check(
    "contract.import",
    "The plugin's module can be imported, without torch.",
    reason="`lmcore plugins` and every launcher import it; torch takes seconds.",
    seconds=120,
)
def import_(bench: ContractBench) -> str:
    """Judge the import."""
    return bench.judge(("import",))


@_check(
    "contract.source",
    "It imports only names of the contract from lmcore.",
    reason="Other names may change in any release.",
    seconds=120,
)
def source(bench: ContractBench) -> str:
    """Judge the imports of the source files."""
    return bench.judge(("source",))


@_check(
    "contract.hooks",
    "Its hooks match the contract: names, marks and arguments; hooks that belong together are "
    "present.",
    reason="A hook with another name or argument is not called as intended.",
    seconds=120,
)
def hooks(bench: ContractBench) -> str:
    """Judge the hooks' signatures."""
    return bench.judge(("hooks", "lmcore_plugin_info"))


@_check(
    "contract.probe",
    "`lmcore_probe` returns a valid `Probe`, and does not import torch.",
    reason="It runs in the launcher of every command, for every installed plugin.",
    seconds=120,
)
def probe(bench: ContractBench) -> str:
    """Judge the probe."""
    return bench.judge(("lmcore_probe",))


@_check(
    "contract.registrations",
    "Its settings, commands, texts and tokenizers can be registered and found.",
    reason="A name that is in use, or a missing file, fails the user's command.",
    seconds=120,
)
def registrations(bench: ContractBench) -> str:
    """Judge the plugin's registrations."""
    return bench.judge((), prefix="lmcore_add_")


@_check(
    "contract.offers",
    "The device can be created, and the other hooks return what the contract requires.",
    reason="A run uses kernels, policies and backends without a further check.",
    seconds=120,
)
def offers(bench: ContractBench) -> str:
    """Judge the hooks that are about a device; without one most of them cannot be called."""
    found = bench.judge(None)
    for line in bench.lines:
        if line.name == "lmcore_create_device" and line.status is CheckStatus.SKIPPED:
            raise NotRun(line.detail)
    return found


@_check(
    "contract.import-time",
    "Importing the plugin takes less than 0.5 s, of processor time and of waiting.",
    reason="Every command of lmcore pays for it, also those that do not use the device.",
    seconds=120,
)
def import_time(bench: ContractBench) -> str:
    """Judge the time of the import in a process that has lmcore's contract loaded."""
    return bench.judge(("import time",))


@_check(
    "contract.import-effects",
    "The import changes nothing in its process: no output, variable, function, setting or thread.",
    reason="The process is the user's command; its output may be JSON, and its device another one.",
    seconds=120,
)
def import_effects(bench: ContractBench) -> str:
    """Judge what the import changes."""
    return bench.judge(("import effects",))


@_check(
    "contract.launcher-hooks",
    "The hooks that every command calls take less than 0.5 s and change nothing in the process.",
    reason="`lmcore_plugin_info` and `lmcore_add_...` are called for every installed plugin.",
    seconds=120,
)
def launcher_hooks(bench: ContractBench) -> str:
    """Judge the hooks of the launcher but the probe."""
    return bench.judge(("launcher hooks",))


@_check(
    "contract.probe-initialises-nothing",
    "The probe takes less than 2 s, and changes nothing in its process: no torch, output, open "
    "device, thread, variable or function.",
    reason="A device context of the launcher may lock out the workers, and a process that has "
    "initialised a driver cannot be forked.",
    seconds=120,
)
def probe_initialises_nothing(bench: ContractBench) -> str:
    """Judge what two probes change."""
    return bench.judge(("probe effects",))


@_check(
    "contract.hook-effects",
    "The hooks of the device replace no function of torch, Python or lmcore, and change no global "
    "setting.",
    reason="The core and the user's loop compute with torch as it is documented.",
    seconds=120,
)
def hook_effects(bench: ContractBench) -> str:
    """Judge what the hooks of the device change."""
    return bench.judge((EFFECTS,))


@_check(
    "contract.idempotent",
    "The plugin registers and returns the same if a process discovers it twice, and changes "
    "nothing in a process that has torch.",
    reason="A launcher discovers plugins for its flags, for the device selection and for its "
    "workers.",
    seconds=120,
)
def idempotent(bench: ContractBench) -> str:
    """Judge two discoveries in one process."""
    return bench.judge(DISCOVERY)
