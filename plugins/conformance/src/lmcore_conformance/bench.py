"""`Bench`: the plugin's device and offers for checks, created once in the process of a group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from lmcore.plugin import (
    PluginSet,
    Selection,
    checkpoint_stagers,
    comm_backends,
    create_device,
    discover,
    op_impls,
    precision_policies,
    recompute_policies,
    verify,
)
from lmcore.plugin.registrations import plugin_sections
from lmcore.plugin.selection import HANDED_DOWN

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lmcore.accelerator import (
        CheckpointStager,
        CommBackend,
        Device,
        OpImpl,
        PrecisionPolicy,
        RecomputePolicy,
    )
    from lmcore.config.section import Config

__all__ = ["Bench"]


class Bench:
    """A process with the plugin's device, as a worker of a run has it.

    Attributes:
        closed: requirements that the plugin's author declares as missing.
        flags: flags of the run that the process represents.
    """

    def __init__(self, closed: Sequence[str] = (), flags: Sequence[str] = ()) -> None:
        """Create a bench without a device."""
        self.closed = tuple(closed)
        self.flags = tuple(flags)

    @cached_property
    def plugins(self) -> PluginSet:
        """The plugin under test, and the CPU's."""
        return discover()

    @cached_property
    def selection(self) -> Selection:
        """The launcher's decision."""
        return Selection.from_json(os.environ[HANDED_DOWN])

    @cached_property
    def config(self) -> Config:
        """The settings of a run with these flags alone."""
        from lmcore.config.load import load_config

        return load_config(list(self.flags), plugins=plugin_sections(self.plugins)).config

    @cached_property
    def device(self) -> Device:
        """The device, created and made the current one."""
        verify(self.selection, self.plugins)
        device = create_device(self.plugins, self.selection, self.config)
        device.set_current()
        return device

    @property
    def where(self) -> torch.device:
        """The device as torch calls it."""
        return self.device.torch_device

    @property
    def is_host(self) -> bool:
        """True if the device is the host itself."""
        return self.device.type == "cpu"

    @cached_property
    def kernels(self) -> tuple[OpImpl, ...]:
        """The kernels that the plugin offers."""
        return op_impls(self.plugins, self.selection, self.device)

    @cached_property
    def precision_policies(self) -> tuple[PrecisionPolicy, ...]:
        """The precisions that the plugin offers."""
        return precision_policies(self.plugins, self.selection, self.device)

    @cached_property
    def recompute_policies(self) -> tuple[RecomputePolicy, ...]:
        """The recompute policies that the plugin offers."""
        return recompute_policies(self.plugins, self.selection, self.device)

    @cached_property
    def stagers(self) -> tuple[CheckpointStager, ...]:
        """The ways to bring tensors to the host that the plugin offers."""
        return checkpoint_stagers(self.plugins, self.selection, self.device)

    @cached_property
    def backends(self) -> tuple[CommBackend, ...]:
        """The communication backends that the plugin offers."""
        return comm_backends(self.plugins, self.selection, self.device)

    def values(self, *shape: int, seed: int = 0) -> Tensor:
        """Return normal random numbers in float64 on the host, the same on every machine."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def host(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the host, in float64, once the device is done with it."""
        import torch

        self.device.synchronize()
        return tensor.detach().to("cpu").to(torch.float64)
