"""Policies of a run, which plugins offer, chosen and verified on the device."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError
from lmcore.contract.recompute import Placement
from lmcore.plugin import (
    AUTO,
    checkpoint_stagers,
    choose_precision,
    choose_recompute,
    choose_stager,
    fastest_precision,
    precision_policies,
    recompute_policies,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcore.config.section import Config
    from lmcore.contract.device import Device
    from lmcore.contract.precision.policy import PrecisionPolicy
    from lmcore.contract.recompute import RecomputePolicy
    from lmcore.contract.transfer.staging import CheckpointStager
    from lmcore.plugin import PluginSet, Selection
    from lmcore.runtime.process.rendezvous import Rendezvous

__all__ = ["Policies", "start_policies"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Policies:
    """Chosen policies.

    Attributes:
        precision: Precision policy.
        recompute: Recompute policy.
        placement: Layers that the recompute policy applies to.
        stager: Stager that copies tensors to the host before they are saved.
    """

    precision: PrecisionPolicy
    recompute: RecomputePolicy
    placement: Placement
    stager: CheckpointStager


def start_policies(
    config: Config,
    plugins: PluginSet,
    selection: Selection,
    device: Device,
    rendezvous: Rendezvous | None = None,
) -> Policies:
    """Choose the policies that the configuration names and verify them on the device.

    Args:
        config: Settings of the run.
        plugins: Plugins that the launcher found.
        selection: The launcher's decision.
        device: The device.
        rendezvous: Connection of the processes; None if this is the only one.

    Raises:
        ConfigError: The device does not offer a policy, or it cannot be combined with another
            option.
        DeviceError: A policy is not applied.
        PluginError: Two plugins offer the same policy.
    """
    section = config.accelerator
    offered = precision_policies(plugins, selection, device)
    named = section.precision
    if named == AUTO:
        named = _measured(offered, device, rendezvous)
    precision = choose_precision(offered, named)
    precision.verify(device)
    if section.loss_scale and not precision.loss_scaling:
        raise ConfigError(
            f"`--loss-scale {section.loss_scale:g}` cannot be combined with precision "
            f"`{precision.name}`",
            why="its gradients do not underflow: there is nothing to scale",
            hint="leave `--loss-scale` out, or use a precision that needs it, such as `fp16`",
        )
    recompute = choose_recompute(recompute_policies(plugins, selection, device), section.recompute)
    placed = section.recompute_method is not None or section.recompute_num_layers != 1
    if placed and recompute.block is None:
        flag = "--recompute-method" if section.recompute_method else "--recompute-num-layers"
        raise ConfigError(
            f"`{flag}` cannot be combined with `--recompute {recompute.name}`",
            why="it says which whole layers are recomputed, and this policy recomputes none",
            hint="use `--recompute full`, or leave it out",
        )
    recompute.verify(device)
    return Policies(
        precision,
        recompute,
        Placement(section.recompute_method or "uniform", section.recompute_num_layers),
        choose_stager(
            checkpoint_stagers(plugins, selection, device), copies=config.checkpoint.async_save
        ),
    )


def _measured(
    offered: Sequence[PrecisionPolicy], device: Device, rendezvous: Rendezvous | None
) -> str:
    """Return the name of the fastest precision, which rank 0 measures for all ranks."""
    chosen, why = "", ""
    if rendezvous is None or rendezvous.rank.rank == 0:
        policy, why = fastest_precision(offered, device)
        chosen = policy.name
        logger.info("precision %s: %s", chosen, why)
    if rendezvous is not None:
        chosen = rendezvous.gather(chosen, "the precision that is fastest")[0]
    return chosen
