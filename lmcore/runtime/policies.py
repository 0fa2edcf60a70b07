"""Policies of a run, which plugins offer, chosen and verified on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError
from lmcore.contract.recompute import Placement
from lmcore.plugin import (
    checkpoint_stagers,
    choose_precision,
    choose_recompute,
    choose_stager,
    precision_policies,
    recompute_policies,
)

if TYPE_CHECKING:
    from lmcore.config.section import Config
    from lmcore.contract.device import Device
    from lmcore.contract.precision.policy import PrecisionPolicy
    from lmcore.contract.recompute import RecomputePolicy
    from lmcore.contract.transfer.staging import CheckpointStager
    from lmcore.plugin import PluginSet, Selection

__all__ = ["Policies", "start_policies"]


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
    config: Config, plugins: PluginSet, selection: Selection, device: Device
) -> Policies:
    """Choose the policies that the configuration names and verify them on the device.

    Raises:
        ConfigError: The device does not offer a policy, or it cannot be combined with another
            option.
        DeviceError: A policy is not applied.
        PluginError: Two plugins offer the same policy.
    """
    section = config.accelerator
    precision = choose_precision(precision_policies(plugins, selection, device), section.precision)
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
