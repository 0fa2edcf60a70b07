"""The hooks of the CPU plugin; torch-free until a device is created."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lmcore.contract import (
    Check,
    CheckpointStager,
    CommBackend,
    Device,
    OpImpl,
    PluginInfo,
    Probe,
    Problem,
    buffer_stager,
)
from lmcore.hookspecs import hookimpl

if TYPE_CHECKING:
    from lmcore.config.section import Config
    from lmcore.contract.registry import CommandRegistry, OptionRegistry

logger = logging.getLogger(f"lmcore.{__name__}")  # of the lines that lmcore formats


@hookimpl
def lmcore_plugin_info() -> PluginInfo:
    """Return the plugin's name and the versions that it supports."""
    return PluginInfo(
        name="cpu",
        api=">=1.3,<2",
        torch=">=2.8",
        provides=("cpu",),
        summary="the host's processors, through PyTorch",
    )


@hookimpl
def lmcore_probe() -> Probe:
    """Return the cores and the memory that this process may use."""
    from lmcore_cpu.probe import probe

    return probe()


@hookimpl
def lmcore_launch_env(probe: Probe, rank_info: Mapping[str, Any]) -> dict[str, str]:
    """Limit the busy waiting of threads; divide the cores among the workers of this host.

    By default a waiting OpenMP thread keeps its core busy for about a millisecond.  With another
    busy process on the machine that time is lost to a thread that has work, at every parallel loop.
    """
    from lmcore_cpu.settings import SPIN_COUNT

    wanted = {"GOMP_SPINCOUNT": SPIN_COUNT}
    workers = int(rank_info.get("local_world_size", 1))
    if workers > 1:
        wanted["OMP_NUM_THREADS"] = str(max(1, int(probe.facts["cores"]) // workers))
    return wanted


@hookimpl
def lmcore_add_options(registry: OptionRegistry) -> None:
    """Add the flags `--cpu-...`."""
    from lmcore_cpu.settings import CpuSection

    registry.add(CpuSection)


@hookimpl
def lmcore_add_commands(registry: CommandRegistry) -> None:
    """Add `lmcore cpu-threads`."""
    summary = "Measure training's products with each number of threads."
    registry.add("cpu-threads", "lmcore_cpu.threads:run", summary)


@hookimpl
def lmcore_create_device(config: Config) -> Device:
    """Return the host as a device."""
    from lmcore_cpu.device import create_device
    from lmcore_cpu.settings import settings_of

    return create_device(settings_of(config))


@hookimpl
def lmcore_comm_backends() -> list[CommBackend]:
    """Offer gloo, which comes with torch."""
    from lmcore_cpu.comm import gloo

    return [gloo()]


@hookimpl
def lmcore_op_impls() -> list[OpImpl]:
    """Offer the kernels that are faster than the references."""
    from lmcore_cpu.kernels import kernels

    return kernels()


@hookimpl
def lmcore_checkpoint_stagers(device: Device) -> list[CheckpointStager]:
    """Offer saving in place, and buffers for asynchronous saves."""
    in_place = CheckpointStager("in-place", dict, priority=10, copies=False)
    return [in_place, buffer_stager(device)]


@hookimpl
def lmcore_validate_config(config: Config) -> list[Problem]:
    """Refuse to compile on a host without the compiler that torch.compile starts."""
    from lmcore_cpu.host import cpp_compiler

    if config.training.compile and cpp_compiler() is None:
        return [
            Problem(
                "`--compile` needs a C++ compiler on the CPU, and none was found",
                why="torch.compile writes C++ for the CPU; looked for `$CXX`, `g++` and `clang++`",
                hint="install g++ (such as by `apt-get install g++`) or leave `--compile` out",
            )
        ]
    return []


@hookimpl
def lmcore_doctor() -> list[Check]:
    """Check torch's CPU build, its threads and speed, memory and compiler."""
    from lmcore_cpu.doctor import checks

    return checks()


@hookimpl
def lmcore_run_start(run: Mapping[str, Any]) -> None:
    """Warn of a precision without instructions, and of more threads than cores; name a faster."""
    import torch

    from lmcore.base.errors import counted
    from lmcore_cpu.host import cpu_count
    from lmcore_cpu.precision import faster_precision, slow_precision

    config = run.get("plan", {}).get("config", {})
    precision = config.get("accelerator", {}).get("precision")
    slow = slow_precision(precision)
    if run["rank"] == 0 and slow is not None:
        logger.warning("%s", slow)
    own = config.get("plugins", {}).get("cpu", {})
    faster = faster_precision(precision, own.get("peak_seconds", 0)) if run["rank"] == 0 else None
    if faster is not None:
        logger.info("%s", faster)
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads, cores = torch.get_num_threads(), cpu_count()
    if run["rank"] == 0 and workers * threads > cores:
        fitting = max(1, cores // workers)
        fix = f"--num-threads {fitting}" if threads > fitting else f"--nproc-per-node {cores}"
        logger.warning(
            "%s with %s %s %s; use `%s`",
            *(counted(workers, "process", "processes"), counted(threads, "thread")),
            *("shares" if workers == 1 else "each share", counted(cores, "core"), fix),
        )
