"""`Runtime`: the device of a process, its policies and kernels, passed to the rest of a run."""

from __future__ import annotations

import contextlib
import functools
import json
import platform
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import ConfigError, LmcoreError
from lmcore.contract.op.records import OpContext, parse_preferences
from lmcore.plugin import build_op_table, create_device, validate_config
from lmcore.runtime.device_start import start_device
from lmcore.runtime.policies import start_policies

if TYPE_CHECKING:
    from lmcore.config.section import Config
    from lmcore.contract.communication import CommBackend
    from lmcore.contract.device import Device
    from lmcore.contract.op.table import OpTable
    from lmcore.contract.precision.policy import PrecisionPolicy
    from lmcore.contract.recompute import Placement, RecomputePolicy
    from lmcore.contract.rng import RngTracker
    from lmcore.contract.transfer.staging import CheckpointStager
    from lmcore.plugin import PluginSet, Selection
    from lmcore.runtime.launch.rank import RankInfo
    from lmcore.runtime.process.group import Processes
    from lmcore.runtime.process.rendezvous import Rendezvous

__all__ = [
    "Runtime",
    "connect_processes",
    "deterministic_algorithms",
    "start_runtime",
    "subnormals_flushed",
]


@dataclass(frozen=True)
class Runtime:
    """Device, policies and kernels of a process.

    Attributes:
        rank: Rank of this process.
        selection: Chosen plugin, with the evidence for it.
        device: Device of this process.
        rng: Random-number streams of the device.
        precision: Precision policy; verified to be in force.
        recompute: Recompute policy; verified to be exact.
        placement: Layers that the recompute policy applies to.
        stager: Stager that copies tensors to the host before they are saved.
        ops: Op table; kernels are bound when the model is built.
        processes: Connected processes of the run; None if this is the only one.
    """

    rank: RankInfo
    selection: Selection
    device: Device
    rng: RngTracker
    precision: PrecisionPolicy
    recompute: RecomputePolicy
    placement: Placement
    stager: CheckpointStager
    ops: OpTable
    processes: Processes | None = None

    @functools.cached_property
    def hosts(self) -> list[str]:
        """Host name of each rank; all ranks must use it at the same time."""
        own = socket.gethostname()
        return self.processes.gather(own, "the names of hosts") if self.processes else [own]

    def bind_for_weights(self, op: str) -> Callable[..., Any]:
        """Return the kernel of an op on weights or gradients, of the dtype that is kept.

        Args:
            op: Name of the op, such as "grad_norm" or "adamw".
        """
        return self.ops.bind(op, OpContext(self.device.type, self.precision.keep))

    def environment(self) -> dict[str, Any]:
        """Return versions and facts for `environment.json`."""
        import torch

        return {
            "lmcore": metadata.version("lmcore"),
            "python": sys.version.split()[0],
            "platform": platform.platform(),
            "torch": torch.__version__,
            "num_threads": torch.get_num_threads(),
            "selection": json.loads(self.selection.to_json()),
            "device": self.device.describe(),
            "precision": self.precision.describe(),
            "recompute": self.recompute.describe(),
            "checkpoint_stager": _named(self.stager),
            "rank": self.rank.to_dict(),
            "comm_backend": _named(self.processes.backend) if self.processes else None,
        }


def _named(offer: CheckpointStager | CommBackend) -> dict[str, str]:
    return {"name": offer.name, "plugin": offer.plugin}


@contextlib.contextmanager
def connect_processes(
    config: Config, rank: RankInfo, subject: str, values: Any, *, hint: str | None = None
) -> Iterator[Rendezvous | None]:
    """Connect the processes of a run and compare their settings; yield None for a single process.

    Args:
        config: Configuration, with the time limit of the connection and of every exchange.
        rank: Rank of this process.
        subject: Name of the settings for messages.
        values: Settings of this process, as a JSON value.
        hint: Hint for a difference.

    Raises:
        ConfigError: The address of the processes is missing or wrong.
        RunError: The settings differ, or other processes cannot be reached.
    """
    if rank.world_size == 1:
        yield None
        return
    from lmcore.runtime.process.consistency import check_equal
    from lmcore.runtime.process.join import join_processes

    timeout = config.parallel.distributed_timeout_minutes * 60
    with join_processes(rank, timeout=timeout) as rendezvous:
        check_equal(rendezvous, subject, values, hint=hint)
        yield rendezvous


@contextlib.contextmanager
def start_runtime(
    config: Config,
    plugins: PluginSet,
    selection: Selection,
    rank: RankInfo,
    rendezvous: Rendezvous | None = None,
) -> Iterator[Runtime]:
    """Create the device and everything that depends on it; torch is imported here.

    Processes of a run compare device and software first, and are connected at the end.

    Args:
        config: Settings of the run.
        plugins: Plugins that the launcher found.
        selection: The launcher's decision.
        rank: Rank of this process.
        rendezvous: Connection of the processes; None if this is the only one.

    Raises:
        ConfigError: The device cannot run the configuration; with all problems.
        DeviceError: A policy is not applied, or random numbers are not restored; the device has
            no communication backend, or not all ranks have it.
        PluginError: The plugin broke its contract, or a function of its device raised.
        RunError: The processes differ, or a process stopped.
    """
    import torch

    if rendezvous is not None:
        from lmcore.runtime.process.consistency import check_device, check_versions

        check_device(rendezvous, selection, plugins)
        check_versions(rendezvous, selection, plugins)

    section = config.accelerator
    if section.num_threads is not None:
        torch.set_num_threads(section.num_threads)
    with contextlib.ExitStack() as stack:
        # First: the threads that torch starts later have the setting of their starter.
        stack.enter_context(subnormals_flushed(wanted=section.flush_subnormals))
        device = create_device(plugins, selection, config)
        start_device(device, selection)
        _require_valid(config, plugins, selection, device)
        rng = device.rng_tracker()
        rng.verify()
        policies = start_policies(config, plugins, selection, device, rendezvous)
        stack.enter_context(deterministic_algorithms(wanted=section.deterministic))
        processes = None
        if rendezvous is not None:  # one process needs no backend, also if the settings name one
            from lmcore.runtime.process.group import start_processes

            backend = config.parallel.distributed_backend
            timeout = config.parallel.distributed_timeout_minutes * 60
            processes = stack.enter_context(
                start_processes(
                    plugins, selection, device, rendezvous, timeout=timeout, wanted=backend
                )
            )
        yield Runtime(
            rank=rank,
            selection=selection,
            device=device,
            rng=rng,
            precision=policies.precision,
            recompute=policies.recompute,
            placement=policies.placement,
            stager=policies.stager,
            ops=build_op_table(
                plugins,
                selection,
                device,
                preferences=parse_preferences(section.ops),
                strict=section.strict_ops,
                deterministic=section.deterministic,
            ),
            processes=processes,
        )


def _require_valid(
    config: Config, plugins: PluginSet, selection: Selection, device: Device
) -> None:
    """Raise a `ConfigError` with all problems that the device has with the settings."""
    problems = [
        LmcoreError(problem.what, why=problem.why, hint=problem.hint)
        for problem in validate_config(plugins, selection, device, config)
    ]
    if problems:
        raise ConfigError.collect(problems)


@contextlib.contextmanager
def subnormals_flushed(*, wanted: bool = True) -> Iterator[None]:
    """Compute with zero in place of subnormal numbers within the context, in the calling thread.

    So do the threads that it starts meanwhile, and keep on doing so.  Processors that cannot do
    this compute with the numbers as they are.

    Args:
        wanted: False to change nothing.
    """
    import torch

    flushes = wanted and torch.set_flush_denormal(True)
    try:
        yield
    finally:
        if flushes:
            torch.set_flush_denormal(False)


@contextlib.contextmanager
def deterministic_algorithms(*, wanted: bool = True) -> Iterator[None]:
    """Make torch choose deterministic algorithms, and refuse others, within the context.

    Args:
        wanted: False to change nothing.
    """
    import torch

    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=before)
