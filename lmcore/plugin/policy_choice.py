"""Choice of a run's policies: the user's, or the device's default."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from lmcore.base.errors import ConfigError, DeviceError, LmcoreError, PluginError, suggestion
from lmcore.contract.precision.policy import PrecisionPolicy
from lmcore.contract.recompute import RecomputePolicy
from lmcore.contract.transfer.staging import CheckpointStager, host_copy_stager

__all__ = ["choose_precision", "choose_recompute", "choose_stager"]

Policy = TypeVar("Policy", PrecisionPolicy, RecomputePolicy)
Ranked = TypeVar("Ranked", PrecisionPolicy, CheckpointStager)


def choose_precision(policies: Iterable[PrecisionPolicy], name: str | None) -> PrecisionPolicy:
    """Return the policy that `--precision` names; by default the one of the highest priority.

    Raises:
        ConfigError: The device does not offer it, or says why it cannot run it.
        DeviceError: Nothing is named, and the device can run none.
        PluginError: Nothing is named, and two have the highest priority.
    """
    offered = list(policies)
    if name is not None:
        return _named(offered, "precision", name)
    return _highest(offered, "precision policies", "name one with `--precision`")


def choose_recompute(policies: Iterable[RecomputePolicy], name: str) -> RecomputePolicy:
    """Return the policy that `--recompute` names.

    Raises:
        ConfigError: The device does not offer it, or says why it cannot run it.
    """
    return _named(list(policies), "recompute", name)


def choose_stager(stagers: Iterable[CheckpointStager], *, copies: bool) -> CheckpointStager:
    """Return the available stager of the highest priority; the core's own copies to the host.

    Args:
        stagers: stagers that the plugins offer.
        copies: True if training continues while the staged tensors are written.

    Raises:
        PluginError: Two have the highest priority.
    """
    fit = [one for one in stagers if one.copies or not copies]
    if all(_unavailable(one) for one in fit):
        return host_copy_stager()
    return _highest(fit, "checkpoint stagers", "remove one of the plugins that offer them")


def _named(policies: Sequence[Policy], option: str, name: str) -> Policy:
    able = sorted(one.name for one in policies if _unavailable(one) is None)
    for policy in policies:
        if policy.name == name:
            reason = _unavailable(policy)
            if reason is None:
                return policy
            others = ", ".join(f"`{other}`" for other in able)
            raise ConfigError(
                f"`--{option} {name}`: the device cannot run it",
                why=reason,
                hint=f"it can run {others}" if others else None,
            )
    raise ConfigError(
        f"`--{option} {name}`: the device does not offer it",
        why=_reasons(policies) or None,
        hint=suggestion(name, able) if able else None,
    )


def _highest(offered: Sequence[Ranked], kind: str, hint: str) -> Ranked:
    able = [one for one in offered if _unavailable(one) is None]
    if not able:
        raise DeviceError(
            f"the device can use none of its {kind}",
            why=_reasons(offered) or "its plugin offers none",
            hint="report this to the authors of its plugin",
        )
    top = max(one.priority for one in able)
    best = [one for one in able if one.priority == top]
    if len(best) > 1:
        names = " and ".join(f"`{one.name}`" for one in best)
        raise PluginError(f"{kind} {names} have the same priority, {top}", hint=hint)
    return best[0]


def _reasons(offered: Sequence[PrecisionPolicy | RecomputePolicy | CheckpointStager]) -> str:
    """Return a line for each reason, with the names of the policies that it applies to."""
    names: dict[str, list[str]] = {}
    for one in offered:
        reason = _unavailable(one)
        if reason is not None:
            names.setdefault(reason, []).append(f"`{one.name}`")
    return "\n".join(f"{', '.join(affected)}: {reason}" for reason, affected in names.items())


def _unavailable(one: PrecisionPolicy | RecomputePolicy | CheckpointStager) -> str | None:
    try:
        return one.available()
    except LmcoreError as error:
        return error.what
