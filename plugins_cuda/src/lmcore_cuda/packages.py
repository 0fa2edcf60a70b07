"""Kernel packages that this plugin can use, recognised without an import."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from lmcore.contract import Device, Problem, TorchBuild, torch_build
from lmcore.contract.op.packages import (
    Package,
    PackageKind,
    distribution_of,
    metadata_problem,
    module_is_there,
    origin_of,
    package_of,
    packages_in_facts,
    strict_problems,
)

if TYPE_CHECKING:
    from lmcore.config.section import Config

__all__ = ["PACKAGES", "installed_packages", "packages_of", "problems_of"]

_CUDA_MARK = re.compile(r"cu(\d{2})\d*(?=torch|\b)")


def _other_cuda(distribution: importlib.metadata.Distribution, torch: TorchBuild) -> str | None:
    """Return a message if a package's file name has another major version of CUDA than torch's."""
    cuda = _CUDA_MARK.search(origin_of(distribution))
    if cuda is None or not torch.toolkit or cuda[1] == torch.toolkit.partition(".")[0]:
        return None
    return (
        f"`{distribution.name}` {distribution.version} was built for CUDA {cuda[1]}, and torch "
        f"{torch.version} is built with CUDA {torch.toolkit}"
    )


class _ApexKind(PackageKind):
    """apex, whose compiled modules are in `apex._extensions` by its pull request 2009."""

    def import_problem(self, load: Callable[[str], object] = importlib.import_module) -> str | None:
        """Return why the compiled parts cannot be loaded; None if they can."""
        folder = "apex._extensions." if module_is_there("apex._extensions") else ""
        return super().import_problem(lambda module: load(folder + module))


_KINDS = (
    PackageKind(
        "flash-attn",
        ("flash-attn", "flash_attn"),
        ("flash_attn_2_cuda",),
        ("flash_attn_2_cuda",),
        "pip install --no-build-isolation --force-reinstall --no-deps flash-attn",
        misfit=_other_cuda,
    ),
    PackageKind(
        "flash-attn-3",
        ("flash-attn-3", "flash_attn_3"),
        ("flash_attn_interface",),
        ("flash_attn_3._C",),
        "build the folder `hopper` of https://github.com/Dao-AILab/flash-attention",
        misfit=_other_cuda,
    ),
    PackageKind(
        "flash-attn-4",
        ("flash-attn-4", "flash_attn_4"),
        ("flash_attn.cute", "cutlass"),
        ("flash_attn.cute.interface",),
        "pip install --upgrade flash-attn-4",
        named=True,
        misfit=_other_cuda,
    ),
    _ApexKind(
        "apex",
        ("apex",),
        ("apex.optimizers",),
        ("amp_C", "fused_layer_norm_cuda"),
        "build https://github.com/NVIDIA/apex with its CUDA extensions",
        misfit=_other_cuda,
    ),
    PackageKind(
        "liger-kernel",
        ("liger-kernel", "liger_kernel"),
        ("liger_kernel",),
        ("liger_kernel.ops",),
        "pip install --upgrade liger-kernel",
        misfit=_other_cuda,
    ),
    PackageKind(
        "transformer-engine",
        ("transformer-engine", "transformer_engine", "transformer_engine_torch"),
        ("transformer_engine", "transformer_engine.pytorch"),
        # The first loads the second, which may be in its folder, and the library that it needs.
        ("transformer_engine.pytorch", "transformer_engine_torch"),
        "pip install --no-build-isolation --force-reinstall --no-deps transformer_engine_torch",
        misfit=_other_cuda,
    ),
)
PACKAGES: Mapping[str, PackageKind] = {kind.name: kind for kind in _KINDS}
"""The packages by name."""


def installed_packages(torch: TorchBuild | None = None) -> dict[str, Package]:
    """Return the installed kernel packages, checked against the build *torch*."""
    build = torch or torch_build("cuda")
    found = {
        kind.name: _apex(kind, build) if kind.name == "apex" else package_of(kind, build)
        for kind in _KINDS
    }
    return {name: package for name, package in found.items() if package is not None}


def packages_of(device: Device) -> dict[str, Package]:
    """Return the packages in a device's facts; without that fact, the installed ones."""
    recorded = packages_in_facts(device)
    return installed_packages() if recorded is None else recorded


def problems_of(device: Device, config: Config) -> list[Problem]:
    """Return the problems under `--strict-ops`: installed packages whose kernels cannot be used."""
    return strict_problems(packages_of(device), PACKAGES, config)


def _apex(kind: PackageKind, torch: TorchBuild) -> Package | None:
    """Distinguish NVIDIA's package from the unrelated `apex` of the package registry."""
    if not module_is_there("apex"):
        return None
    distribution = distribution_of(kind)
    version = distribution.version if distribution is not None else ""
    if not module_is_there("apex.optimizers"):
        summary = _summary(distribution) if distribution is not None else ""
        suffix = f" (`{summary:.80}`)" if summary else ""
        return Package(
            version,
            f"the installed `apex` {version or 'without a version'} is another package of that "
            f"name{suffix}: it has no `apex.optimizers`",
        )
    if not module_is_there("amp_C") and not module_is_there("apex._extensions"):
        return Package(version, "`apex` is installed without its CUDA extensions: no `amp_C`")
    if distribution is None:
        return Package()
    return Package(version, metadata_problem(kind, distribution, torch))


def _summary(distribution: importlib.metadata.Distribution) -> str:
    metadata = distribution.metadata
    return str(metadata["Summary"]) if "Summary" in metadata else ""
