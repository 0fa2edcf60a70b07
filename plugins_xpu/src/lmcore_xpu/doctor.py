"""What `lmcore doctor` checks of Intel GPUs; runs in a process of its own."""

from __future__ import annotations

from lmcore.accelerator import Check, CheckStatus, Probe, ProbeState
from lmcore_xpu.facts import LOADER, RUNTIME, Facts, read_facts

__all__ = ["checks"]


def checks(probe: Probe) -> list[Check]:
    """Return checks of nodes, libraries and torch's build; the core tries the GPU itself."""
    facts = read_facts()
    return [_nodes(facts, probe), _libraries(facts, probe), _build(facts, probe)]


def _missing(probe: Probe) -> CheckStatus:
    """Return how bad it is that something is missing: nothing where there is no GPU."""
    broken = probe.state is ProbeState.BROKEN
    return CheckStatus.FAILED if broken else CheckStatus.SKIPPED


def _nodes(facts: Facts, probe: Probe) -> Check:
    if not facts.gpus:
        return Check("device nodes", CheckStatus.SKIPPED, "no Intel GPU on the PCI bus")
    usable = [one for one in facts.gpus if one.access]
    detail = f"{len(usable)} of {len(facts.gpus)} GPUs can be opened by this user"
    if usable:
        return Check("device nodes", CheckStatus.OK, detail)
    return Check("device nodes", _missing(probe), detail, probe.fix)


def _libraries(facts: Facts, probe: Probe) -> Check:
    there = {LOADER: facts.loader, RUNTIME: facts.runtime}
    detail = ", ".join(f"{name} {'found' if found else 'missing'}" for name, found in there.items())
    if all(there.values()):
        return Check("level zero", CheckStatus.OK, detail)
    return Check("level zero", _missing(probe), detail, probe.fix)


def _build(facts: Facts, probe: Probe) -> Check:
    torch = facts.torch
    if torch.toolkit is not None:
        return Check("torch build", CheckStatus.OK, f"torch {torch.version}, XPU {torch.toolkit}")
    built = f"torch {torch.version} is built without XPU" if torch.version else "no torch"
    return Check("torch build", _missing(probe), built, probe.fix)
