"""Which kernel packages are installed, and whether they fit the installed torch; imports none.

Kernel packages are compiled against one torch.  What their metadata says of it is compared with the
torch that is there, so that a misfit is known before an import fails with a mangled symbol's name.
What the metadata does not say, `import_problem` finds out in a worker, where torch is loaded.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.accelerator import Device, Problem, TorchBuild, torch_build

if TYPE_CHECKING:
    from lmcore.config.section import Config

__all__ = [
    "FACT",
    "PACKAGES",
    "Package",
    "PackageKind",
    "Packages",
    "describe",
    "import_problem",
    "installed_packages",
    "packages_of",
    "problems_of",
]

FACT = "kernel_packages"
"""Under which `Device.facts` holds what `describe` returns."""


@dataclass(frozen=True)
class PackageKind:
    """A kernel package that this plugin can use.

    Attributes:
        name: What its authors call it; also the key in `PACKAGES`.
        distributions: Names under which it is installed.
        marks: Modules by which it is known, without an import; each may be `package.part`.
        compiled: Modules that fail to import where the package was built for another torch.
        install: How to build it for the torch that is there.
        named: Whether it is there only under one of its names: another package has its modules too.
    """

    name: str
    distributions: tuple[str, ...]
    marks: tuple[str, ...]
    compiled: tuple[str, ...]
    install: str
    named: bool = False


_KINDS = (
    PackageKind(
        "flash-attn",
        ("flash-attn", "flash_attn"),
        ("flash_attn_2_cuda",),
        ("flash_attn_2_cuda",),
        "pip install --no-build-isolation --force-reinstall --no-deps flash-attn",
    ),
    PackageKind(
        "flash-attn-3",
        ("flash-attn-3", "flash_attn_3"),
        ("flash_attn_interface",),
        ("flash_attn_3._C",),
        "build the folder `hopper` of https://github.com/Dao-AILab/flash-attention",
    ),
    PackageKind(
        "flash-attn-4",
        ("flash-attn-4", "flash_attn_4"),
        ("flash_attn.cute", "cutlass"),
        ("flash_attn.cute.interface",),
        "pip install --upgrade flash-attn-4",
        named=True,
    ),
    PackageKind(
        "apex",
        ("apex",),
        ("apex.optimizers", "amp_C"),
        ("amp_C", "fused_layer_norm_cuda"),
        "build https://github.com/NVIDIA/apex with its CUDA extensions",
    ),
    PackageKind(
        "liger-kernel",
        ("liger-kernel", "liger_kernel"),
        ("liger_kernel",),
        ("liger_kernel.ops",),
        "pip install --upgrade liger-kernel",
    ),
    PackageKind(
        "transformer-engine",
        ("transformer-engine", "transformer_engine", "transformer_engine_torch"),
        ("transformer_engine", "transformer_engine_torch"),
        ("transformer_engine_torch",),
        "pip install --no-build-isolation --force-reinstall --no-deps transformer_engine_torch",
    ),
)
PACKAGES: Mapping[str, PackageKind] = {one.name: one for one in _KINDS}
"""The packages by name."""

_TORCH_MARK = re.compile(r"torch(\d+)\.(\d+)")
_CUDA_MARK = re.compile(r"cu(\d{2})\d*(?=torch|\b)")


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
"""The installed packages, by names in `PACKAGES`."""


def installed_packages(torch: TorchBuild | None = None) -> dict[str, Package]:
    """Return the kernel packages that are installed; *torch* is what they are to fit."""
    build = torch or torch_build("cuda")
    found = {kind.name: _package(kind, build) for kind in _KINDS}
    return {name: package for name, package in found.items() if package is not None}


def describe(packages: Packages) -> dict[str, dict[str, str | None]]:
    """Return JSON values, for `Device.facts[FACT]`."""
    return {
        name: {"version": one.version, "problem": one.problem} for name, one in packages.items()
    }


def packages_of(device: Device) -> dict[str, Package]:
    """Return the packages that a device's facts tell of; without that fact, the installed ones."""
    told: Mapping[str, Mapping[str, Any]] | None = device.facts.get(FACT)
    if told is None:
        return installed_packages()
    return {name: Package(one["version"], one["problem"]) for name, one in told.items()}


def problems_of(device: Device, config: Config) -> list[Problem]:
    """Return what `--strict-ops` refuses: installed packages whose kernels cannot be used.

    Without it such a package is passed over, and every kernel that needs it says why.
    """
    if not config.accelerator.strict_ops:
        return []
    packages = packages_of(device)
    told = ((name, one.problem or import_problem(name)) for name, one in packages.items())
    return [_refused(name, why) for name, why in told if why is not None]


def _refused(name: str, why: str) -> Problem:
    distribution = PACKAGES[name].distributions[0]
    return Problem(
        f"`--strict-ops`: the kernel package `{name}` cannot be used",
        why=why,
        hint=f"mend it (`{PACKAGES[name].install}`), remove it (`pip uninstall {distribution}`), "
        "or leave `--strict-ops` out and go on without its kernels",
    )


def import_problem(
    name: str, load: Callable[[str], object] = importlib.import_module
) -> str | None:
    """Return why the compiled parts of a package cannot be loaded; None if they can.

    torch is loaded by this: for a worker, never for the launcher.
    """
    for module in PACKAGES[name].compiled:
        try:
            load(module)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the import of a package may raise anything
            said = " ".join(str(error).split()) or type(error).__name__
            return f"`{name}` is installed, and its `{module}` cannot be loaded: {said:.300}"
    return None


def _package(kind: PackageKind, torch: TorchBuild) -> Package | None:
    """Return what is installed of *kind*; None where nothing is."""
    lacking = [module for module in kind.marks if not _is_there(module)]
    distribution = _distribution(kind)
    if kind.name == "apex":
        return _apex(lacking, distribution, torch)
    if lacking or (kind.named and distribution is None):
        return None
    if distribution is None:
        return Package()
    return Package(distribution.version, _metadata_problem(kind, distribution, torch))


def _apex(
    lacking: list[str], distribution: importlib.metadata.Distribution | None, torch: TorchBuild
) -> Package | None:
    """Tell NVIDIA's package from the unrelated one that the registry has under the name `apex`."""
    if not _is_there("apex"):
        return None
    version = distribution.version if distribution is not None else ""
    if "apex.optimizers" in lacking:
        summary = _summary(distribution) if distribution is not None else ""
        which = f" (`{summary:.80}`)" if summary else ""
        return Package(
            version,
            f"the installed `apex` {version or 'without a version'} is another package of that "
            f"name{which}: it has no `apex.optimizers`",
        )
    if lacking:
        return Package(version, "`apex` is installed without its CUDA extensions: no `amp_C`")
    if distribution is None:
        return Package()
    return Package(version, _metadata_problem(PACKAGES["apex"], distribution, torch))


def _summary(distribution: importlib.metadata.Distribution) -> str:
    metadata = distribution.metadata
    return str(metadata["Summary"]) if "Summary" in metadata else ""


def _is_there(module: str) -> bool:
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


def _distribution(kind: PackageKind) -> importlib.metadata.Distribution | None:
    for name in kind.distributions:
        try:
            return importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _metadata_problem(
    kind: PackageKind, distribution: importlib.metadata.Distribution, torch: TorchBuild
) -> str | None:
    """Return how the metadata of a package contradicts the installed torch."""
    named = f"`{kind.name}` {distribution.version}"
    for wanted in _torch_requirements(distribution):
        if not wanted.contains(torch.release, prereleases=True):
            return f"{named} requires torch{wanted}, and torch {torch.version} is installed"
    origin = f"{distribution.version} {_origin(distribution)}"
    built = _TORCH_MARK.search(origin)
    release = tuple(int(part) for part in re.findall(r"\d+", torch.release)[:2])
    if built and (int(built[1]), int(built[2])) != release:
        return (
            f"{named} was built for torch {built[1]}.{built[2]}, and torch {torch.version} is "
            "installed"
        )
    cuda = _CUDA_MARK.search(origin)
    if cuda and torch.toolkit and cuda[1] != torch.toolkit.partition(".")[0]:
        return (
            f"{named} was built for CUDA {cuda[1]}, and torch {torch.version} is built with CUDA "
            f"{torch.toolkit}"
        )
    return None


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


def _origin(distribution: importlib.metadata.Distribution) -> str:
    """Return the name of the file that a package was installed from, where that was recorded."""
    text = distribution.read_text("direct_url.json")
    if not text:
        return ""
    try:
        url = json.loads(text)["url"]
    except (ValueError, TypeError, KeyError):
        return ""
    return str(url).rpartition("/")[2]
