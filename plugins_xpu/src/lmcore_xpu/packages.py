"""Packages beside torch that this plugin can use, and how they are recognised; imports none.

Intel's extension for PyTorch and its oneCCL bindings were discontinued in March 2026; their last
releases, 2.8, are for torch 2.8, the oldest that lmcore supports.  A build of either is used if its
first two version numbers are equal to torch's, and refused with the reason otherwise.
Triton for these GPUs has to be the version that torch's metadata requires.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.contract import Device, Problem, TorchBuild, torch_build
from lmcore.contract.op.packages import (
    Package,
    PackageKind,
    distribution_of,
    metadata_problem,
    module_is_there,
    package_of,
    packages_in_facts,
    strict_problems,
)

if TYPE_CHECKING:
    from lmcore.config.section import Config

__all__ = [
    "BINDINGS",
    "BINDINGS_LIBRARY",
    "EXTENSION",
    "PACKAGES",
    "TRITON",
    "installed_packages",
    "packages_of",
    "problems_of",
]

EXTENSION = "intel-extension-for-pytorch"
BINDINGS = "oneccl_bindings_for_pytorch"
TRITON = "triton-xpu"
BINDINGS_LIBRARY = "lib/liboneccl_bindings_for_pytorch_xpu.so"
"""In the folder of the bindings: the part that carries tensors of GPUs."""

_TRITONS = (TRITON, "pytorch-triton-xpu")
_OTHER_TRITON = "triton"
_INDEX = "https://download.pytorch.org/whl/xpu"
_EXTENSION_VERSION = re.compile(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)


def _extension(distribution: importlib.metadata.Distribution, torch: TorchBuild) -> str | None:
    """Return why a build of the extension cannot be used: it is for CPUs, or for another torch."""
    version = _own_version(distribution)
    if version.endswith("+cpu"):
        return (
            f"the installed `{EXTENSION}` {version} is a build for CPUs, as the package registry "
            "has it; builds for GPUs end in `+xpu`"
        )
    return _of_another_torch(EXTENSION, version, torch, "torch has these kernels itself")


def _bindings(distribution: importlib.metadata.Distribution, torch: TorchBuild) -> str | None:
    """Return why a build of the bindings cannot be used: for another torch, or without GPUs."""
    problem = _of_another_torch(
        BINDINGS, distribution.version, torch, "torch reaches oneCCL itself, as `xccl`"
    )
    if problem is not None:
        return problem
    library = Path(str(distribution.locate_file(BINDINGS))) / BINDINGS_LIBRARY
    if library.exists():
        return None
    return (
        f"the installed `{BINDINGS}` {distribution.version} is a build for CPUs: it has no "
        f"`{BINDINGS_LIBRARY}`"
    )


def _of_another_torch(name: str, version: str, torch: TorchBuild, instead: str) -> str | None:
    """Return that a package is not for this torch: its first two numbers are its torch's."""
    numbers = [re.findall(r"\d+", text.partition("+")[0])[:2] for text in (version, torch.version)]
    if numbers[0] == numbers[1]:
        return None
    built, installed = (".".join(found) for found in numbers)
    last = "its last release, 2.8, fits"
    ended = f"it ended with 2.8 in March 2026, and {instead}"
    return (
        f"`{name}` {version} is for torch {built}, and torch {torch.version} is installed; "
        f"{last if installed == '2.8' else ended}"
    )


def _own_version(distribution: importlib.metadata.Distribution) -> str:
    """Return the extension's version; its build for CPUs has that in a separate file."""
    file = Path(str(distribution.locate_file("intel_extension_for_pytorch/_version.py")))
    try:
        found = _EXTENSION_VERSION.search(file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        found = None
    return found[1] if found and "+" not in distribution.version else distribution.version


_KINDS = (
    PackageKind(
        EXTENSION,
        (EXTENSION,),
        ("intel_extension_for_pytorch",),
        ("intel_extension_for_pytorch",),
        "",
        misfit=_extension,
    ),
    PackageKind(
        BINDINGS,
        ("oneccl-bind-pt", "oneccl-bindings-for-pytorch", "oneccl-binding-pt"),
        (BINDINGS,),
        (BINDINGS,),
        "",
        misfit=_bindings,
    ),
    PackageKind(
        TRITON,
        _TRITONS,
        ("triton",),
        ("triton",),
        f"pip uninstall -y {_OTHER_TRITON} {' '.join(_TRITONS)} && pip install {TRITON} "
        f"--index-url {_INDEX}",
    ),
)
PACKAGES: Mapping[str, PackageKind] = {kind.name: kind for kind in _KINDS}
"""The packages by name."""


def installed_packages(torch: TorchBuild | None = None) -> dict[str, Package]:
    """Return the installed packages, checked against the build of *torch*."""
    build = torch or torch_build("xpu")
    found = {
        kind.name: _triton(kind, build) if kind.name == TRITON else _ended(kind, build)
        for kind in _KINDS
    }
    return {name: package for name, package in found.items() if package is not None}


def packages_of(device: Device) -> dict[str, Package]:
    """Return the packages in a device's facts; without that fact, the installed ones."""
    recorded = packages_in_facts(device)
    return installed_packages() if recorded is None else recorded


def problems_of(device: Device, config: Config) -> list[Problem]:
    """Return what `--strict-ops` refuses: installed packages whose kernels cannot be used.

    The bindings have no kernels; `--distributed-backend` reports their problems.
    """
    kernels = {name: package for name, package in packages_of(device).items() if name != BINDINGS}
    return strict_problems(kernels, PACKAGES, config)


def _ended(kind: PackageKind, torch: TorchBuild) -> Package | None:
    """Return a discontinued package; reported before other contradictions of its metadata."""
    found, distribution = package_of(kind, torch), distribution_of(kind)
    if found is None or distribution is None:
        return found
    assert kind.misfit is not None
    return Package(found.version, kind.misfit(distribution, torch) or found.problem)


def _triton(kind: PackageKind, torch: TorchBuild) -> Package | None:
    """Distinguish Triton for these GPUs from other vendors' Triton, with the same modules."""
    if not module_is_there("triton"):
        return None
    distribution = distribution_of(kind)
    other = _distribution(_OTHER_TRITON)
    version = distribution.version if distribution is not None else ""
    if not _has_backend():
        suffix = f" {other.version}" if other is not None else ""
        return Package(
            version, f"the installed `triton`{suffix} is for other GPUs: it has no `backends/intel`"
        )
    if distribution is None:
        return Package()
    if other is not None:
        return Package(
            version,
            f"`{_OTHER_TRITON}` {other.version} and `{distribution.name}` {version} are installed "
            "over each other: both bring the module `triton`",
        )
    return Package(
        version, _other_wanted(distribution) or metadata_problem(kind, distribution, torch)
    )


def _has_backend() -> bool:
    """Return True if the module `triton` compiles for these GPUs."""
    spec = importlib.util.find_spec("triton")
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    return any((Path(folder) / "backends/intel").is_dir() for folder in folders)


def _other_wanted(distribution: importlib.metadata.Distribution) -> str | None:
    """Return a problem if torch's metadata requires another version of Triton."""
    from packaging.requirements import InvalidRequirement, Requirement

    torch = _distribution("torch")
    for text in (torch.requires if torch is not None else None) or ():
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        required = wanted.name in _TRITONS and (wanted.marker is None or wanted.marker.evaluate())
        if required and not wanted.specifier.contains(distribution.version, prereleases=True):
            return (
                f"`{distribution.name}` {distribution.version} is installed, and torch wants "
                f"`{wanted.name}{wanted.specifier}`"
            )
    return None


def _distribution(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
