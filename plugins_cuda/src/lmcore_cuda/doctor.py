"""What `lmcore doctor` checks of the GPUs; runs in a process of its own."""

from __future__ import annotations

from lmcore.accelerator import Check, CheckStatus, Probe, ProbeState
from lmcore_cuda.facts import Facts, read_facts

__all__ = ["checks"]


def checks(probe: Probe) -> list[Check]:
    """Return a check each for driver and torch's build; the core tries the GPU itself."""
    facts = read_facts()
    return [_driver(facts, probe), _build(facts, probe)]


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
    built = f"torch {torch.version} is built without CUDA" if torch.version else "no torch"
    return Check("torch build", status, built, probe.fix)
