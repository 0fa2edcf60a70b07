"""`Runtime`: the device, its policies and kernels, as the rest of a run gets them passed."""

from __future__ import annotations

import contextlib
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from lmcore.accelerator.op.records import parse_preferences
from lmcore.errors import ConfigError, LmcoreError
from lmcore.plugin import (
    build_op_table,
    create_device,
    validate_config,
)
from lmcore.runtime.policies import start_policies
from lmcore.runtime.process.consistency import agree_on_device, agree_on_versions
from lmcore.runtime.process.group import Processes, backend_of, start_processes

if TYPE_CHECKING:
    from lmcore.accelerator.device import Device
    from lmcore.accelerator.op.table import OpTable
    from lmcore.accelerator.precision import PrecisionPolicy
    from lmcore.accelerator.recompute import Placement, RecomputePolicy
    from lmcore.accelerator.rng import RngTracker
    from lmcore.accelerator.staging import CheckpointStager
    from lmcore.config.section import Config
    from lmcore.plugin import PluginSet, Selection
    from lmcore.runtime.launch.rank import RankInfo
    from lmcore.runtime.process.store import Rendezvous

__all__ = ["Runtime", "start_runtime"]


@dataclass(frozen=True)
class Runtime:
    """What a process trains with.

    Attributes:
        rank: This process's place.
        selection: Which plugin was chosen, and why.
        device: Its device.
        rng: The device's random numbers.
        precision: Dtypes of the run; verified to be in force.
        recompute: How layers run in training; verified to be exact.
        placement: Which layers it applies to.
        stager: How tensors come to the host before they are saved.
        ops: The op table; binds happen when the model is built.
        processes: The connected processes of the run; None where this is the only one.
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
            "checkpoint_stager": self.stager.name,
            "rank": self.rank.to_dict(),
            "comm_backend": self.processes.backend.name if self.processes else None,
        }


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
        config: The run's settings.
        plugins: The plugins found by the launcher.
        selection: The launcher's decision.
        rank: This process's place.
        rendezvous: How the processes of the run found each other; None for a single one.

    Raises:
        ConfigError: The device cannot run the configuration; all its problems at once.
        DeviceError: A policy is not in force, or random numbers are not restored; the device has
            no way to other processes, or not all of them have it.
        PluginError: The plugin broke its contract.
        RunError: The processes differ, or one of them stopped.
    """
    import torch

    if rendezvous is not None:
        agree_on_device(rendezvous, selection, plugins)
        agree_on_versions(rendezvous, selection, plugins)

    asked = config.accelerator
    if asked.num_threads is not None:
        torch.set_num_threads(asked.num_threads)
    device = create_device(plugins, selection, config)
    device.set_current()
    problems = [
        LmcoreError(problem.what, why=problem.why, hint=problem.hint)
        for problem in validate_config(plugins, selection, device, config)
    ]
    if problems:
        raise ConfigError.collect(problems)
    rng = device.rng_tracker()
    rng.verify()
    policies = start_policies(config, plugins, selection, device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_deterministic(wanted=asked.deterministic))
        processes, backend = None, config.parallel.distributed_backend
        if rendezvous is not None:
            timeout = config.parallel.distributed_timeout_minutes * 60
            processes = stack.enter_context(
                start_processes(
                    plugins, selection, device, rendezvous, timeout=timeout, wanted=backend
                )
            )
        elif backend is not None:  # nobody is there to exchange with; a mistake shows all the same
            backend_of(plugins, selection, device, backend)
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
                preferences=parse_preferences(asked.ops),
                strict=asked.strict_ops,
                deterministic=asked.deterministic,
            ),
            processes=processes,
        )


@contextlib.contextmanager
def _deterministic(*, wanted: bool) -> Iterator[None]:
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
