"""Packages of kernels beside torch: which are installed, and whether they fit it; imports none.

Such packages are compiled against one torch.  The version in their metadata is compared with the
installed torch, so that a misfit is known before an import fails with a mangled symbol's name.
Other problems are found by `PackageKind.import_problem` in a worker, where torch is
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

from lmcore.contract.device import Device
from lmcore.contract.probe import Problem
from lmcore.contract.torch_build import TorchBuild

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
"""Key of `Device.facts` for the result of `describe`."""

_TORCH_MARK = re.compile(r"torch(\d+)\.(\d+)")


@dataclass(frozen=True)
class PackageKind:
    """A kernel package that a plugin can use.

    Attributes:
        name: The authors' name of the package.
        distributions: Names of its distributions.
        marks: Modules that identify it without an import; each may be `package.part`.
        compiled: Modules that fail to import if the package was built for another torch.
        install: Command that builds it for the installed torch; empty if it cannot be built.
        named: True if it has to be installed under one of its names, because another package has
            the same modules.
        misfit: Returns another contradiction between the metadata and the installed torch.
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
                text = " ".join(str(error).split()) or type(error).__name__
                return (
                    f"`{self.name}` is installed, and its `{module}` cannot be loaded: {text:.300}"
                )
        return None


@dataclass(frozen=True)
class Package:
    """A kernel package that is installed.

    Attributes:
        version: Version in its metadata; empty if there is none.
        problem: Reason why it cannot be used; None if its metadata shows none.
    """

    version: str = ""
    problem: str | None = None


Packages = Mapping[str, Package]
"""The installed packages, by name."""


@dataclass(frozen=True)
class UsablePackages:
    """Installed kernel packages of a device's plugin, with the reasons why some cannot be used.

    Attributes:
        packages: Installed packages by name.
        import_problem: Returns the reason why a package's compiled parts cannot be loaded.
    """

    packages: Packages
    import_problem: Callable[[str], str | None]
    _imports: dict[str, str | None] = field(default_factory=dict)

    def problem(self, name: str, *, load: bool = True) -> str | None:
        """Return why a package's kernels cannot be used here; None if they can.

        Args:
            name: Name of the package.
            load: True to import the compiled parts, once, if the metadata shows no problem; for a
                worker.
        """
        if name not in self.packages:
            return f"needs `{name}`, not installed"
        problem = self.packages[name].problem
        if problem is not None or not load:
            return problem
        if name not in self._imports:
            self._imports[name] = self.import_problem(name)
        return self._imports[name]


def describe(packages: Packages) -> dict[str, dict[str, str | None]]:
    """Return JSON values, for `Device.facts[FACT]`."""
    return {
        name: {"version": package.version, "problem": package.problem}
        for name, package in packages.items()
    }


def packages_in_facts(device: Device) -> dict[str, Package] | None:
    """Return the packages in a device's facts; None without that fact."""
    fact: Mapping[str, Mapping[str, Any]] | None = device.facts.get(FACT)
    if fact is None:
        return None
    return {name: Package(record["version"], record["problem"]) for name, record in fact.items()}


def strict_problems(
    packages: Packages, kinds: Mapping[str, PackageKind], config: Config
) -> list[Problem]:
    """Return what `--strict-ops` refuses: installed packages whose kernels cannot be used.

    Without it such a package is passed over, and every kernel that needs it says why.
    """
    if not config.accelerator.strict_ops:
        return []
    problems = (
        (kinds[name], package.problem or kinds[name].import_problem())
        for name, package in packages.items()
    )
    return [_refused(kind, why) for kind, why in problems if why is not None]


def _refused(kind: PackageKind, why: str) -> Problem:
    rebuild = f"rebuild it (`{kind.install}`), " if kind.install else ""
    return Problem(
        f"`--strict-ops`: the kernel package `{kind.name}` cannot be used",
        why=why,
        hint=f"{rebuild}remove it (`pip uninstall {kind.distributions[0]}`), "
        "or leave `--strict-ops` out and continue without its kernels",
    )


def package_of(kind: PackageKind, torch: TorchBuild) -> Package | None:
    """Return the installed package of *kind*, judged by its metadata; None if there is none."""
    distribution = distribution_of(kind)
    lacking = [module for module in kind.marks if not module_is_there(module)]
    if lacking or (kind.named and distribution is None):
        return None
    if distribution is None:
        return Package()
    return Package(distribution.version, metadata_problem(kind, distribution, torch))


def module_is_there(module: str) -> bool:
    """Return True if a module can be found; its package is searched, not imported."""
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
    """Return the installed distribution, under any of its names."""
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
    """Return the torch versions that a package's metadata requires."""
    from packaging.requirements import InvalidRequirement, Requirement

    found = []
    for text in distribution.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.name == "torch" and (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            found.append(requirement.specifier)
    return found


def origin_of(distribution: importlib.metadata.Distribution) -> str:
    """Return the version of a package, and the file that it came from where that was recorded."""
    text = distribution.read_text("direct_url.json")
    try:
        url = str(json.loads(text)["url"]) if text else ""
    except (ValueError, TypeError, KeyError):
        url = ""
    return f"{distribution.version} {url.rpartition('/')[2]}"
