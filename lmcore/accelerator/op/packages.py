"""Packages of kernels beside torch: which are installed, and whether they fit it; imports none.

Such packages are compiled against one torch.  What their metadata says of it is compared with the
torch that is there, so that a misfit is known before an import fails with a mangled symbol's name.
What the metadata does not say, `PackageKind.import_problem` finds out in a worker, where torch is
loaded.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.accelerator.device import Device
from lmcore.accelerator.probe import Problem
from lmcore.accelerator.torch_build import TorchBuild

if TYPE_CHECKING:
    from lmcore.config.section import Config

__all__ = [
    "FACT",
    "Package",
    "PackageKind",
    "Packages",
    "UsablePackages",
    "describe",
    "distribution_of",
    "metadata_problem",
    "module_is_there",
    "origin_of",
    "package_of",
    "packages_in_facts",
    "strict_problems",
]

FACT = "kernel_packages"
"""Under which `Device.facts` holds what `describe` returns."""

_TORCH_MARK = re.compile(r"torch(\d+)\.(\d+)")


@dataclass(frozen=True)
class PackageKind:
    """A kernel package that a plugin can use.

    Attributes:
        name: What its authors call it.
        distributions: Names under which it is installed.
        marks: Modules by which it is known, without an import; each may be `package.part`.
        compiled: Modules that fail to import where the package was built for another torch.
        install: How to build it for the torch that is there; empty where nobody builds it for that.
        named: Whether it is there only under one of its names: another package has its modules too.
        misfit: Returns what else in the metadata contradicts the torch that is there.
    """

    name: str
    distributions: tuple[str, ...]
    marks: tuple[str, ...]
    compiled: tuple[str, ...]
    install: str
    named: bool = False
    misfit: Callable[[importlib.metadata.Distribution, TorchBuild], str | None] | None = None

    def import_problem(self, load: Callable[[str], object] = importlib.import_module) -> str | None:
        """Return why the compiled parts cannot be loaded; None if they can.

        torch is loaded by this: for a worker, never for the launcher.
        """
        for module in self.compiled:
            try:
                load(module)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the import of a package may raise anything
                said = " ".join(str(error).split()) or type(error).__name__
                return (
                    f"`{self.name}` is installed, and its `{module}` cannot be loaded: {said:.300}"
                )
        return None


@dataclass(frozen=True)
class Package:
    """A kernel package that is installed.

    Attributes:
        version: As its metadata gives it; empty where there is none.
        problem: Why it cannot be used, in words; None where nothing speaks against it.
    """

    version: str = ""
    problem: str | None = None


Packages = Mapping[str, Package]
"""The installed packages, by name."""


@dataclass(frozen=True)
class UsablePackages:
    """The installed packages of a device's plugin, asked whether their kernels can be used.

    Attributes:
        packages: Those that are installed.
        import_problem: Says of a package why its compiled parts cannot be loaded.
    """

    packages: Packages
    import_problem: Callable[[str], str | None]
    _imports: dict[str, str | None] = field(default_factory=dict)

    def problem(self, name: str, *, load: bool = True) -> str | None:
        """Return why a package's kernels cannot be used here; None if they can.

        Args:
            name: Of the package.
            load: Whether its compiled parts are tried by importing them, once, where nothing else
                speaks against it; for a worker.
        """
        if name not in self.packages:
            return f"needs `{name}`, not installed"
        told = self.packages[name].problem
        if told is not None or not load:
            return told
        if name not in self._imports:
            self._imports[name] = self.import_problem(name)
        return self._imports[name]


def describe(packages: Packages) -> dict[str, dict[str, str | None]]:
    """Return JSON values, for `Device.facts[FACT]`."""
    return {
        name: {"version": one.version, "problem": one.problem} for name, one in packages.items()
    }


def packages_in_facts(device: Device) -> dict[str, Package] | None:
    """Return the packages that a device's facts tell of; None without that fact."""
    told: Mapping[str, Mapping[str, Any]] | None = device.facts.get(FACT)
    if told is None:
        return None
    return {name: Package(one["version"], one["problem"]) for name, one in told.items()}


def strict_problems(
    packages: Packages, kinds: Mapping[str, PackageKind], config: Config
) -> list[Problem]:
    """Return what `--strict-ops` refuses: installed packages whose kernels cannot be used.

    Without it such a package is passed over, and every kernel that needs it says why.
    """
    if not config.accelerator.strict_ops:
        return []
    told = (
        (kinds[name], one.problem or kinds[name].import_problem()) for name, one in packages.items()
    )
    return [_refused(kind, why) for kind, why in told if why is not None]


def _refused(kind: PackageKind, why: str) -> Problem:
    mend = f"mend it (`{kind.install}`), " if kind.install else ""
    return Problem(
        f"`--strict-ops`: the kernel package `{kind.name}` cannot be used",
        why=why,
        hint=f"{mend}remove it (`pip uninstall {kind.distributions[0]}`), "
        "or leave `--strict-ops` out and go on without its kernels",
    )


def package_of(kind: PackageKind, torch: TorchBuild) -> Package | None:
    """Return what is installed of *kind*, judged by its metadata; None where nothing is."""
    distribution = distribution_of(kind)
    lacking = [module for module in kind.marks if not module_is_there(module)]
    if lacking or (kind.named and distribution is None):
        return None
    if distribution is None:
        return Package()
    return Package(distribution.version, metadata_problem(kind, distribution, torch))


def module_is_there(module: str) -> bool:
    """Say whether a module can be found; the package around it is looked into, not imported."""
    top, _, part = module.partition(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # a loaded module without a spec
        return False
    if spec is None:
        return False
    if not part:
        return True
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    return any((folder / part).is_dir() or list(folder.glob(f"{part}.*")) for folder in folders)


def distribution_of(kind: PackageKind) -> importlib.metadata.Distribution | None:
    """Return the installed distribution, under whichever of its names."""
    for name in kind.distributions:
        try:
            return importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def metadata_problem(
    kind: PackageKind, distribution: importlib.metadata.Distribution, torch: TorchBuild
) -> str | None:
    """Return how the metadata of a package contradicts the installed torch."""
    named = f"`{kind.name}` {distribution.version}"
    for wanted in _torch_requirements(distribution):
        if not wanted.contains(torch.release, prereleases=True):
            return f"{named} requires torch{wanted}, and torch {torch.version} is installed"
    built = _TORCH_MARK.search(origin_of(distribution))
    release = tuple(int(part) for part in re.findall(r"\d+", torch.release)[:2])
    if built and (int(built[1]), int(built[2])) != release:
        return (
            f"{named} was built for torch {built[1]}.{built[2]}, and torch {torch.version} is "
            "installed"
        )
    return kind.misfit(distribution, torch) if kind.misfit is not None else None


def _torch_requirements(distribution: importlib.metadata.Distribution) -> list[Any]:
    """Return what a package's metadata asks of torch's version."""
    from packaging.requirements import InvalidRequirement, Requirement

    found = []
    for text in distribution.requires or ():
        try:
            one = Requirement(text)
        except InvalidRequirement:
            continue
        if one.name == "torch" and (one.marker is None or one.marker.evaluate({"extra": ""})):
            found.append(one.specifier)
    return found


def origin_of(distribution: importlib.metadata.Distribution) -> str:
    """Return the version of a package, and the file that it came from where that was recorded."""
    text = distribution.read_text("direct_url.json")
    try:
        url = str(json.loads(text)["url"]) if text else ""
    except (ValueError, TypeError, KeyError):
        url = ""
    return f"{distribution.version} {url.rpartition('/')[2]}"
