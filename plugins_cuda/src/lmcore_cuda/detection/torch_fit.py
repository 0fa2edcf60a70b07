"""Check of the installed torch against driver and GPUs, and the command for one that fits."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import NamedTuple

from lmcore.contract import TorchBuild
from lmcore_cuda.detection.architectures import PYTORCH_BUILDS, capability_words, runs_on
from lmcore_cuda.detection.facts import Facts
from lmcore_cuda.detection.visible import VISIBLE
from lmcore_cuda.driver.nvml import Gpu

__all__ = ["dotted", "torch_command", "torch_fault", "without_kernels"]

Capability = tuple[int, int]

_NEWEST = (sys.maxsize, 0)


class _Build(NamedTuple):
    """Build of PyTorch: name of its index, CUDA of the driver, first and last version of torch."""

    name: str
    driver_cuda: tuple[int, int]
    first: tuple[int, int]
    last: tuple[int, int]


_BUILDS = (
    _Build("cu130", (13, 0), (2, 9), _NEWEST),
    _Build("cu128", (12, 8), (2, 7), (2, 10)),
    _Build("cu126", (12, 6), (2, 6), _NEWEST),
)
"""PyTorch's builds, the newest CUDA first."""


def torch_fault(facts: Facts, gpus: Sequence[Gpu]) -> tuple[str, str]:
    """Return why torch cannot use the GPUs, and the fix; both empty when it can."""
    torch, driver_cuda = facts.torch, facts.driver.cuda
    capabilities = [gpu.capability for gpu in gpus]
    command = torch_command(torch, driver_cuda, capabilities)
    oldest = dotted(_oldest_driver(torch, capabilities))
    newer_driver = f"update the NVIDIA driver to one for CUDA {oldest} or newer"
    if torch.toolkit is None:
        built = f"torch {torch.version} is built without CUDA" if torch.version else "no torch"
        return built, f"run `{command}`" if command else newer_driver
    # Within a major version, CUDA programs run on older drivers; across majors they do not.
    if int(torch.toolkit.partition(".")[0]) > driver_cuda[0]:
        fault = (
            f"torch {torch.version} is built with CUDA {torch.toolkit}, "
            f"and the driver runs at most {dotted(driver_cuda)}"
        )
        return fault, f"update the NVIDIA driver, or run `{command}`" if command else newer_driver
    unfit = without_kernels(facts.architectures, capabilities)
    if not unfit:
        return "", ""
    fault = (
        f"torch {torch.version} is built for {', '.join(facts.architectures)}, not for "
        f"compute capability {capability_words([capabilities[number] for number in unfit])}"
    )
    return fault, _other_kernels(torch, gpus, unfit, command, newer_driver)


def _other_kernels(
    torch: TorchBuild, gpus: Sequence[Gpu], unfit: Sequence[int], command: str, newer: str
) -> str:
    """Return what to do about GPUs that the build has no kernels for.

    Args:
        torch: Installed build of torch.
        gpus: All visible GPUs.
        unfit: Indices of GPUs without kernels.
        command: Command that installs a build for all GPUs and this driver; empty if none exists.
        newer: Advice to update the driver, for a build for all GPUs.
    """
    fit = [gpu.uuid for number, gpu in enumerate(gpus) if number not in unfit]
    if fit:
        names = ", ".join(sorted({gpus[number].name for number in unfit}))
        return f"hide {names}: `export {VISIBLE}={','.join(fit)}`"
    if command:
        return f"run `{command}`"
    if _fitting_builds(torch, [gpu.capability for gpu in gpus]):
        return newer
    return "build torch from source for it: no build of PyTorch has kernels for these GPUs"


def without_kernels(architectures: Sequence[str], capabilities: Sequence[Capability]) -> list[int]:
    """Return indices of the GPUs that a build has no kernels for; unknown GPUs are left out."""
    if not architectures:
        return []
    return [
        number
        for number, capability in enumerate(capabilities)
        if capability != (0, 0) and not runs_on(capability, architectures)
    ]


def _fitting_builds(torch: TorchBuild, capabilities: Sequence[Capability]) -> list[_Build]:
    """Return PyTorch's builds of the installed release that have kernels for all GPUs.

    If the installed torch is not a release, the builds of the newest one are returned.
    """
    numbers = torch.release.split(".")[:2] if _is_release(torch.release) else ()
    release = (int(numbers[0]), int(numbers[1])) if len(numbers) > 1 else _NEWEST
    return [
        build
        for build in _BUILDS
        if build.first <= release <= build.last
        and not without_kernels(PYTORCH_BUILDS[build.name], capabilities)
    ]


def _oldest_driver(torch: TorchBuild, capabilities: Sequence[Capability]) -> tuple[int, int]:
    """Return the lowest CUDA version of a driver with which one of PyTorch's builds works."""
    fitting = _fitting_builds(torch, capabilities) or _BUILDS
    return min(build.driver_cuda for build in fitting)


def torch_command(
    torch: TorchBuild, driver_cuda: tuple[int, int], capabilities: Sequence[Capability] = ()
) -> str:
    """Return the command that installs a torch for this driver, from PyTorch's own index.

    It keeps the release that is installed, if the index can have it.  Empty where PyTorch has no
    build for a driver so old, or for the GPUs.

    Args:
        torch: Installed build of torch.
        driver_cuda: Highest CUDA version of the driver.
        capabilities: Compute capabilities of the GPUs.
    """
    for build in _fitting_builds(torch, capabilities):
        if driver_cuda >= build.driver_cuda:
            wanted = f"torch=={torch.release}" if _is_release(torch.release) else "torch"
            index = f"https://download.pytorch.org/whl/{build.name}"
            return f"pip install --force-reinstall '{wanted}' --index-url {index}"
    return ""


def _is_release(version: str) -> bool:
    """Return True for a published version, not a nightly one or a vendor's own."""
    return re.fullmatch(r"\d+(\.\d+)*", version) is not None


def dotted(version: tuple[int, int]) -> str:
    """Return a version as text."""
    return f"{version[0]}.{version[1]}"
