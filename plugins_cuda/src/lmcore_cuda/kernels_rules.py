"""Rules on NVIDIA's GPUs and their kernel packages, beside those of the core; torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lmcore.accelerator import OpContext
from lmcore.accelerator.kernel_packages import Packages
from lmcore.accelerator.op_rules import Rule
from lmcore_cuda.packages import PACKAGES

__all__ = ["Gpu", "capability", "package"]


def import_problem(name: str) -> str | None:
    """Return why the compiled parts of a package cannot be loaded; None if they can."""
    return PACKAGES[name].import_problem()


@dataclass(frozen=True)
class Gpu:
    """What the rules ask of the device.

    Attributes:
        capability: Compute capability, (major, minor).
        packages: The kernel packages that are installed.
        import_problem: Says of a package why its compiled parts cannot be loaded.
    """

    capability: tuple[int, int]
    packages: Packages
    import_problem: Callable[[str], str | None] = import_problem
    _imports: dict[str, str | None] = field(default_factory=dict)

    def package_problem(self, name: str) -> str | None:
        """Return why a package's kernels cannot be used here; it is imported, once."""
        if name not in self.packages:
            return f"needs `{name}`, not installed"
        told = self.packages[name].problem
        if told is not None:
            return told
        if name not in self._imports:
            self._imports[name] = self.import_problem(name)
        return self._imports[name]


def capability(gpu: Gpu, least: tuple[int, int], majors: Iterable[int] = (), why: str = "") -> Rule:
    """Return the rule that the GPU is recent enough, and of one of *majors* where any is named."""
    wanted = tuple(majors)
    names = " and ".join(f"{major}.x" for major in wanted)
    needs = names or f"{least[0]}.{least[1]} or newer"

    def rule(context: OpContext) -> str | None:
        major, minor = gpu.capability
        if gpu.capability >= least and (not wanted or major in wanted):
            return None
        told = f"is for compute capability {needs}, this GPU has {major}.{minor}"
        return f"{told}; {why}" if why else told

    return rule


def package(gpu: Gpu, name: str) -> Rule:
    """Return the rule that a package is installed and fits the torch that is there."""
    assert name in PACKAGES

    def rule(context: OpContext) -> str | None:
        return gpu.package_problem(name)

    return rule
