"""`Bench`: the device and the offers under test on it, created once in the process of a group."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lmcore.plugin import (
    PluginSet,
    Selection,
    checkpoint_stagers,
    choose_comm_backend,
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
from lmcore_conformance.op.run_shapes import RunShapes
from lmcore_conformance.target import shares_device

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lmcore.config.section import Config
    from lmcore.contract import (
        CheckpointStager,
        CommBackend,
        Device,
        OpImpl,
        PrecisionPolicy,
        RecomputePolicy,
    )

__all__ = ["Bench"]


class Bench:
    """A process with the plugin's device, as a worker of a run has it.

    Attributes:
        closed: requirements that the plugin's author declares as missing.
        flags: flags of the run that the process represents.
        subject: name of the plugin without a device whose offers alone are tried; empty: the
            offers of all plugins that take part.
        shapes: Shapes of the configuration of `--shapes-of`; None: none is named.
        patience: Factor on time limits, for a slow device.
    """

    def __init__(
        self,
        closed: Sequence[str] = (),
        flags: Sequence[str] = (),
        subject: str = "",
        shapes: Mapping[str, Any] | None = None,
        patience: float = 1.0,
    ) -> None:
        """Create a bench without a device."""
        self.patience = patience
        self.shapes = None if shapes is None else RunShapes.from_dict(shapes)
        self.closed = tuple(closed)
        self.flags = tuple(flags)
        self.subject = subject

    @cached_property
    def plugins(self) -> PluginSet:
        """The plugins under test, and the CPU's."""
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
    def torch_device(self) -> torch.device:
        """The device as a `torch.device`."""
        return self.device.torch_device

    @property
    def is_host(self) -> bool:
        """True if the device is the host itself."""
        return self.device.type == "cpu"

    @property
    def is_lazy(self) -> bool:
        """True if the device records work, and `step_boundary` runs it."""
        return self.device.step_boundary is not type(self.device).step_boundary

    @property
    def is_shared(self) -> bool:
        """True if several processes can use one device at once."""
        return shares_device(self.selection)

    @cached_property
    def kernels(self) -> tuple[OpImpl, ...]:
        """The kernels under test."""
        return self._under_test(op_impls)

    @cached_property
    def precision_policies(self) -> tuple[PrecisionPolicy, ...]:
        """The precisions under test."""
        return self._under_test(precision_policies)

    @cached_property
    def all_precision_policies(self) -> tuple[PrecisionPolicy, ...]:
        """The precisions that a run chooses from."""
        return precision_policies(self.plugins, self.selection, self.device)

    @cached_property
    def recompute_policies(self) -> tuple[RecomputePolicy, ...]:
        """The recompute policies under test."""
        return self._under_test(recompute_policies)

    @cached_property
    def stagers(self) -> tuple[CheckpointStager, ...]:
        """The checkpoint stagers under test."""
        return self.new_stagers()

    def new_stagers(self) -> tuple[CheckpointStager, ...]:
        """Return the checkpoint stagers under test as a run gets them: they have copied nothing."""
        return self._under_test(checkpoint_stagers)

    @cached_property
    def backends(self) -> tuple[CommBackend, ...]:
        """The communication backends under test."""
        return self._under_test(comm_backends)

    @property
    def wanted_backend(self) -> str | None:
        """Name of the backend that processes must use; None: the one that a run uses."""
        if not self.subject:
            return None
        own = [offer for offer in self.backends if offer.device_type == self.device.type]
        return choose_comm_backend(own).name

    def _under_test(self, collect: Callable[..., tuple[Any, ...]]) -> tuple[Any, ...]:
        offers = collect(self.plugins, self.selection, self.device)
        return tuple(offer for offer in offers if self.subject in {"", offer.plugin})

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
