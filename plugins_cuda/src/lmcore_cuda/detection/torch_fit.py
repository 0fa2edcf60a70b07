"""Check of the installed torch against driver and GPUs, and the command for one that fits."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lmcore.accelerator import TorchBuild
from lmcore_cuda.detection.architectures import PYTORCH_BUILDS, capability_words, runs_on
from lmcore_cuda.detection.facts import Facts
from lmcore_cuda.detection.visible import VISIBLE
from lmcore_cuda.driver.nvml import Gpu

__all__ = ["dotted", "torch_command", "torch_fault", "without_kernels"]

Capability = tuple[int, int]

_WHEELS: tuple[tuple[tuple[int, int], str], ...] = (((13, 0), "cu130"), ((12, 6), "cu126"))
"""PyTorch's builds by the CUDA version that the driver must be able to run, newest first."""


def torch_fault(facts: Facts, gpus: Sequence[Gpu]) -> tuple[str, str]:
    """Return why torch cannot use the GPUs, and the fix; both empty when it can."""
    torch, driver_cuda = facts.torch, facts.driver.cuda
    capabilities = [gpu.capability for gpu in gpus]
    command = torch_command(torch, driver_cuda, capabilities)
    oldest = dotted(_oldest_driver(capabilities))
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
    return fault, _other_kernels(gpus, unfit, command, newer_driver)


def _other_kernels(gpus: Sequence[Gpu], unfit: Sequence[int], command: str, newer: str) -> str:
    """Return what to do about GPUs that the build has no kernels for.

    Args:
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
    if any(_has_build([gpu.capability for gpu in gpus])):
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


def _has_build(capabilities: Sequence[Capability]) -> list[bool]:
    """Return, for each of PyTorch's builds, newest first, True if it has kernels for all GPUs."""
    return [not without_kernels(PYTORCH_BUILDS[name], capabilities) for _, name in _WHEELS]


def _oldest_driver(capabilities: Sequence[Capability]) -> tuple[int, int]:
    """Return the lowest CUDA version of a driver with which one of PyTorch's builds works."""
    fits = zip(_WHEELS, _has_build(capabilities), strict=True)
    return min((needed for (needed, _), fit in fits if fit), default=_WHEELS[-1][0])


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
    for (needed, name), fits in zip(_WHEELS, _has_build(capabilities), strict=True):
        if fits and driver_cuda >= needed:
            wanted = f"torch=={torch.release}" if _is_release(torch.release) else "torch"
            index = f"https://download.pytorch.org/whl/{name}"
            return f"pip install --force-reinstall '{wanted}' --index-url {index}"
    return ""


def _is_release(version: str) -> bool:
    """Return True for a published version, not a nightly one or a vendor's own."""
    return re.fullmatch(r"\d+(\.\d+)*", version) is not None


def dotted(version: tuple[int, int]) -> str:
    """Return a version as text."""
    return f"{version[0]}.{version[1]}"
