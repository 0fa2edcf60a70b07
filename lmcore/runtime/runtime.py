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

from lmcore.accelerator.op import parse_preferences
from lmcore.errors import ConfigError, LmcoreError
from lmcore.plugins import (
    build_op_table,
    choose_precision,
    choose_recompute,
    create_device,
    precision_policies,
    recompute_policies,
    validate_config,
)

if TYPE_CHECKING:
    from lmcore.accelerator.device import Device
    from lmcore.accelerator.op_table import OpTable
    from lmcore.accelerator.precision import PrecisionPolicy
    from lmcore.accelerator.recompute import RecomputePolicy
    from lmcore.config.section import Config
    from lmcore.plugins import PluginSet, Selection
    from lmcore.runtime.rank import RankInfo

__all__ = ["Runtime", "start_runtime"]


@dataclass(frozen=True)
class Runtime:
    """What a process trains with.

    Attributes:
        rank: This process's place.
        selection: Which plugin was chosen, and why.
        device: Its device.
        precision: Dtypes of the run; verified to be in force.
        recompute: How blocks run in training.
        ops: The op table; binds happen when the model is built.
    """

    rank: RankInfo
    selection: Selection
    device: Device
    precision: PrecisionPolicy
    recompute: RecomputePolicy
    ops: OpTable

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
            "precision": self.precision.name,
            "recompute": self.recompute.name,
            "rank": self.rank.to_dict(),
        }


@contextlib.contextmanager
def start_runtime(
    config: Config, plugins: PluginSet, selection: Selection, rank: RankInfo
) -> Iterator[Runtime]:
    """Create the device and everything that depends on it; torch is imported here.

    Args:
        config: The run's settings.
        plugins: The plugins found by the launcher.
        selection: The launcher's decision.
        rank: This process's place.

    Raises:
        ConfigError: The device cannot run the configuration; all its problems at once.
        PluginError: The plugin broke its contract.
    """
    import torch

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
    precision = choose_precision(precision_policies(plugins, selection, device), asked.precision)
    precision.verify()
    if precision.loss_scaling:
        raise ConfigError(
            f"precision `{precision.name}` needs a loss scale, which this version does not have",
            hint="use `--precision bf16` or `--precision fp32`",
        )
    with _deterministic(wanted=asked.deterministic):
        yield Runtime(
            rank=rank,
            selection=selection,
            device=device,
            precision=precision,
            recompute=choose_recompute(
                recompute_policies(plugins, selection, device), asked.recompute
            ),
            ops=build_op_table(
                plugins,
                selection,
                device,
                preferences=parse_preferences(asked.ops),
                strict=asked.strict_ops,
                deterministic=asked.deterministic,
            ),
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
