"""What `lmcore doctor` checks of the GPUs; runs in a process of its own."""

from __future__ import annotations

from lmcore.accelerator import Check, CheckStatus, Probe, ProbeState
from lmcore_cuda.facts import Facts, read_facts

__all__ = ["checks"]


def checks(probe: Probe) -> list[Check]:
    """Return a check each for driver and torch's build, and for a product on a present GPU."""
    facts = read_facts()
    found = [_driver(facts, probe), _build(facts, probe)]
    if probe.state is ProbeState.PRESENT:
        return [*found, _product()]
    return [*found, Check("matrix product", CheckStatus.SKIPPED, f"the device is {probe.state}")]


def _driver(facts: Facts, probe: Probe) -> Check:
    driver = facts.driver
    if driver.library and not driver.status:
        detail = f"{driver.version}, {len(driver.gpus)} GPUs, CUDA up to "
        return Check("driver", CheckStatus.OK, detail + ".".join(str(one) for one in driver.cuda))
    status = CheckStatus.FAILED if probe.state is ProbeState.BROKEN else CheckStatus.SKIPPED
    return Check("driver", status, driver.message, probe.fix)


def _build(facts: Facts, probe: Probe) -> Check:
    torch = facts.torch
    if torch.toolkit is not None:
        return Check("torch build", CheckStatus.OK, f"torch {torch.version}, CUDA {torch.toolkit}")
    needed = bool(facts.driver.gpus) and probe.state is ProbeState.BROKEN
    status = CheckStatus.FAILED if needed else CheckStatus.SKIPPED
    return Check("torch build", status, f"torch {torch.version} is built without CUDA", probe.fix)


def _product() -> Check:
    import torch

    from lmcore_cuda.device import create_device

    device = create_device()
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(129, 65, generator=generator)
    right = torch.randn(65, 33, generator=generator)
    product = (left.to(device.torch_device) @ right.to(device.torch_device)).cpu()
    error = (product.double() - left.double() @ right.double()).abs().max().item()
    status = CheckStatus.OK if error < 1e-2 else CheckStatus.FAILED
    return Check("matrix product", status, f"{device.name}: error against float64 {error:.1e}")
