"""GPUs that `CUDA_VISIBLE_DEVICES` leaves visible, by CUDA's rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lmcore_cuda.driver.nvml import Gpu

__all__ = ["VISIBLE", "Visible", "visible_gpus"]

VISIBLE = "CUDA_VISIBLE_DEVICES"

_NONE = {"", "-1", "none", "void", "nodevfiles"}
"""Values that hide every GPU on purpose: empty, no index, and the words of container runtimes
and of Slurm."""


@dataclass(frozen=True)
class Visible:
    """GPUs that a process sees.

    Attributes:
        gpus: GPUs in CUDA's order; for a part (MIG), the GPU that has it.
        evidence: Effect of the variable, if any.
        hidden: True if all GPUs are hidden on purpose.
        fault: Reason why no GPU is visible, if that is a mistake.
        fix: Advice for that case.
    """

    gpus: tuple[Gpu, ...] = ()
    evidence: str = ""
    hidden: bool = False
    fault: str = ""
    fix: str = ""


def visible_gpus(gpus: Sequence[Gpu], env: Mapping[str, str]) -> Visible:
    """Return the GPUs that CUDA would show a process with the environment *env*.

    As CUDA does: entries are indices or beginnings of a UUID; the first that fits no GPU ends the
    list, and one named twice empties it.  A process sees one part (MIG) at most, and no whole GPU
    beside it.

    Args:
        gpus: All GPUs that the driver lists.
        env: Environment of the process.
    """
    if VISIBLE not in env:
        return _with_parts(gpus)
    setting = f"{VISIBLE}={env[VISIBLE]}"
    entries = [part.strip() for part in env[VISIBLE].split(",")]
    if entries[0].lower() in _NONE:
        return Visible(evidence=f"`{setting}` hides {_all(gpus)}", hidden=True)
    found: list[Gpu] = []
    for entry in entries:
        if entry.startswith("MIG-"):
            return _one_part(gpus, found, entry, setting)
        match = [gpu for gpu in gpus if entry == str(gpu.index) or _begins(gpu.uuid, entry)]
        if len(match) != 1:
            return _cut(gpus, found, entry, setting)
        if match[0] in found:
            return Visible(
                fault=f"`{setting}` names GPU {match[0].index} twice: CUDA shows none then",
                fix=f"name each GPU once in `{VISIBLE}`, or unset it",
            )
        found += match
    seen = _with_parts(found)
    left = f"`{setting}` leaves {len(found)} of {len(gpus)}"
    evidence = "; ".join(filter(None, (left, seen.evidence)))
    return Visible(seen.gpus, evidence, fault=seen.fault, fix=seen.fix)


def _all(gpus: Sequence[Gpu]) -> str:
    return "the only GPU" if len(gpus) == 1 else f"all {len(gpus)} GPUs"


def _with_parts(gpus: Sequence[Gpu]) -> Visible:
    """Return the GPUs that a process sees if some are in parts (MIG)."""
    parted = next((gpu for gpu in gpus if gpu.parts), None)
    if parted is not None:
        message = f"GPU {parted.index} is in parts (MIG): a process sees the first of them alone"
        return Visible((parted,), message)
    unpartitioned = tuple(gpu for gpu in gpus if not gpu.mig)
    if gpus and not unpartitioned:
        return Visible(
            fault="the GPUs are in MIG mode, and no part (MIG instance) has been created",
            fix="create one (`sudo nvidia-smi mig -cgi 0 -C`), or use the GPU whole "
            "(`sudo nvidia-smi -mig 0`)",
        )
    if len(unpartitioned) < len(gpus):
        return Visible(
            unpartitioned, f"{len(gpus) - len(unpartitioned)} in MIG mode without a part"
        )
    return Visible(unpartitioned)


def _cut(gpus: Sequence[Gpu], found: Sequence[Gpu], entry: str, setting: str) -> Visible:
    """Return the GPUs before an entry that matches no GPU, or several."""
    ambiguous = entry.startswith("GPU-") and any(gpu.uuid.startswith(entry) for gpu in gpus)
    wrong = f"`{entry}` {'is the beginning of several UUIDs' if ambiguous else 'is no GPU here'}"
    if found:
        message = f"`{setting}` leaves {len(found)} of {len(gpus)}: {wrong}, and CUDA stops there"
        return Visible(tuple(found), message)
    known = "0" if len(gpus) == 1 else f"0 to {len(gpus) - 1}"
    return Visible(
        fault=f"`{setting}` hides {_all(gpus)}: {wrong}",
        fix=f"set `{VISIBLE}` to numbers from {known}, or to UUIDs that `nvidia-smi -L` lists; or "
        "unset it",
    )


def _one_part(gpus: Sequence[Gpu], found: Sequence[Gpu], entry: str, setting: str) -> Visible:
    """Return the GPU that has a part, by the part's UUID or, of old drivers, by the GPU's in it."""
    owner = next((gpu for gpu in gpus if entry in gpu.parts or gpu.uuid in entry), None)
    if owner is None:
        return _cut(gpus, found, entry, setting)
    return Visible((owner,), f"`{setting}`: a part of GPU {owner.index} (MIG), one for a process")


def _begins(uuid: str, entry: str) -> bool:
    return entry.startswith("GPU-") and uuid.startswith(entry)
