"""Rules on NVIDIA's GPUs and their kernel packages, in addition to the core's; torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lmcore.contract import OpContext
from lmcore.contract.op import rules as op_rules
from lmcore.contract.op.packages import Packages, UsablePackages
from lmcore.contract.op.rules import Rule
from lmcore_cuda.packages import PACKAGES

__all__ = ["Gpu", "capability", "is_older", "least_version", "package"]


def import_problem(name: str) -> str | None:
    """Return why the compiled parts of a package cannot be loaded; None if they can."""
    return PACKAGES[name].import_problem()


@dataclass(frozen=True)
class Gpu:
    """Facts of the device that the rules use.

    Attributes:
        capability: Compute capability, (major, minor).
        packages: The kernel packages that are installed.
        import_problem: Function that returns why a package cannot be loaded, or None.
        usable: The packages, with a check that they can be used.
    """

    capability: tuple[int, int]
    packages: Packages
    import_problem: Callable[[str], str | None] = import_problem
    usable: UsablePackages = field(init=False)

    def __post_init__(self) -> None:
        """Set up the check of packages, done once for each."""
        object.__setattr__(self, "usable", UsablePackages(self.packages, self.import_problem))


def capability(gpu: Gpu, least: tuple[int, int], majors: Iterable[int] = (), why: str = "") -> Rule:
    """Return the rule that the GPU is recent enough, and of one of *majors* if any is given."""
    wanted = tuple(majors)
    names = " and ".join(f"{major}.x" for major in wanted)
    needs = names or f"{least[0]}.{least[1]} or newer"

    def rule(context: OpContext) -> str | None:
        major, minor = gpu.capability
        if gpu.capability >= least and (not wanted or major in wanted):
            return None
        reason = f"is for compute capability {needs}, this GPU has {major}.{minor}"
        return f"{reason}; {why}" if why else reason

    return rule


def is_older(gpu: Gpu, name: str, version: str) -> bool:
    """Return True if an installed package states a version before *version*."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(gpu.packages[name].version) < Version(version)
    except (KeyError, InvalidVersion):
        return False


def least_version(gpu: Gpu, name: str, version: str) -> Rule:
    """Return the rule that a package is at least of the version that the calls here fit."""

    def rule(context: OpContext) -> str | None:
        if is_older(gpu, name, version):
            return f"needs `{name}` {version}, not {gpu.packages[name].version}"
        return None

    return rule


def package(gpu: Gpu, name: str) -> Rule:
    """Return the rule that a package is installed and fits the installed torch."""
    assert name in PACKAGES
    return op_rules.package(gpu.usable, name)
