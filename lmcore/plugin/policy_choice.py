"""Choice of a run's policies: the user's, or the device's default."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from lmcore.base.errors import ConfigError, DeviceError, LmcoreError, PluginError, suggestion
from lmcore.contract.precision.policy import PrecisionPolicy
from lmcore.contract.recompute import RecomputePolicy
from lmcore.contract.transfer.staging import CheckpointStager, host_copy_stager

if TYPE_CHECKING:
    from lmcore.contract.device import Device

__all__ = [
    "AUTO",
    "choose_precision",
    "choose_recompute",
    "choose_stager",
    "fastest_precision",
]

AUTO = "auto"
"""Value of `--precision` that leaves the choice to the device's measured products."""
_LEAST_GAIN = 1.25
"""Least ratio of the products' speeds: a step has parts that gain nothing."""

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


def fastest_precision(
    policies: Iterable[PrecisionPolicy], device: Device
) -> tuple[PrecisionPolicy, str]:
    """Return the policy that `--precision auto` takes, and the reason.

    It is the device's default, or bfloat16 if its products are 1.25 times as fast as the default's
    by the device's peak, and weights are kept as by the default.

    Raises:
        DeviceError: The device can run no policy.
        PluginError: Two have the highest priority.
    """
    offered = [*policies]
    default = choose_precision(offered, None)
    if device.peak_flops is None:
        unknown = device.missing.get("peak_flops", "the device does not tell its peak")
        return default, f"the device's default, since {unknown}"
    usual = device.peak_flops(default.compute) or 0.0
    for policy in offered:
        other = policy.compute == "bfloat16" != default.compute and policy.keep == default.keep
        if not other or policy.loss_scaling or _unavailable(policy) is not None:
            continue
        rate = device.peak_flops(policy.compute) or 0.0
        if usual > 0 and rate >= _LEAST_GAIN * usual:
            gain = f"{rate / usual:.1f} times as fast as those in {default.compute}"
            return policy, f"products in bfloat16 are {gain} here"
    return default, "the device's default: bfloat16 has no faster products here"


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
        hint=suggestion(name, able + [AUTO] * (option == "precision")) if able else None,
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
